"""fe.smooth on models: a planted late outlier, every kind of gated MLP, copies, graphs, checkpoints."""

import copy
from typing import Any

import pytest
import tiny_models as tiny
import torch
from late_outlier import grown, ordinary_tokens
from support import converted, sqnr, state_of
from torch import nn

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
WIDTH = 32


def llama(fuse: bool, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return converted(tiny.llama().to(dtype), "current", fuse=fuse)


def mlp(recipe: str = "current", **options: Any) -> Any:
    torch.manual_seed(0)
    return fe.LayerNormMLP(WIDTH, 2 * WIDTH, "swiglu", recipe=recipe, **options)


def block(recipe: str = "current") -> fe.TransformerLayer:
    torch.manual_seed(0)
    return fe.TransformerLayer(WIDTH, 2 * WIDTH, 4, "swiglu", recipe=recipe)


def given(rows: int = 24) -> torch.Tensor:
    return torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """y, dx and the gradients of the parameters."""
    model.zero_grad()
    x.grad = None
    y = model(x)
    y.square().mean().backward()
    return [y, x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def test_a_planted_late_outlier_and_none():
    """The channel ends 2^16 times the others' median: x's codes are subnormal without smooth, 7 dB; with it 24 dB.

    Deterministic on one machine; 1.5 dB are for CPUs that round sums otherwise.  Without an outlier nothing is lost:
    what both lose to E4M3's 3 bits of mantissa is 29.5 dB.
    """
    plain, smoothed = (ordinary_tokens(grown("current", 12, smooth)) for smooth in (False, True))
    assert smoothed > 22.5
    assert smoothed - plain > 15
    plain, smoothed = (ordinary_tokens(grown("current", 0, smooth)) for smooth in (False, True))
    assert abs(smoothed - plain) < 0.5


@pytest.mark.parametrize("fuse", [False, True])
def test_llama_smoothed_reads_the_smoothed_product(fuse: bool):
    """Fused or not, the cast sees x / s: a product 2^16 times as large has 2^8 times the amax, and the same result."""
    model, plain, ids = llama(fuse), llama(fuse), tiny.tokens()
    fe.smooth(model, "model.layers.0.mlp")
    amaxes = []
    for factor in (1.0, 2.0**16):
        for each in (model, plain):
            with torch.no_grad():
                each.model.layers[0].mlp.up_proj.weight *= factor
                each.model.layers[0].mlp.down_proj.weight /= factor
            logits = each(ids).logits
            slots = fe.scaling_state(each)
            amaxes.append(slots["model.layers.0.mlp.down_proj.input"].amax)
            if each is model:
                kept = logits
        assert sqnr(logits, kept) > 20, "both are the model with FP8's error"
    assert amaxes[2] / amaxes[0] == pytest.approx(2.0**8, rel=1e-6)
    assert amaxes[3] / amaxes[1] == pytest.approx(2.0**16, rel=1e-6)


@pytest.mark.parametrize("make", [mlp, block, lambda: mlp(recompute=True, store="fp8")], ids=["mlp", "block", "memory"])
def test_our_modules_smoothed_compute_what_they_did(make):
    """y and the gradients are as near to FP32's as the plain module's; 3 dB, for some gradients are 32 numbers.

    Of the gradient of k_proj's bias, which is 0 but for errors, nothing is near.
    """
    model, x = make(), given()
    exact, plain = copy.deepcopy(model), copy.deepcopy(model)
    for layer in exact.modules():
        if isinstance(layer, fe.Linear):
            layer.numerics.adopt(fe.high_precision(fe.FP32))
    fe.smooth(model)
    wanted, before, found = (results(each, x) for each in (exact, plain, model))
    state = state_of(model)
    down = next(i for i, (name, _) in enumerate(state.layers) if name.endswith(("down", "down_proj")))
    assert state.counts_CS[0, 3 * down].item() == 1, "the layer ran in FP8"
    assert not torch.equal(before[0], found[0])
    pairs = [(sqnr(want, one), sqnr(want, other)) for want, one, other in zip(wanted, before, found, strict=True)]
    assert [pair for pair in pairs if pair[0] > 10 and pair[1] < pair[0] - 3] == []
    assert sum(pair[0] > 10 for pair in pairs) >= len(pairs) - 1


@pytest.mark.parametrize("fuse", [False, True])
def test_a_copy_is_set_as_the_model_was_and_switched_off_by_itself(fuse: bool):
    model, ids = llama(fuse), tiny.tokens()
    fe.smooth(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert list(model.state_dict()) == list(llama(fuse).state_dict()) == list(other.state_dict())
    fe.smooth(other, on=False)
    assert torch.equal(other(ids).logits, llama(fuse)(ids).logits)
    assert fe.inspect(model).layers[6]["outliers"] == "smoothed", "the original keeps its own"


def test_the_report_says_what_is_set():
    model = llama(True)
    fe.smooth(model, "model.layers.1.*")
    model(tiny.tokens())
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert {name for name, row in rows.items() if row["outliers"]} == {"model.layers.1.mlp.down_proj"}
    assert rows["model.layers.1.mlp.up_proj"]["fused"] == "fused: reads what post_attention_layernorm wrote"
    assert "smoothed" in fe.inspect(model).table()


@pytest.mark.parametrize("fuse", [False, True])
def test_revert_takes_it_away(fuse: bool):
    model, ids = tiny.llama().eval(), tiny.tokens()
    wanted, attributes = model(ids).logits, [sorted(vars(module)) for module in model.modules()]
    converted(model, "current", fuse=fuse)
    fe.smooth(model)
    assert not torch.allclose(model(ids).logits, wanted)
    fe.revert(model)
    assert torch.equal(model(ids).logits, wanted)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    converted(model, "current", fuse=fuse)
    assert not any(row["outliers"] for row in fe.inspect(model).layers), "converted anew, nothing is set"
