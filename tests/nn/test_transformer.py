"""fe.TransformerLayer: outputs and every gradient against float64, for each way of building it; as a module."""

from typing import Any

import pytest
import torch
from fused import assert_equal
from layer64 import exact_step, lively, step
from support import FP8_RECIPES, converted, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.autograd.attention import Cache, Rotary
from fp8engine.errors import ShapeError, UnknownName

H, F = 32, 48
GROUPED = fe.Heads(4, of_keys=2, theta=1e4, causal=True)
LLAMA: dict[str, Any] = {"heads": GROUPED, "activation": "swiglu", "bias": False, "norm": "rms", "eps": 1e-6}
BERT: dict[str, Any] = {"heads": 4, "placement": "post"}
FORMS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"heads": fe.Heads(4, causal=True), "activation": "gelu_tanh"},
    "bert": BERT,
    "post, rms, zero-centred": {**LLAMA, "placement": "post", "zero_centered": True},
    "phi": {"heads": GROUPED, "placement": "parallel shared", "activation": "gelu_tanh"},
    "neox": {"heads": GROUPED, "placement": "parallel", "zero_centered": True},
    "qwen2": {**LLAMA, "bias": ("q_proj", "k_proj", "v_proj")},
    "qwen3": {**LLAMA, "heads": fe.Heads(4, 1, width=16, theta=1e6, causal=True, qk_norm=1e-3)},
    "mistral": {**LLAMA, "heads": fe.Heads(4, 2, theta=1e4, causal=True, window=3)},
    "opt": {"heads": fe.Heads(2, causal=True), "activation": "relu", "eps": 1e-3},
}
# FP32 throughout: 2^-24 of each result (144 dB), a dozen roundings deep in forward, two in backward, sums of up to 48.
FP32_DB = 115.0
# Four matmuls deep in E4M3, of which two after the softmax and the activation: 28.5 - 10 log10(4) = 22.5 dB of what is
# added; a gradient also passes four casts of dy at 24 dB (E5M2): 10^-2.25 + 4 * 10^-2.4, 16.6 dB; 3 dB for the draw.
OUTPUT_DB, GRADIENT_DB = 19.5, 13.5


def make(form: str, recipe: Any, **more: Any) -> fe.TransformerLayer:
    return lively(fe.TransformerLayer(H, F, recipe=recipe, **{**FORMS[form], **more}))


def data(dtype=torch.float32, rows: int = 3, t: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, t, H).to(dtype), torch.randn(rows, t, H).to(dtype)


def assert_near(found: dict, wanted: dict, output: float, gradient: float) -> None:
    """By SQNR; the gradient of k's bias, which moves all scores of a query alike, is what cancelling leaves."""
    assert found.keys() == wanted.keys()
    reached = {name: sqnr(wanted[name], found[name]) for name in wanted if name != "self_attn.k_proj.bias"}
    low = {name: db for name, db in reached.items() if not db > (output if name == "y" else gradient)}
    assert not low, low


@pytest.mark.parametrize("form", FORMS)
def test_every_form_against_float64(form: str):
    layer, (x, dy) = make(form, "fp32"), data()
    assert_near(step(layer, x, dy), exact_step(layer, x, dy), FP32_DB, FP32_DB)


KEPT = ("llama", "bert", "gpt2", "phi")
CASES = [(recipe, "llama", torch.float32) for recipe in FP8_RECIPES]
# Without relu: the sign of what FP8 rounds is another one near 0, and its derivative jumps there.
CASES += [("current", form, torch.float32) for form in FORMS if form not in ("llama", "opt")]
CASES += [("delayed", "bert", torch.bfloat16), ("rowwise", "neox", torch.float16), ("bf16", "llama", torch.bfloat16)]
CASES += [(f"{recipe}, kept in fp8", form, torch.float32) for recipe in ("delayed", "rowwise") for form in KEPT]


@pytest.mark.parametrize(("recipe", "form", "dtype"), CASES)
def test_recipes_and_dtypes_against_float64(recipe: str, form: str, dtype: torch.dtype):
    recipe, kept, _ = recipe.partition(", kept")
    options = {"recompute": True, "store": "fp8"} if kept else {}
    layer, (x, dy) = make(form, recipe, dtype=dtype, **options), data(dtype, rows=4, t=16)
    found = step(layer, x, dy)
    assert found["y"].dtype == found["dx"].dtype == dtype
    assert_near(found, exact_step(layer, x, dy), OUTPUT_DB, GRADIENT_DB)


@pytest.mark.parametrize("recompute", ["norm", "activation", True])
@pytest.mark.parametrize(
    ("recipe", "form"), [("delayed", "llama"), ("rowwise", "neox"), ("blockwise", "bert"), ("rowwise_gw_hp", "phi")]
)
def test_recomputing_changes_no_bit(recipe: str, form: str, recompute: Any):
    torch.manual_seed(1)
    kept = make(form, recipe)
    again = fe.TransformerLayer(H, F, recipe=recipe, **{**FORMS[form], "recompute": recompute})
    again.load_state_dict(kept.state_dict())
    for scale in (1.0, 3.0):
        x, dy = (scale * each for each in data())
        assert_equal(step(again, x, dy), step(kept, x, dy))


@pytest.mark.parametrize("placement", ["pre", "post", "parallel", "parallel shared"])
def test_padding_is_not_seen_and_its_gradients_are_right(placement: str):
    layer, (x, dy) = make("gpt2", "fp32", placement=placement), data()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, 5:] = mask[2, 3:] = False
    dy = dy * mask[..., None]
    assert_near(step(layer, x, dy, mask), exact_step(layer, x, dy, mask), FP32_DB, FP32_DB)
    other = torch.where(mask[..., None], x, 7.0)
    assert torch.equal(layer(x, mask)[mask], layer(other, mask)[mask])


@pytest.mark.parametrize("form", ["llama", "bert"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 131), (0, 5)])
def test_odd_shapes(shape: tuple[int, int], form: str):
    layer, (x, dy) = make(form, "blockwise", store="fp8", recompute=True), data(rows=shape[0], t=shape[1])
    found = step(layer, x, dy)
    assert found["y"].shape == found["dx"].shape == x.shape
    if not shape[0]:
        assert not any(grad.any() for grad in found.values())
        return
    wanted = exact_step(layer, x, dy)
    assert min(sqnr(wanted[name], found[name]) for name in ("y", "dx")) > GRADIENT_DB


UNKNOWN: dict[str, dict[str, Any]] = {
    "did you mean 'swiglu'": {"activation": "swigl"},
    "unknown placement 'sandwich'; known: pre, post": {"placement": "sandwich"},
    "did you mean 'activation'": {"recompute": "activations"},
    "did you mean 'fp8'": {"store": "FP8"},
    "unknown norm 'batch'": {"norm": "batch"},
    "unknown layer in bias 'qkv'": {"bias": ("qkv",)},
    "did you mean 'rowwise'": {"recipe": "rowise"},
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_unknown_names_offer_near_ones(words: str):
    with pytest.raises(UnknownName, match=words):
        fe.TransformerLayer(H, F, 4, **{"recipe": "current", **UNKNOWN[words]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([torch.ones(2, 3, H + 1)], r"self_attn\.q_proj: mat1 and mat2"),
        ([torch.ones(3, H)], r"input of 2 dimensions; want \[batch, T, hidden_size\]"),
        ([torch.ones(2, 3, H), torch.ones(2, 4, dtype=torch.bool)], r"mask is \[2, 4\]; want \[batch, 3\]"),
    ],
    ids=["columns", "dimensions", "mask"],
)
def test_what_does_not_fit_is_named(given: list[torch.Tensor], words: str):
    with pytest.raises(ShapeError, match=words):
        make("llama", "current")(*given)


def test_layers_are_called_as_modules_whatever_stands_in_their_place():
    layer, x, called = make("llama", "rowwise"), torch.randn(2, 3, H), []
    layers = {name: module for name, module in layer.named_modules() if isinstance(module, fe.Linear)}
    for name, module in layers.items():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    wanted = layer(x)
    assert called == list(layers)
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj"):  # readers that norms and activation know
        plain = nn.Linear(*reversed(layers[name].weight.shape), bias=layers[name].bias is not None)
        plain.load_state_dict(layers[name].state_dict())
        layer.set_submodule(name, plain)
        assert sqnr(wanted, layer(x)) > 25


LINEAR = [*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))]


def test_names_are_those_of_a_llama_block():
    names = [f"{name}.weight" for name in (*LINEAR, "input_layernorm", "post_attention_layernorm")]
    assert list(make("llama", "current").state_dict()) == names
    post = fe.TransformerLayer(H, F, 4, recipe="current", placement="post")
    assert [n for n in post.state_dict() if "norm" in n] == [
        f"post_{part}_layernorm.{key}" for part in ("attention", "feedforward") for key in ("weight", "bias")
    ]
    shared = fe.TransformerLayer(H, F, 4, recipe="current", placement="parallel shared")
    assert [n for n in shared.state_dict() if "norm" in n] == ["input_layernorm.weight", "input_layernorm.bias"]


def test_dropout_is_that_of_the_seed_and_only_in_training():
    layer, x = make("llama", "fp32", dropout=0.5, heads=fe.Heads(4, 2, dropout=0.5)), torch.randn(2, 6, H)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(layer(x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    plain = make("llama", "fp32", heads=fe.Heads(4, 2))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_dropout_is_before_the_residual_and_apart_for_both(placement: str):
    """All of it dropped leaves the residual; of one, the other."""
    x, post = torch.randn(2, 6, H), placement == "post"
    layer = fe.TransformerLayer(H, F, 4, recipe="fp32", placement=placement, dropout=1.0)
    first, second = (layer.get_submodule(name) for name in layer.norms())
    after_first = first(x) if post else x
    mlp_alone = after_first + layer.mlp(after_first if post else second(x))
    attention_alone = x + layer.self_attn(x if post else first(x))
    wanted = {
        (1.0, 1.0): second(first(x)) if post else x,
        (1.0, 0.0): second(mlp_alone) if post else mlp_alone,
        (0.0, 1.0): second(first(attention_alone)) if post else attention_alone,
    }
    for dropout, want in wanted.items():
        layer.dropout = dropout
        assert torch.allclose(layer(x), want, rtol=0, atol=1e-6), dropout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_matmuls_are_in_its_dtype_and_the_residual_in_fp32(dtype: torch.dtype):
    layer, x, dy = make("llama", "current"), torch.randn(4, 8, H), torch.randn(4, 8, H)
    seen = []
    layer.self_attn.o_proj.register_forward_hook(lambda m, args, y: seen.append((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype):
        found = step(layer, x, dy)
    assert seen == [(dtype, dtype)]
    assert found["y"].dtype == torch.float32
    wanted = exact_step(layer, x, dy)
    assert min(sqnr(wanted[name], found[name]) for name in wanted) > 13.5


def test_meta():
    layer = make("llama", "current", device="meta", dtype=torch.bfloat16)
    assert layer(torch.empty(2, 6, H, device="meta", dtype=torch.bfloat16)).shape == (2, 6, H)


@pytest.mark.parametrize("recipe", ["rowwise", "fp32"])
@pytest.mark.parametrize(
    "heads",
    [GROUPED, fe.Heads(4, 1, theta=Rotary(1e4, width=4), causal=True, window=3, qk_norm=1e-5)],
    ids=["llama", "window"],
)
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_decoding_with_a_cache_gives_the_whole_sequence(placement: str, heads: Any, recipe: str):
    layer, x, cache = make("llama", recipe, heads=heads, placement=placement).eval(), torch.randn(2, 6, H), Cache()
    with torch.no_grad():
        whole = layer(x)
        steps = torch.cat([layer(part, cache=cache) for part in x.split([3, 2, 1], 1)], 1)
    # Rows are cast by themselves, so FP8 gives the same codes; BF16 products may round sums the other way.
    assert sqnr(whole, steps) > (110 if recipe == "fp32" else 35)
    assert len(cache) == 6


def test_padding_on_the_left_with_positions_of_its_own():
    layer, x = make("llama", "fp32").eval(), torch.randn(1, 6, H)
    mask, positions = torch.tensor([[False, False, True, True, True, True]]), torch.tensor([[0, 0, 0, 1, 2, 3]])
    with torch.no_grad():
        assert sqnr(layer(x[:, 2:]), layer(x, mask, positions)[:, 2:]) > 110
        assert sqnr(layer(x[:, 2:]), layer(x, mask)[:, 2:]) > 100, "scores depend on distances"


def test_the_report_tells_what_ran():
    model = converted(nn.Sequential(make("llama", "rowwise"), nn.Linear(H, 8)), "current")
    recipes = [(f"0.{name}", "rowwise") for name in LINEAR] + [("1", "current")]
    assert [row["reason"][:9] for row in fe.inspect(model).layers] == ["never ran"] * 8
    model(torch.randn(2, 6, H)).sum().backward()
    report = fe.inspect(model)
    assert [(row["name"], row["recipe"]) for row in report.layers] == recipes
    assert all(row["ran"] and row["backend"] == "reference" and row["rows"] == 12 for row in report.layers)
    assert report.totals["fp8_flops_share"] == 1.0
    view = fe.scaling_state(model)
    assert list(view)[:21] == [f"0.{name}.{role}" for name in LINEAR for role in ("input", "weight", "grad_output")]
    assert all(int(slot.calls) == 1 and slot.amax > 0 for slot in view.values())
