"""LayerNormLinear and LayerNormMLP: ordinary children, names as users expect, one state, moves, refusals."""

from typing import Any

import pytest
import torch
from support import EXACT_SCALES, FP8_RECIPES, converted, sqnr, state_of
from torch import nn

import fp8engine as fe
from fp8engine.autograd import Memory
from fp8engine.errors import UnknownName
from fp8engine.nn.layernorm_linear import LayerNormLinear, make_norm, norm_of
from fp8engine.nn.layernorm_mlp import LayerNormMLP
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS

K, F = 32, 48
either_norm = pytest.mark.parametrize("norm", ["layer", "rms"])


@either_norm
@pytest.mark.parametrize("recipe", [*FP8_RECIPES, *EXACT_SCALES, "bf16"])
def test_state_dicts_of_plain_pytorch_load_and_compute_the_same(recipe, norm):
    plain_norm = (nn.LayerNorm if norm == "layer" else nn.RMSNorm)(K, eps=1e-3)
    plain = nn.ModuleDict({"norm": plain_norm, "linear": nn.Linear(K, 16)})
    ours = LayerNormLinear(K, 16, recipe=recipe, norm=norm, eps=1e-3)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(24, K)
    assert sqnr(plain["linear"](plain["norm"](x)), ours(x)) > 27.5
    plain.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_its_children(activation):
    torch.manual_seed(1)
    ours = LayerNormMLP(K, F, activation, recipe="current", norm="rms", eps=1e-3)
    gated = ACTIVATIONS[activation].gated
    first = "gate_up" if gated else "up"
    assert list(ours.state_dict()) == ["norm.weight", f"{first}.weight", f"{first}.bias", "down.weight", "down.bias"]
    assert [name for name, m in ours.named_modules() if isinstance(m, nn.Linear)] == [first, "down"]
    x = torch.randn(2, 12, K)
    apart = ours.down(ACTIVATIONS[activation](getattr(ours, first)(ours.norm(x))))
    # Norm and activation in FP32 both ways; a last bit of FP32 may move a code.
    assert sqnr(apart, ours(x)) > 35
    torch.manual_seed(1)
    for name, plain in ((first, nn.Linear(K, F * (1 + gated))), ("down", nn.Linear(F, K))):
        assert torch.equal(plain.weight, ours.get_parameter(f"{name}.weight")), "it starts as plain PyTorch's do"
    assert torch.equal(ours.norm.weight, torch.ones(K))


@either_norm
def test_a_zero_centred_norm_starts_at_zero_and_is_the_same_norm(norm):
    ours = LayerNormLinear(K, 16, recipe="current", norm=norm, zero_centered=True)
    plain = LayerNormLinear(K, 16, recipe="current", norm=norm)
    plain.linear.load_state_dict(ours.linear.state_dict())
    assert torch.equal(ours.norm.weight, torch.zeros(K))
    x = torch.randn(6, K)
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.norm(x), plain.norm(x)), "its module computes it too"


def test_one_state_slots_by_name_and_rows_of_the_report():
    model = converted(nn.Sequential(LayerNormMLP(K, F, "swiglu", recipe="delayed"), nn.Linear(K, 8)), "rowwise")
    want = [("0.gate_up", "delayed"), ("0.down", "delayed"), ("1", "rowwise")]
    assert [(row["name"], row["recipe"]) for row in fe.inspect(model).layers] == want
    for _ in range(3):
        model(torch.randn(6, K)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
    assert [row["backend"] for row in fe.inspect(model).layers] == ["reference"] * 3
    view = fe.scaling_state(model)
    assert list(view) == [f"{name}.{role}" for name, _ in want for role in ("input", "weight", "grad_output")]
    assert all(int(slot.calls) == 3 for slot in view.values())
    assert all((slot.history[:2] > 0).all() for name, slot in view.items() if name.startswith("0."))
    assert [name for name, _ in state_of(LayerNormMLP(K, F, recipe="delayed")).layers] == ["up", "down"]


def test_dtype_and_device():
    mlp = LayerNormMLP(K, F, "swiglu", recipe="current", dtype=torch.bfloat16)
    assert {p.dtype for p in mlp.parameters()} == {torch.bfloat16}
    assert mlp(torch.randn(6, K).bfloat16()).dtype == torch.bfloat16
    on_meta = LayerNormMLP(K, F, "swiglu", recipe="current", device="meta")
    assert on_meta(torch.empty(6, K, device="meta")).shape == (6, K)
    assert state_of(on_meta.to_empty(device="cpu")).device.type == "cpu"
    assert LayerNormLinear(K, 16, False, recipe="current").linear.bias is None


@pytest.mark.parametrize(
    ("recompute", "memory"),
    [(False, (False, False)), (True, (True, True)), ("norm", (True, False)), ("activation", (False, True))],
)
def test_what_is_recomputed(recompute, memory):
    assert LayerNormMLP(K, F, recipe="current", recompute=recompute, store="fp8").memory == Memory(
        memory[0], memory[1], "fp8"
    )
    assert LayerNormLinear(K, F, recipe="current", recompute=True).memory.recompute_norm


UNKNOWN: dict[str, dict[str, Any]] = {
    "did you mean 'gelu'": {"activation": "gelo"},
    "unknown norm 'batch'": {"norm": "batch"},
    "did you mean 'activation'": {"recompute": "activations"},
    "did you mean 'fp8'": {"store": "FP8"},
    "did you mean 'current'": {"recipe": "curent"},
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_unknown_names_offer_near_ones(words: str):
    with pytest.raises(UnknownName, match=words):
        LayerNormMLP(K, F, **{"recipe": "current", **UNKNOWN[words]})
    with pytest.raises(UnknownName, match="unknown store"):
        LayerNormLinear(K, F, recipe="current", store="bf8")


def test_norms_as_other_code_makes_them():
    assert norm_of(nn.RMSNorm(4)).norm.eps == torch.finfo(torch.float32).eps, "torch's default"
    assert norm_of(nn.LayerNorm(4, bias=False)).bias_K is None
    assert norm_of(nn.LayerNorm(4, elementwise_affine=False))[1:] == (None, None)
    assert norm_of(make_norm(4, Norm("layer", 1e-3, True))).norm == Norm("layer", 1e-3, True)
