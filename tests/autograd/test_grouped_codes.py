"""Experts that are given FP8 codes: read without a cast where the recipe casts so, else dequantised with a reason."""

import pytest
import torch
from experts import SIZES
from support import FP8_RECIPES, numerics_of, sqnr

import fp8engine as fe
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import casts, grouped

K, N = 200, 48  # one group of 128, and one of 72


def layer_of(recipe: str, linear: bool = False):
    torch.manual_seed(0)
    return fe.Linear(K, N, recipe=recipe) if linear else fe.GroupedLinear(len(SIZES), K, N, recipe=recipe)


def ran(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """y, dx, dw and db."""
    x = x.detach().requires_grad_()
    y = layer(x) if isinstance(layer, fe.Linear) else layer(x, SIZES)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("recipe", [recipe for recipe in FP8_RECIPES if recipe != "delayed"])
def test_codes_under_the_layers_own_cast_are_read(recipe: str, linear: bool):
    x = torch.randn(sum(SIZES), K) * torch.exp2(torch.randn(sum(SIZES), 1) * 3)
    layer = layer_of(recipe, linear)
    found = ran(layer, fe.quantize(x, resolve(recipe).input))
    assert numerics_of(layer).ready == {"": 1}
    wanted = ran(layer_of(recipe, linear), x)
    for name, a, b in zip(("y", "dx", "dw", "db"), found, wanted, strict=True):
        if name != "dw" or recipe == "current":
            assert torch.equal(a, b), name
        else:
            # wgrad casts x along its rows, of values that were cast before.  By powers of two that changes what lies
            # below the smallest normal alone; where wgrad is in 16 bits, it is the cast: 31.6 dB.
            assert sqnr(b, a) > (31 if recipe == "rowwise_gw_hp" else 50)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "current"])
def test_no_cast_of_x_in_a_forward(recipe: str, monkeypatch: pytest.MonkeyPatch):
    layer, seen = layer_of(recipe), []
    q = fe.quantize(torch.randn(sum(SIZES), K), resolve(recipe).input)
    for module in (casts, grouped):
        real = module.quantize
        spy = lambda x, *rest, real=real, **more: seen.append(len(x)) or real(x, *rest, **more)  # noqa: E731
        monkeypatch.setattr(module, "quantize", spy)
    with torch.no_grad():
        layer(q, SIZES)
    assert sum(seen) == len(SIZES) * N, "the weights alone, together"


@pytest.mark.parametrize(
    ("recipe", "cast", "why"),
    [
        ("rowwise", fe.Cast(fe.E4M3), "it casts per row, not per tensor"),
        ("current", fe.Cast(fe.E4M3, fe.PerRow(), power_of_2=True), "it casts per tensor, not per row"),
        ("blockwise", fe.Cast(fe.E4M3, fe.PerRow(), power_of_2=True), "it casts per 1x128 block, not per row"),
        (
            "blockwise",
            fe.Cast(fe.E4M3, fe.PerBlock(1, 128)),
            "its scales within a row are not known to be powers of two",
        ),
        ("bf16", fe.Cast(fe.E4M3), "its forward is in 16 bits"),
    ],
)
def test_other_codes_are_dequantised_and_counted_with_the_reason(recipe: str, cast: fe.Cast, why: str):
    layer, q = layer_of(recipe), fe.quantize(torch.randn(sum(SIZES), K), cast)
    y = layer(q, SIZES)
    assert numerics_of(layer).ready == {why: 1}
    assert torch.equal(y, layer_of(recipe)(q.dequantize(), SIZES))
