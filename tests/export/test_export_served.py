"""Exports as other programs read them: recipes that differ by layer, scales that servers join, what auto decided."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from exports import answers_alike, quantization, read_by_transformers
from reading_models import Eva, Model
from safetensors.torch import load_file
from torch import nn

import fp8engine as fe
from fp8engine.convert.select import weight_of
from fp8engine.errors import ConversionError, StateError
from fp8engine.export.hf import Fp8EngineConfig, export, load
from fp8engine.export.layers import choose_layers
from fp8engine.numerics.recipe import Auto

LAYER = "model.layers.0."
Q, K, V = (f"{LAYER}self_attn.{name}_proj" for name in "qkv")
OUT, GATE, UP, DOWN = (f"{LAYER}{name}_proj" for name in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down"))
ONE = torch.ones(())
LAYERS = (Q, K, V, OUT, GATE, UP, DOWN)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight_of(model.get_submodule(name)).detach().float() for name in LAYERS}


def decibels(read: torch.Tensor, weight: torch.Tensor) -> float:
    return (10 * torch.log10(weight.square().sum() / (read - weight).square().sum())).item()


def off_by(one: Any, other: Any, ids: torch.Tensor) -> float:
    """How far the first model's logits are from the second's, in norms of those."""
    with torch.no_grad():
        want = other(ids).logits
        return float((one(ids).logits - want).norm() / want.norm())


# A converted FP32 layer's result is rounded to BF16, as on a card; a served one's is not.  The codes that follow differ
# in some places, and a cast's own noise is 31.5 dB = 2.7 %: some layers of that.  A wrong scale gives 50 % and more.
OTHER_CODES = 0.1


def scales(folder: Path) -> dict[str, torch.Tensor]:
    held = load_file(folder / "model.safetensors")
    return {name.rpartition(".")[0]: tensor for name, tensor in held.items() if "weight_scale" in name}


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_layers_that_servers_fuse_share_a_scale(tmp_path: Path, layout: str):
    """k has half of q's amax, v 0.73 of it, as in shared/lab/distributed/t13_joint.py.  A server that rounds all codes
    to the largest scale finds them on it, and changes none.  No layer is far from the 31.5 dB that E4M3 gives Gaussian
    weights under any scale that keeps them normal; rounded a second time v would have 28.
    """
    torch.manual_seed(0)
    model: Any = tiny_models.llama_of_blocks()
    with torch.no_grad():
        for name, ratio in ((K, 0.5), (V, 0.73), (UP, 0.3)):
            model.get_submodule(name).weight *= ratio
    export(model, tmp_path / "out", "current", layout=layout)
    held, found = load_file(tmp_path / "out" / "model.safetensors"), scales(tmp_path / "out")
    weights = weights_of(model)
    for group in ((Q, K, V), (GATE, UP), (OUT,), (DOWN,)):
        amax = max(weights[name].abs().max() for name in group)
        assert {float(found[name]) for name in group} == {float(ONE / (448 * ONE / amax))}
        largest = max(found[name] for name in group)
        for name in group:
            real = held[f"{name}.weight"].float() * found[name]
            again = (real / largest).clamp(-448, 448).to(torch.float8_e4m3fn)  # requantize_with_max_scale
            assert torch.equal(again.float(), held[f"{name}.weight"].float())
            assert decibels(real, weights[name]) > 31.0
    if layout == "compressed-tensors":
        read = read_by_transformers(tmp_path / "out")
        assert min(decibels(read[f"{name}.weight"], weights[name]) for name in LAYERS) > 31.0


def test_a_group_shares_only_what_is_fused(tmp_path: Path):
    """In our own layout nobody fuses, and codes stay those of training; of another width, k and v go without q."""
    model: Any = tiny_models.llama_of_blocks()
    with torch.no_grad():
        model.get_submodule(K).weight *= 0.5
    export(model, tmp_path / "ours", "current", layout="fp8engine")
    found = scales(tmp_path / "ours")
    assert float(found[K]) < 0.7 * float(found[Q])
    model.model.layers[0].self_attn.q_proj = nn.Linear(256, 128, bias=False)
    export(model, tmp_path / "out", "current")
    found = scales(tmp_path / "out")
    assert found[K] == found[V] != found[Q]


def odd_sides() -> Any:
    """Whole blocks in q, k, v, o; up, gate [320, 128] and down [128, 320] are none."""
    torch.manual_seed(0)
    return tiny_models.llama(hidden_size=128, intermediate_size=320, num_key_value_heads=2, num_hidden_layers=1).eval()


def test_blocks_that_are_not_whole_become_rows(tmp_path: Path, ids):
    """transformers read 320 rows in 3 scales as blocks of 107 rows, and vLLM refused them.  What transformers reads is
    what was written, and E4M3's 31.5 dB everywhere."""
    model = odd_sides()
    report = export(model, tmp_path / "out", "blockwise")
    assert (report.layout, report.recipe) == ("compressed-tensors", "blockwise, rowwise")
    assert {row["name"] for row in report.layers if row["recipe"] == "rowwise"} == {GATE, UP, DOWN}
    (note,) = [note for note in report.notes if "scale per row" in note]
    assert f"{GATE} and 2 more: its sides are no multiples of the block's" in note
    groups = quantization(tmp_path / "out")["config_groups"].values()
    found = [(group["weights"]["strategy"], group["targets"]) for group in groups]
    assert found == [("block", [Q, K, V, OUT]), ("channel", [GATE, UP, DOWN])]
    found = scales(tmp_path / "out")
    assert (found[Q].shape, found[UP].shape, found[DOWN].shape) == ((1, 1), (320, 1), (128, 1))
    read, ours = read_by_transformers(tmp_path / "out"), load(tmp_path / "out")
    for name, weight in weights_of(model).items():
        layer: Any = ours.get_submodule(name)
        assert torch.equal(read[f"{name}.weight"], layer.weight.float() * layer.scale), "one block, or rows"
        assert decibels(read[f"{name}.weight"], weight) > 31.0
    fe.convert(model, "blockwise", overrides={"*.mlp.*": "rowwise"})
    assert off_by(ours, model, ids) < OTHER_CODES
    ours.save_pretrained(tmp_path / "again")
    assert answers_alike(load(tmp_path / "again"), ours, ids)


ROWS = lambda c: c["config_groups"]["group_1"]  # noqa: E731 - a line each below
EDITED: list[tuple[str, Callable[[dict], Any]]] = [
    ("itself: weights per tensor, recipe 'rowwise", lambda c: ROWS(c)["weights"].update(strategy="tensor")),
    ("a group of config_groups", lambda c: ROWS(c).update(targets=["re:.*mlp.*"])),
    ("a group of config_groups", lambda c: ROWS(c).update(targets=["Linear"])),
    ("static in some groups only", lambda c: ROWS(c)["input_activations"].update(dynamic=False)),
    ("recipes is", lambda c: c["fp8engine"].update(recipes=[{"layers": [Q]}])),
]


def test_groups_that_do_not_fit_or_are_anothers(tmp_path: Path, ids, damage):
    """vLLM and compressed-tensors divide by amax / 448: a power of two is only where our own words say so."""
    export(odd_sides(), tmp_path / "out", fe.blockwise(power_of_2=False))
    before, written = load(tmp_path / "out"), (tmp_path / "out" / "config.json").read_text()
    for told, change in EDITED:
        damage(tmp_path / "out", config=change)
        with pytest.raises(StateError, match=told):
            load(tmp_path / "out")
        (tmp_path / "out" / "config.json").write_text(written)
    damage(tmp_path / "out", config=lambda c: c.pop("fp8engine"))
    assert answers_alike(load(tmp_path / "out"), before, ids)


def test_names_that_transformers_changes_while_it_writes(tmp_path: Path):
    """Llava's "model.language_model.layers" is "language_model.model.layers" in the files; groups name the model's."""
    text = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=320, num_hidden_layers=1, num_attention_heads=2
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    kind: Any = transformers.LlavaForConditionalGeneration
    kind(config).save_pretrained(tmp_path / "plain")
    model = kind.from_pretrained(tmp_path / "plain").eval()
    report = export(model, tmp_path / "out", "blockwise")
    assert report.recipe == "blockwise, rowwise"
    names = {row["name"]: row["recipe"] for row in report.layers}
    assert not names.keys() & scales(tmp_path / "out").keys()
    ours, theirs = load(tmp_path / "out"), kind.from_pretrained(tmp_path / "out")
    theirs(input_ids=torch.tensor([[1, 2]]))
    for name, recipe in names.items():
        layer: Any = ours.get_submodule(name)
        assert layer.numerics.recipe.name == recipe
        scale = layer.scale if recipe == "rowwise" else layer.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(theirs.get_submodule(name).weight, layer.weight.float() * scale)


def test_a_whole_layer_follows_the_one_it_is_fused_with(tmp_path: Path):
    """k and v have 64 rows, half a block; q is whole, and all three become one matmul."""
    model = tiny_models.llama(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    report = export(model, tmp_path / "out", "blockwise")
    recipes = {row["name"]: row["recipe"] for row in report.layers}
    assert recipes == dict.fromkeys((Q, K, V), "rowwise") | dict.fromkeys((OUT, GATE, UP, DOWN), "blockwise")
    (note,) = [note for note in report.notes if "scale per row" in note]
    assert f"{Q}: vLLM runs it as one matmul with {K}, whose scales differ; {K} and 1 more: its sides are" in note


def test_blocks_that_are_not_whole_in_a_layout_of_blocks(tmp_path: Path, ids):
    model = odd_sides()
    with pytest.raises(ConversionError, match=r"no scales per row, which these layers need: \S+gate_proj and 2 more"):
        export(model, tmp_path / "out", "blockwise", layout="fp8")
    assert list(tmp_path.iterdir()) == []
    export(model, tmp_path / "ours", "blockwise", layout="fp8engine")
    assert scales(tmp_path / "ours")[DOWN].shape == (1, 3)
    fe.convert(model, "blockwise")
    assert answers_alike(load(tmp_path / "ours"), model, ids)


def test_recipes_that_differ_by_layer(tmp_path: Path, ids):
    """A fused group takes the finest scales that one of its layers has; the others keep what was asked for."""
    model: Any = tiny_models.llama_of_blocks().eval()
    fe.convert(model, "current", overrides={"*.v_proj": "rowwise", "*.down_proj": "blockwise"})
    with pytest.raises(ConversionError, match=r"'fp8' has no scales per row, which these layers need: \S+q_proj"):
        export(model, tmp_path / "out", layout="fp8")
    with pytest.raises(ConversionError, match=r"q_proj: activations='static' is one scale per tensor; recipe 'row"):
        export(model, tmp_path / "out", activations="static")
    report = export(model, tmp_path / "out")
    recipes = {row["name"]: row["recipe"] for row in report.layers}
    assert recipes == dict.fromkeys((Q, K, V), "rowwise") | dict.fromkeys((OUT, GATE, UP), "current") | {
        DOWN: "blockwise"
    }
    assert any(f"{Q} and 1 more: vLLM runs it as one matmul with {V}" in note for note in report.notes)
    read, ours = read_by_transformers(tmp_path / "out"), load(tmp_path / "out")
    for name, layer in ((name, ours.get_submodule(name)) for name in LAYERS):
        scale: Any = layer.scale if name != DOWN else layer.scale.repeat_interleave(128, 1)
        assert torch.equal(read[f"{name}.weight"], layer.weight.float() * scale)
        assert layer.numerics.recipe.name == recipes[name]
    other = tiny_models.llama_of_blocks()
    fe.convert(other, "blockwise", overrides={"*.o_proj": "current"})
    with pytest.raises(ConversionError, match=r"one recipe, and '\S+q_proj' has 'blockwise', '\S+o_proj' 'cur"):
        export(other, tmp_path / "blocks", layout="fp8")


def test_a_fused_group_is_in_fp8_or_not(tmp_path: Path):
    """vLLM raises "Found a different quantization schemes" for a group that is partly in 16 bits."""
    model = fe.convert(tiny_models.llama_of_blocks(), "current", overrides={"*.k_proj": "bf16"})
    report = export(model, tmp_path / "out")
    left = {row["name"]: row["reason"] for row in report.left}
    assert {Q, K, V} <= set(left)
    why = f"vLLM runs it as one matmul with {K}, which stays in 16 bits"
    assert left[Q] == left[V] == f"{why}; layout='fp8engine' keeps this layer in FP8"
    assert {row["name"] for row in report.layers} == {OUT, GATE, UP, DOWN}
    ours = export(model, tmp_path / "ours", layout="fp8engine")
    assert {Q, V} <= {row["name"] for row in ours.layers}


def trained_with_outliers() -> Any:
    """A model under auto after a few steps.  Every second row of o_proj is a million times smaller, and one E4M3 scale
    would turn them into zeros: auto takes a scale per row there, and per tensor elsewhere."""
    torch.manual_seed(0)
    model: Any = tiny_models.llama_of_blocks()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[::2] *= 1e-6
    fe.convert(model, fe.auto(interval=1))
    ids = torch.randint(1, 64, (4, 16))
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    return model.eval()


def test_what_auto_decided_is_written(tmp_path: Path, ids):
    model = trained_with_outliers()
    decided = {name: model.get_submodule(name).numerics.recipe for name in LAYERS}
    assert {recipe.name for recipe in decided.values()} == {"auto"}
    kinds = {name: type(recipe.weight.granularity).__name__ for name, recipe in decided.items()}
    assert len(set(kinds.values())) > 1, "the model must make auto choose by layer"
    report = export(model, tmp_path / "out")
    words = {"PerTensor": "current", "PerRow": "rowwise_exact", "PerBlock": "blockwise_exact"}
    assert {row["name"]: row["recipe"] for row in report.layers} == {name: words[kinds[name]] for name in LAYERS}
    read = read_by_transformers(tmp_path / "out")
    for name, weight in weights_of(model).items():
        assert decibels(read[f"{name}.weight"], weight) > 31.0
    export(model, tmp_path / "ours", layout="fp8engine")
    assert off_by(load(tmp_path / "ours"), model, ids) < OTHER_CODES


def test_auto_before_it_has_seen_anything(tmp_path: Path):
    with pytest.raises(ConversionError, match="recipe 'auto' decides from training steps, and a plain model has run n"):
        export(tiny_models.llama(), tmp_path / "out", "auto")
    with pytest.raises(ConversionError, match="recipe 'auto' decides from training steps"):
        Fp8EngineConfig("auto")
    with pytest.raises(ConversionError, match=r"has decided nothing yet for its 14 layers \(\S+q_proj the first\)"):
        export(fe.convert(tiny_models.llama(), "auto"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_auto_decided_and_no_checkpoint_holds(tmp_path: Path):
    """An input in E5M2: in our layout as decided, elsewhere by the nearest cast; a forward in 16 bits stays there."""
    model = trained_with_outliers()
    for name, change in (
        (OUT, {"input": fe.Cast(fe.E5M2)}),
        (DOWN, {"input": fe.Cast(fe.BF16), "weight": fe.Cast(fe.BF16)}),
    ):
        layer: Any = model.get_submodule(name)
        recipe = fe.Recipe(name="auto", **{"input": fe.Cast(fe.E4M3), "weight": fe.Cast(fe.E4M3), **change}, **BACKWARD)
        assert not isinstance(recipe, Auto)
        layer.numerics.adopt(recipe)
    report = export(model, tmp_path / "out")
    left = {row["name"]: row["reason"] for row in report.left}
    assert left[DOWN] == "auto decided on BF16 here"
    assert {row["name"]: row["recipe"] for row in report.layers}[OUT] == "rowwise_exact"
    want = f"{OUT}: auto decided on E5M2 per tensor for its input and E4M3 per tensor for its weight; the nearest"
    assert any(want in note for note in report.notes), report.notes
    read = read_by_transformers(tmp_path / "out")[f"{OUT}.weight"]
    assert decibels(read, weights_of(model)[OUT]) > 31.0  # a scale per row: E4M3's 31.6 dB
    ours = export(model, tmp_path / "ours", layout="fp8engine")
    assert {row["name"]: row["recipe"] for row in ours.layers}[OUT] == "auto"
    assert not any(OUT in note for note in ours.notes)
    served, ids = load(tmp_path / "ours"), torch.randint(1, 64, (2, 16))
    assert served.get_submodule(OUT).numerics.recipe.input == fe.Cast(fe.E5M2)
    assert off_by(served, model, ids) < OTHER_CODES


BACKWARD: dict[str, Any] = {
    "grad_output": fe.Cast(fe.BF16),
    "weight_for_dgrad": fe.Cast(fe.BF16),
    "input_for_wgrad": fe.Cast(fe.BF16),
}


@pytest.mark.parametrize(("kind", "left"), [("Falcon", set()), ("Mamba", {"dt_proj"})])
def test_families_with_code_of_their_own_beside_their_layers(tmp_path, kind: str, left: set[str]):
    """Falcon's layers are a subclass that computes the same; Mamba reads dt_proj's weight, which stays in 16 bits."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **({"num_attention_heads": 4} if kind == "Falcon" else {}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    ids = torch.arange(1, 17)[None]
    written = export(model, tmp_path, "rowwise")
    served, converted = load(tmp_path).eval(), fe.convert(model, "rowwise")
    assert {row["name"].rpartition(".")[2] for row in written.left} >= left | {"lm_head"}
    assert len(written.layers) == (8 if kind == "Falcon" else 6)
    assert off_by(served, converted, ids) < OTHER_CODES


def test_a_layer_that_the_first_forward_bypassed_is_written_in_16_bits():
    model, x = fe.convert(Model(Eva()), "rowwise"), torch.randn(4, 16)
    with pytest.warns(fe.errors.BypassWarning, match="1 converted layer"):
        model(x)
    _, decisions, _ = choose_layers(model, None, "auto")
    found = {decision.name: decision.reason for decision in decisions if decision.recipe is None}
    assert found == {"parts.0.qkv": "other code reads its weight and does not call it: written in 16 bits"}
