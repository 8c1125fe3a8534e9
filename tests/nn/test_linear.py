"""fe.Linear's three matmuls against a Linear in NumPy: the same casts, products and sums in float64.

How far the engine may be from it: `bound` in helpers/support.py.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from support import DTYPES, EVERY_FP8_RECIPE, EXACT_SCALES, assert_products, exact, products, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import Recipe, resolve

SHAPES = [(1, 1, 1), (3, 50, 33), (16, 16, 16), (5, 130, 257), (129, 31, 48)]  # M, K, N
EXACT = [recipe.values[0] for recipe in EXACT_SCALES]
every_recipe = pytest.mark.parametrize("recipe", [*EVERY_FP8_RECIPE, *EXACT_SCALES])


def uneven(x: torch.Tensor, spread: int) -> torch.Tensor:
    """x with its rows and columns times powers of two down to 2^-spread, so that it matters which share a scale."""
    rows, columns = (torch.randint(-spread, 1, (size,)) for size in x.shape)
    return x * torch.exp2(rows)[:, None] * torch.exp2(columns)


def run(recipe: Recipe | str, shape, dtype=torch.float32, spread=0):
    """(layer, x, dy, y) after one forward and backward on random numbers."""
    m, k, n = shape
    layer: Any = fe.Linear(k, n, recipe=recipe, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(uneven(layer.weight, spread))
    x: Any = uneven(torch.randn(m, k), spread).to(dtype).requires_grad_()
    dy = uneven(torch.randn(m, n), spread).to(dtype)
    y = layer(x)
    y.backward(dy)
    return layer, x, dy, y


def check(recipe: Recipe, shape, dtype) -> None:
    layer, x, dy, y = run(recipe, shape, dtype, spread=6)
    found = (y, x.grad, layer.weight.grad, layer.bias.grad)
    assert {each.dtype for each in found} == {dtype}
    want = products(recipe, x, layer.weight, layer.bias, dy)
    assert_products(found, want, shape, dtype, recipe.output != fe.FP32)


VOCABULARY = ("current", torch.bfloat16, (3, 24, 50257))  # no multiple of anything


@pytest.mark.parametrize(
    ("recipe", "dtype", "shape"),
    [*itertools.product([*EVERY_FP8_RECIPE, *EXACT], DTYPES, SHAPES), VOCABULARY],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_forward_and_gradients_are_the_products_of_the_cast_operands(recipe: str | Recipe, dtype, shape):
    check(resolve(recipe), shape, dtype)


@every_recipe
def test_output_in_fp32_rounds_nothing_but_the_operands(recipe: str | Recipe):
    # With the BF16 rounding of the products gone the bound is ~2^-15 of what it was: any hidden 16-bit step shows.
    asked = dataclasses.replace(resolve(recipe), output=fe.FP32)
    if asked.fp8_share < 1:  # a 16-bit matmul keeps its 16-bit result
        asked = dataclasses.replace(asked, input_for_wgrad=None, grad_output_for_wgrad=None)
    check(asked, (24, 200, 40), torch.float32)


# A value in a binade [1, 2) with mantissa step d carries uniform noise of variance d^2 / 12; with the logarithm of
# values uniform the mean square signal is 3 / (2 ln 2) = 2.16.  E4M3, d = 2^-3: 32.2 dB, of which a Gaussian's
# uneven binades leave 31.5; E5M2, d = 2^-2: 6 dB less.  A product of two independent operands adds their noise:
# 31.5 - 3 = 28.5 dB, or, beside E5M2, -10 log10(10^-3.15 + 10^-2.55) = 24.5 dB.  Power-of-two scales move nothing.
# 0.6 dB on both sides: less signal means a rounding too many, more means no FP8.
E4M3_E4M3, E4M3_E5M2 = 28.5, 24.5
EXPECTED = {
    "current": (E4M3_E4M3, E4M3_E5M2, E4M3_E5M2),
    "delayed": (E4M3_E4M3, E4M3_E5M2, E4M3_E5M2),
    "rowwise": (E4M3_E4M3,) * 3,
    "rowwise_gw_hp": (E4M3_E4M3, E4M3_E4M3, None),
    "blockwise": (E4M3_E4M3,) * 3,
    "mxfp8": (E4M3_E4M3,) * 3,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", EVERY_FP8_RECIPE)
def test_signal_to_noise_is_that_of_the_formats(recipe: str, dtype):
    layer, x, dy, y = run(recipe, (192, 512, 256), dtype)
    want = exact(x, layer.weight, layer.bias, dy)
    found = (y, x.grad, layer.weight.grad)
    for name, expected, value in zip(("y", "dx", "dw"), EXPECTED[recipe], found, strict=True):
        measured = sqnr(getattr(want, name), value)
        if expected is None:  # 16 bits: BF16 alone leaves above 50 dB
            assert measured > 48, f"{name}: {measured:.2f} dB"
        else:
            assert abs(measured - expected) < 0.6, f"{name}: {measured:.2f} dB, want {expected}"


def test_wgrad_over_64k_tokens_sums_in_fp32():
    # Thirteen-bit partial sums would lose 5 % here.  All ones: the sum of codes is exact in FP32.
    layer: Any = fe.Linear(1, 1, bias=False, recipe=dataclasses.replace(fe.current(), output=fe.FP32))
    layer(torch.ones(65536, 1)).backward(torch.ones(65536, 1))
    assert layer.weight.grad.item() == pytest.approx(65536, rel=2.0**-21)  # both scales are 1 / MAX, rounded


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_recipes_without_fp8_are_nn_linear_in_that_dtype(name: str):
    layer = fe.Linear(48, 24, recipe=name)
    dtype = resolve(name).input.format.dtype
    x = torch.randn(5, 48, requires_grad=True)
    y = layer(x)
    want = nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)).float()
    assert torch.equal(y, want)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.dtype == torch.float32
