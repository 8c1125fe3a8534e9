"""Smoothed layers: the layer itself in real arithmetic, and under FP8 the three matmuls of x / s and w * s."""

from typing import Any

import pytest
import torch
from support import DTYPES, FP8_RECIPES, assert_products, products, saved

import fp8engine as fe
from fp8engine.autograd import Numerics
from fp8engine.autograd.smooth import scales
from fp8engine.numerics.recipe import resolve
from fp8engine.scaling.sample import StepSamples

SHAPES = [(1, 1, 1), (3, 50, 33), (5, 130, 257), (129, 31, 48)]  # M, K, N


def uneven(m: int, k: int, octaves: int = 10) -> torch.Tensor:
    """Random numbers whose columns are of sizes up to 2^octaves."""
    return torch.randn(m, k) * torch.exp2(torch.randint(0, octaves + 1, (k,)))


def smoothed_layer(k: int, n: int, recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    layer = fe.Linear(k, n, recipe=recipe, dtype=dtype)
    fe.smooth(layer, "")
    return layer


def test_scales_are_powers_of_two_of_half_the_octaves():
    for exponent in range(-126, 128):
        for mantissa in (1.0, 1.5, 1.9999):
            x = torch.tensor([[0.0], [-mantissa * 2.0**exponent]])
            assert scales(x).item() == 2.0 ** (exponent // 2), (mantissa, exponent)


@pytest.mark.parametrize("value", [0.0, torch.inf, -torch.inf, torch.nan])
def test_a_channel_of_zeros_or_with_a_value_that_is_not_finite_gets_1(value: float):
    x = torch.tensor([[4096.0, 0.0], [value, -64.0]]) if value else torch.zeros(2, 2)
    assert scales(x).tolist() == ([1.0, 8.0] if value else [1.0, 1.0])
    assert scales(x[:0]).tolist() == [1.0, 1.0], "no tokens"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_under_fp8_against_float64(shape: tuple[int, int, int], recipe: str, dtype: torch.dtype):
    """The bound is support.py's, of the matmuls of x / s and w * s; dx and dw, and their bounds, times 1 / s and s."""
    (m, k, n), asked = shape, resolve(recipe)
    torch.manual_seed(m)
    layer = smoothed_layer(k, n, recipe, dtype)
    x: Any = uneven(m, k).to(dtype).requires_grad_()
    dy = torch.randn(m, n).to(dtype)
    y = layer(x)
    y.backward(dy)
    s = torch.exp2((torch.frexp(x.detach().float().abs().amax(0))[1] - 1).div(2, rounding_mode="floor"))
    weight = layer.weight.detach()
    wide = torch.float32 if dtype == torch.float16 else dtype  # w * s of FP16 is FP32
    want = products(asked, (x / s).to(dtype), (weight.to(wide) * s).to(wide), layer.bias, dy)
    factor = s.double().numpy()
    want = want._replace(dx=want.dx / factor, dx_abs=want.dx_abs / factor)
    want = want._replace(dw=want.dw * factor, dw_abs=want.dw_abs * factor)
    found = (y, x.grad, layer.weight.grad)
    assert {each.dtype for each in found} == {dtype}
    assert_products((*found, None), want, shape, dtype, asked.output != fe.FP32)


@pytest.mark.parametrize("needs", ["x", "weight", "bias", "nothing"])
def test_what_takes_no_gradient_gets_none(needs: str):
    layer = smoothed_layer(48, 32, "current")
    layer.weight.requires_grad_(needs == "weight")
    layer.bias.requires_grad_(needs == "bias")
    x = uneven(24, 48).requires_grad_(needs == "x")
    y = layer(x)
    assert y.requires_grad is (needs != "nothing")
    if needs != "nothing":
        y.sum().backward()
    found = [name for name, each in (("x", x), ("weight", layer.weight), ("bias", layer.bias)) if each.grad is not None]
    assert found == [needs] * (needs != "nothing")


def test_between_forward_and_backward_the_weight_is_kept_once():
    """Saved: codes of x, s, and the parameter itself; w * s is made again, and no copy outlives the backward."""
    layer, x = smoothed_layer(48, 32, "current"), uneven(24, 48).requires_grad_()
    assert sum(tensor.nbytes for tensor in saved(layer, x)) <= 24 * 48 + 4 * 49
    for _ in range(3):  # read three times without gradients: an ordinary weight's codes would be kept
        with torch.no_grad():
            layer(x)
    assert fe.inspect(layer).layers[0]["kept_bytes"] == 0


def test_fp16_has_room_for_what_s_makes_larger():
    """s = 2^7: w * s = 2^17 and dy * w * s = 2^17 are beyond FP16's 65504, y = 2^11 and dx = 2^10 are not."""
    layer = smoothed_layer(1, 2, "current", torch.float16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1024.0], [2.0**-4]]))
        layer.bias.zero_()
    x: Any = torch.tensor([[2.0**14], [2.0]], dtype=torch.float16).requires_grad_()
    y = layer(x)
    (y[1, 0] + 0.5 * y[0, 1]).backward()
    assert y[:, 1].tolist() == [1024.0, 0.125]
    assert y[1, 0].item() == 2048.0
    assert x.grad.tolist() == [[2.0**-5], [1024.0]]


def test_a_layer_that_is_decided_to_be_in_16_bits_shows_auto_what_fp8_would_read(monkeypatch):
    recipe = fe.high_precision(fe.BF16)
    layer, seen = fe.Linear(48, 32, recipe=recipe), {}
    fe.smooth(layer, "")
    x = uneven(24, 48).requires_grad_()
    monkeypatch.setattr(layer.numerics.state, "samples", StepSamples(1, {0: (32, 48)}, x.device))
    monkeypatch.setattr(Numerics, "observe", lambda self, role, tensor, *call: seen.update({role: tensor}))
    layer(x)
    s = scales(x)
    assert s.max() >= 8
    assert torch.equal(seen["input"], x / s)
    assert torch.equal(seen["weight"], layer.weight * s)
