"""fe.TransformerLayer: outputs and every gradient against float64, for each way of building it; memory options."""

import math
from typing import Any

import pytest
import torch
from fused import assert_equal
from layer64 import exact_step, lively, step
from support import FP8_RECIPES, sqnr

import fp8engine as fe
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


CASES = [(recipe, "llama", torch.float32) for recipe in FP8_RECIPES]
# Without relu: the sign of what FP8 rounds is another one near 0, and its derivative jumps there.
CASES += [("current", form, torch.float32) for form in FORMS if form not in ("llama", "opt")]
CASES += [("delayed", "bert", torch.bfloat16), ("rowwise", "neox", torch.float16), ("bf16", "llama", torch.bfloat16)]


@pytest.mark.parametrize(("recipe", "form", "dtype"), CASES)
def test_recipes_and_dtypes_against_float64(recipe: str, form: str, dtype: torch.dtype):
    layer, (x, dy) = make(form, recipe, dtype=dtype), data(dtype, rows=4, t=16)
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


@pytest.mark.parametrize("form", ["llama", "bert", "gpt2", "phi"])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_inputs_kept_in_fp8_change_gradients_alone_and_little(recipe: str, form: str):
    layer, (x, dy) = make(form, recipe, recompute=True, store="fp8"), data(rows=4, t=16)
    plain = fe.TransformerLayer(H, F, recipe=recipe, **FORMS[form])
    plain.load_state_dict(layer.state_dict())
    found, kept, wanted = step(layer, x, dy), step(plain, x, dy), exact_step(layer, x, dy)
    assert sqnr(kept["y"], found["y"]) > (FP32_DB if form == "bert" else 1e9), "torch's norm, or ours, after a residual"
    assert not torch.equal(found["dx"], kept["dx"])
    # What is kept has errors of 31.5 dB, by row; three or four of them meet in a gradient, which has 24 dB at best.
    worst = 10 * math.log10(1 + 4 * 10**-3.15 / 10**-2.4) + 0.5
    for name in wanted.keys() - {"self_attn.k_proj.bias"}:
        assert sqnr(wanted[name], found[name]) > min(sqnr(wanted[name], kept[name]), 24) - worst, name


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
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 131)])
def test_odd_shapes(shape: tuple[int, int], form: str):
    layer, (x, dy) = make(form, "blockwise", store="fp8", recompute=True), data(rows=shape[0], t=shape[1])
    found = step(layer, x, dy)
    assert found["y"].shape == found["dx"].shape == x.shape
    wanted = exact_step(layer, x, dy)
    for name in ("y", "dx"):
        assert sqnr(wanted[name], found[name]) > GRADIENT_DB


@pytest.mark.parametrize("form", ["llama", "bert"])
def test_no_rows(form: str):
    layer, (x, dy) = make(form, "blockwise", store="fp8", recompute=True), data(rows=0, t=5)
    found = step(layer, x, dy)
    assert found["y"].shape == found["dx"].shape == x.shape
    assert not any(grad.any() for grad in found.values())


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
        plain = torch.nn.Linear(*reversed(layers[name].weight.shape), bias=layers[name].bias is not None)
        plain.load_state_dict(layers[name].state_dict())
        layer.set_submodule(name, plain)
        assert sqnr(wanted, layer(x)) > 25
