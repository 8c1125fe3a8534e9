"""fe.convert's producers on every family, and beside other people's code: hooks, adapters, norms of no library.

Which modules they are, who reads them, and the numbers of fuse=False.  How near to float64: helpers/hf_fusing.py.
Checkpoints, generate() and graphs of all of them: tests/hf.  The tests of other people's code give it two copies of a
model, with fuse=False and by default: both compute the same (`alike`: but for the order of FP32 sums).
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from hf_families import FAMILIES, MORE
from hf_fusing import alike, block, exact, near, pair, producers, sources, step
from probe_modules import Function, Gated, K, LayerNorm1P, Packed, Rms, TimmGluMlp, by_hand
from support import Net, converted, same, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.bench.steps import saved_bytes
from fp8engine.convert import swap
from fp8engine.errors import FusionWarning, StrictError
from fp8engine.ops import casts as ops
from fp8engine.ops import norm_act, twins

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

LLAMA = FAMILIES["llama"]
# The layers of a block, less attention's last, that read what no producer has made, by hand.
EXPERTS = {"gate_up_proj", "down_proj"}  # of a reshaped norm, and in another order
UNREAD = {
    "opt-350m": {"fc1"},  # a reshaped norm
    **{name: {"k", "v"} for name in ("t5", "t5-v1.1")},  # across, of the encoder's last norm, which is in no block
    "whisper": {"k_proj", "v_proj"},
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), EXPERTS),
    "qwen2_moe": EXPERTS | {"gate_proj", "up_proj"},  # of the shared expert
    **{name: {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"} for name in ("olmo2", "olmo3")},  # norms at the end
}
OUT = (
    *("o_proj", "out_proj", "out_lin", "attention.dense", "self_attn.dense", "attention.output.dense"),
    *("attn.c_proj", "attn.o", "Attention.o", "attn.Wo"),
)
# Of the second block, by hand: producer -> who reads it.
READ = {
    "llama": {
        "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp": ["mlp.down_proj"],
    },
    "gpt2": {"ln_1": ["attn.c_attn"], "ln_2": ["mlp.c_fc"], "mlp.act": ["mlp.c_proj"]},
    "phi": {
        "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"],
        "mlp.activation_fn": ["mlp.fc2"],
    },
    "bert": {
        "output.LayerNorm": ["attention.self.query", "attention.self.key", "attention.self.value"],
        "attention.output.LayerNorm": ["intermediate.dense"],
        "intermediate.intermediate_act_fn": ["output.dense"],
    },
}


def members(model: nn.Module) -> list[tuple]:
    """Its parameters and its modules, by name."""
    parameters = [(key, id(p), p.shape, p.dtype) for key, p in model.named_parameters(remove_duplicate=False)]
    return [*parameters, *((key, id(module)) for key, module in model.named_modules())]


@pytest.mark.few(24)
@pytest.mark.parametrize("name", FAMILIES | MORE)
def test_producers_numbers_counts_and_what_is_left_alone(name: str):
    family = (FAMILIES | MORE)[name]
    plain = family.build_smooth()
    one, two = converted(copy.deepcopy(plain), fuse=False), copy.deepcopy(plain)
    before, state = members(two), {key: value.clone() for key, value in two.state_dict().items()}
    converted(two)
    assert members(two) == before
    assert list(two.state_dict()) == list(state)
    assert same(list(two.state_dict().values()), list(state.values()))
    batch = family.batch(rows=32)
    want = exact(copy.deepcopy(plain), batch)
    near(family, want, step(one, batch))
    near(family, want, step(two, batch))
    given = [[key for key, p in model.named_parameters() if p.grad is not None] for model in (one, two)]
    assert given[0] == given[1] != []  # none for the vision tower, which no text reaches
    assert all(p.grad.isfinite().all() for p in two.parameters() if p.grad is not None)
    for row, other in zip(fe.inspect(one).layers, fe.inspect(two).layers, strict=True):
        assert [row[key] for key in ("name", "rows", "recipe")] == [other[key] for key in ("name", "rows", "recipe")]
        for role, key in itertools.product(("input", "weight", "grad_output"), ("calls", "elements")):
            assert row[role].get(key) == other[role].get(key), (row["name"], role, key)
    assert producers(one) == []
    assert set(sources(one).values()) == {""}
    found = {key: by for key, by in sources(two).items() if name == "albert" or ".1." in key}
    alone = {key.rpartition(".")[2] for key, by in found.items() if not by and not key.endswith(OUT)}
    assert alone - {"pooler", "embedding_hidden_mapping_in"} == UNREAD.get(name, set())
    assert alike(family, [one, two], rows=32)


@pytest.mark.parametrize("name", READ)
def test_who_reads_which_producer(name: str):
    model = converted(FAMILIES[name].build())
    step(model, FAMILIES[name].batch())
    found = {layer.partition(".1.")[2]: by for layer, by in sources(model).items() if ".1." in layer and by}
    assert found == {layer: by for by, layers in READ[name].items() for layer in layers}
    told = fe.inspect(model).table()
    assert f"{sum(map(bool, sources(model).values()))} layers read what a norm, an activation or" in told


def test_what_is_no_norm_of_a_layers_input_or_computes_something_else_stays_as_it_is():
    """Norms over the heads of q and k; the last norm, before a head in 16 bits; an MLP with dropout between."""
    names = producers(converted(FAMILIES["qwen3"].build()))
    assert not [name for name in names if name.endswith(("q_norm", "k_norm", "model.norm"))]
    dropping = producers(converted(FAMILIES["t5-v1.1"].build(dropout_rate=0.1)))
    assert not [name for name in dropping if "DenseReluDense" in name and not name.endswith("act")]
    assert [name for name in dropping if "layer_norm" in name]


def casts(model: Any, batch: dict) -> dict[str, int]:
    """How often a training step calls each way of writing FP8, and norms and activations in 16 bits."""
    seen: Counter[str] = Counter()
    ways, made = ["quantize", "cast_transpose"], ["norm_quantize", "act_quantize"]
    with pytest.MonkeyPatch.context() as patch:
        for where, names in ((ops, ways), (twins, ways), (norm_act, [*made, *(f"{name}_backward" for name in made)])):
            for name in names:
                real: Any = getattr(where, name)
                patch.setattr(where, name, lambda *given, r=real, n=name, **kw: (seen.update([n]), r(*given, **kw))[1])
        model(**batch).loss.backward()
    return dict(seen)


def test_casts_and_bytes_of_a_tiny_llama():
    """The numbers of docs/huggingface.md: one block, BF16, 32 sequences of 12.

    Either way 7 weights are cast, x of attention, of out, of the MLP and of down, and 7 dy: 18.
    """
    batch, counts, sizes = LLAMA.batch(rows=32), [], []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = converted(LLAMA.build(num_hidden_layers=1).bfloat16(), fuse=fuse)
        counts.append(casts(model, batch))
        sizes.append(saved_bytes(model, lambda model=model: model(**batch)))
    made = {"norm_quantize": 2, "act_quantize": 1, "norm_quantize_backward": 2, "act_quantize_backward": 1}
    assert counts == [{"quantize": 18}, {"quantize": 18, **made}]
    assert sizes[1] / sizes[0] == pytest.approx(0.77, abs=0.02)


def test_where_nothing_is_recognised_it_is_said_once_and_refused_when_strict(monkeypatch: pytest.MonkeyPatch):
    """A norm of another width than the layer reads; a function that the probe does not know."""
    monkeypatch.setattr(swap, "why_emulated", lambda *arguments: None)  # strict refuses that too
    make = lambda: nn.Sequential(nn.LayerNorm(16), nn.Flatten(1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))  # noqa: E731
    model = make()
    with pytest.raises(StrictError, match="strict=True: fuse=True: no norm, activation or MLP that the probe knows"):
        fe.convert(model, "rowwise", fuse=True, strict=True)
    assert [type(m) for m in model.modules()] == [type(m) for m in make().modules()], "nothing was changed"
    with pytest.warns(FusionWarning, match="fuse=True: no norm, activation or MLP that the probe knows") as told:
        converted(model, fuse=True)
    assert len([w for w in told if w.category is FusionWarning]) == 1
    converted(make())  # by default nothing is said
    fe.convert(Net(), "rowwise", fuse=True, strict=True)


def test_layers_in_another_precision():
    family, overrides = LLAMA, {"*.k_proj": "bf16", "*.0.mlp.down_proj": "bf16"}
    models = [converted(copy.deepcopy(m), overrides=overrides, fuse=f) for m in [family.build()] for f in (False, None)]
    assert alike(family, models)
    found = sources(models[1])
    layers = ("0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj", "0.mlp.down_proj", "1.mlp.down_proj")
    told = [found[f"model.layers.{layer}"] for layer in layers]
    assert told == ["input_layernorm", "", "input_layernorm", "", "mlp"]
    assert "model.layers.0.mlp" not in producers(models[1])


PLACES = ["input_layernorm", "self_attn", "self_attn.q_proj", "mlp", "mlp.act_fn", "mlp.down_proj", ""]
first = lambda m, args, kw: (*args, *kw.values())[0]  # noqa: E731 - of what a module is called with
HOOKS: dict[str, Any] = {
    "forward": lambda m, note: m.register_forward_hook(lambda m, args, y: note(y)),
    "forward pre": lambda m, note: m.register_forward_pre_hook(lambda *given: note(first(*given)), with_kwargs=True),
    "backward": lambda m, note: m.register_full_backward_hook(lambda m, gi, go: note(go[0])),
    "backward pre": lambda m, note: m.register_full_backward_pre_hook(lambda m, go: note(go[0])),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_sees_what_it_saw(place: str, hook: str):
    models, seen = pair("llama"), ([], [])
    for model, kept in zip(models, seen, strict=True):
        note = lambda x, kept=kept: kept.append(x[0] if isinstance(x, tuple) else x)  # noqa: E731
        HOOKS[hook](block(model).get_submodule(place), note)
    assert alike(LLAMA, models, seen=seen)
    assert [type(x) for kept in seen for x in kept] == [torch.Tensor] * 2
    found = sources(models[1])
    if "backward" not in hook:  # torch makes other tensors of what a module with those takes and returns
        assert found["model.layers.0.self_attn.v_proj"] == "input_layernorm", "codes are read all the same"
        assert bool(found["model.layers.0.mlp.down_proj"]) is (place != "mlp.act_fn"), "there its own forward runs"


CHANGES: dict[str, Any] = {
    "another result": ("input_layernorm", lambda m: m.register_forward_hook(lambda m, args, y: 2 * y)),
    "its result, in place": ("input_layernorm", lambda m: m.register_forward_hook(lambda m, x, y: _double(y))),
    "what q reads, between": ("self_attn.q_proj", lambda m: m.register_forward_hook(lambda m, x, y: _double(*x))),
    "what the MLP multiplies": ("mlp.act_fn", lambda m: m.register_forward_hook(lambda m, args, y: 2 * y)),
    "the product": ("mlp.down_proj", lambda m: m.register_forward_pre_hook(lambda m, x: (2 * x[0],))),
    "a gradient": ("post_attention_layernorm", lambda m: m.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))),
}


def _double(x: torch.Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_hook_changes_is_what_follows(change: str):
    models, (place, put), batch = pair("llama"), CHANGES[change], LLAMA.batch()
    plain = step(models[1], batch)
    for model in models:
        put(block(model).get_submodule(place))
    assert alike(LLAMA, models)
    models[1].zero_grad()
    assert not same(step(models[1], batch)[1:], plain[1:])


def test_outputs_that_transformers_captures():
    """Its hooks on attention stay after the first call that asked for attentions."""
    model = converted(LLAMA.build(attn_implementation="eager"), "rowwise")
    batch = LLAMA.batch()
    want = step(model, batch)
    model.zero_grad()
    captured = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [type(x) for x in (*captured.attentions, *captured.hidden_states)] == [torch.Tensor] * 5
    assert model.model.layers[0].self_attn._forward_hooks
    assert same(want, step(model, batch))


@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_adapters_around_layers_that_read_producers(order: str):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    models = []
    for fuse in (False, None):
        torch.manual_seed(2)
        model = LLAMA.build() if order == "adapters first" else converted(LLAMA.build(), "rowwise", fuse=fuse)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        models.append(model if order == "convert first" else converted(model, "rowwise", fuse=fuse))
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1) for model in models]
    assert alike(LLAMA, models)
    for optimizer in optimizers:
        optimizer.step()
    assert alike(LLAMA, models), "trained alike"
    found = {name.removeprefix("base_model.model.model.layers."): by for name, by in sources(models[1]).items()}
    assert found["1.self_attn.q_proj.base_layer"] == found["1.self_attn.k_proj"] == "input_layernorm"
    assert found["1.mlp.gate_proj.base_layer"] == found["1.mlp.up_proj"] == "post_attention_layernorm"
    assert found["1.mlp.down_proj.base_layer"] == "mlp"
    if order == "convert first":
        merged = [model.merge_and_unload().requires_grad_() for model in models]
        assert alike(LLAMA, merged)
        assert sources(merged[1])["model.layers.1.mlp.down_proj"] == "mlp"


@pytest.mark.parametrize("mlp", [Gated, Packed, TimmGluMlp, lambda: TimmGluMlp(nn.SiLU, gate_last=False)])
@pytest.mark.parametrize("norm", [Rms, lambda: LayerNorm1P(K), lambda: nn.RMSNorm(K, 1e-6, False)])
def test_foreign_modules_are_recognised_by_their_numbers(norm: Callable, mlp: Callable):
    plain, found = nn.Sequential(norm(), mlp()), []
    with torch.no_grad():
        for parameter in plain[0].parameters():
            parameter.uniform_(0.2, 0.5)
    for fuse in (False, None):
        model = converted(copy.deepcopy(plain), "rowwise", fuse=fuse)
        x = torch.linspace(-2, 3, 24 * K).view(2, 12, K).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert producers(model) == ["0", "1"]
    # The order of FP32 sums may move a few of 1152 codes to the other side of a rounding boundary, each by 2^-3 of
    # itself: of 28 dB a fiftieth.
    assert min(sqnr(one, other) for one, other in zip(*found, strict=True)) > 40


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("at", [1, 4, 5])
def test_of_a_rank_that_the_probe_has_not_found_alike_the_own_forward_runs(at: int, rank: int):
    torch.manual_seed(0)
    norm = Rms(formula=lambda m, x: by_hand(m, x) * (1 + (x.dim() == at)))
    mlp = Gated(before=lambda x: x.flatten(1, 2) if x.dim() == at == 4 else x)
    act = Function(lambda x: nn.functional.gelu(x) + (x.dim() == at))
    plain, x = nn.Sequential(norm, mlp, act, nn.Linear(K, K)), torch.randn(*[2] * (rank - 1), K)
    unfused, fused = (converted(copy.deepcopy(plain), "rowwise", fuse=fuse) for fuse in (False, None))
    assert producers(fused) == ["0", "1", "2"]
    assert fused(x).shape == unfused(x).shape
    # As below, of at most 16 * 48 codes: one that moves is a part of 28 dB.
    assert sqnr(fused(x), unfused(x)) > 40


class LPLayerNorm(nn.LayerNorm):
    """MosaicML's, and Nemotron's: its result has autocast's dtype."""

    def forward(self, x):
        return super().forward(x).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype)


def test_a_norm_that_follows_autocast_does_so():
    model, x = converted(nn.Sequential(LPLayerNorm(K), nn.Linear(K, K))), torch.randn(4, K)
    assert "fp8" in vars(model[0](x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model[0](x), LPLayerNorm(K)(x)), "in BF16"


@pytest.mark.parametrize("part", [nn.GELU, Rms])
def test_a_result_has_its_inputs_order_of_memory(part: Callable):
    """Code behind it may call `view`, as groups of channels do."""
    model, x = converted(nn.Sequential(part(), nn.Linear(K, K))), torch.randn(2, K, 6).mT
    assert producers(model) == ["0"]
    assert model[0](x).stride() == x.stride()
    assert "fp8" in vars(model[0](torch.randn(2, 6, 2 * K)[..., :K])), "a slice is in order"


def test_an_mlp_that_takes_a_residual_runs_its_own_forward():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2, hidden_dropout=0.0)
    torch.manual_seed(1)
    plain = transformers.BloomForCausalLM(config).eval()
    models = [converted(copy.deepcopy(plain), "rowwise", fuse=fuse) for fuse in (False, None)]
    assert alike(LLAMA, models)
    found = [name.removeprefix("transformer.h.0.") for name in producers(models[1])]
    assert found == ["input_layernorm", "post_attention_layernorm", "mlp.gelu_impl"]


def test_a_hook_on_the_dropout_inside_an_mlp():
    for name, kind in (("t5", "T5DenseActDense"), ("t5-v1.1", "T5DenseGatedActDense")):
        models, seen = pair(name), ([], [])
        for model, kept in zip(models, seen, strict=True):
            for module in model.modules():
                if type(module).__name__.endswith(kind):
                    module.dropout.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
                    module.dropout.register_forward_pre_hook(lambda m, args, kept=kept: kept.append(*args))
        assert alike(FAMILIES[name], models, seen=seen)
        assert [len(kept) for kept in seen] == [2, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_it_goes_on(error: type[BaseException]):
    def fail(module, args):
        raise error

    models = pair("llama")
    for model in models:
        with block(model).mlp.register_forward_pre_hook(fail), pytest.raises(error):
            model(**LLAMA.batch())
    assert alike(LLAMA, models)
