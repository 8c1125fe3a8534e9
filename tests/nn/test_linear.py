"""fe.Linear's three matmuls against a Linear in NumPy: the same casts, products and sums in float64.

How far the engine may be from it, with u the unit roundoff of a dtype (2^-8 for BF16, 2^-24 for FP32):

    products leave in BF16 unless the recipe's output is FP32    2^-8 |y - b|
    sums of K products in FP32, in any order                     K 2^-24 sum |a b|
    one rounding to the layer's dtype                            u |y|, or half the smallest subnormal
    scales: a reciprocal and a product in FP32                   2^-22 |y|
    scales folded into both operands before their products       2 2^-24 sum |a b|
"""

import dataclasses

import numpy as np
import pytest
import torch
from support import DTYPES, EVERY_FP8_RECIPE, EXACT_SCALES, Products, assert_within, bound, exact, products, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import Recipe, resolve

SHAPES = [(1, 1, 1), (3, 50, 33), (16, 16, 16), (5, 130, 257), (129, 31, 48)]  # M, K, N
RESULTS = ("y", "dx", "dw")


def uneven(x: torch.Tensor, spread: int) -> torch.Tensor:
    """x with its rows and columns times powers of two down to 2^-spread, so that it matters which share a scale."""
    rows, columns = (torch.randint(-spread, 1, (size,)) for size in x.shape)
    return x * torch.exp2(rows)[:, None] * torch.exp2(columns)


def run(recipe: Recipe | str, shape, dtype=torch.float32, scale=1.0, spread=0):
    """(layer, x, dy, y) after one forward and backward on random numbers."""
    m, k, n = shape
    layer = fe.Linear(k, n, recipe=recipe, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(uneven(layer.weight, spread))
    x = (uneven(torch.randn(m, k), spread) * scale).to(dtype).requires_grad_()
    dy = uneven(torch.randn(m, n), spread).to(dtype)
    y = layer(x)
    y.backward(dy)
    return layer, x, dy, y


def check(recipe: Recipe, shape, dtype) -> None:
    (m, k, n), rounds = shape, recipe.output != fe.FP32
    layer, x, dy, y = run(recipe, shape, dtype, spread=6)
    want = products(recipe, x, layer.weight, layer.bias, dy)
    bias = layer.bias.detach().double().numpy()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype
    assert_within(y, want.y, bound(want.y, want.y - bias, want.y_abs, k, dtype, rounds), "y")
    assert_within(x.grad, want.dx, bound(want.dx, want.dx, want.dx_abs, n, dtype, rounds), "dx")
    assert_within(layer.weight.grad, want.dw, bound(want.dw, want.dw, want.dw_abs, m, dtype, rounds), "dw")
    db_abs = dy.double().abs().sum(0).numpy()
    assert_within(layer.bias.grad, want.db, bound(want.db, want.db, db_abs, m, dtype, False), "db")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [*EVERY_FP8_RECIPE, *EXACT_SCALES])
def test_forward_and_gradients_are_the_products_of_the_cast_operands(recipe: str | Recipe, dtype, shape):
    check(resolve(recipe), shape, dtype)


@pytest.mark.parametrize("recipe", [*EVERY_FP8_RECIPE, *EXACT_SCALES])
def test_output_in_fp32_rounds_nothing_but_the_operands(recipe: str | Recipe):
    # With the BF16 rounding of the products gone the bound is ~2^-15 of what it was: any hidden 16-bit step shows.
    asked = dataclasses.replace(resolve(recipe), output=fe.FP32)
    if asked.fp8_share < 1:  # a 16-bit matmul keeps its 16-bit result
        asked = dataclasses.replace(asked, input_for_wgrad=None, grad_output_for_wgrad=None)
    check(asked, (24, 200, 40), torch.float32)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_vocabulary_that_is_no_multiple_of_anything(rows: int):
    check(fe.current(), (rows, 24, 50257), torch.bfloat16)


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
    for name, expected, value in zip(RESULTS, EXPECTED[recipe], found, strict=True):
        measured = sqnr(getattr(want, name), value)
        if expected is None:  # 16 bits: BF16 alone leaves above 50 dB
            assert measured > 48, f"{name}: {measured:.2f} dB"
        else:
            assert abs(measured - expected) < 0.6, f"{name}: {measured:.2f} dB, want {expected}"


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
@pytest.mark.parametrize("recipe", EVERY_FP8_RECIPE)
def test_magnitude_does_not_matter(recipe: str, scale: float):
    layer, x, dy, y = run(recipe, (64, 128, 64), scale=scale)
    y_no_bias = y - layer.bias
    assert sqnr((x.double() @ layer.weight.double().t()), y_no_bias) > 27.5
    assert sqnr(dy.double().t() @ x.double(), layer.weight.grad) > EXPECTED["current"][2] - 1


def test_an_outlier_row_costs_rows_nothing_and_a_tensor_everything_else():
    # One row 2^16 times the others: under its scale their rms is 448 / 3.5 / 2^16 = 2^-9, E4M3's smallest subnormal.
    x = torch.randn(64, 256)
    x[0] *= 2**16
    errors = {}
    for recipe in ("current", "rowwise"):
        layer = fe.Linear(256, 64, bias=False, recipe=recipe)
        errors[recipe] = sqnr(x[1:] @ layer.weight.t(), layer(x)[1:])
    assert errors["rowwise"] > 27.5
    assert errors["current"] < 15


def test_wgrad_over_64k_tokens_sums_in_fp32():
    # Thirteen-bit partial sums would lose 5 % here.  All ones: the sum of codes is exact in FP32.
    layer = fe.Linear(1, 1, bias=False, recipe=dataclasses.replace(fe.current(), output=fe.FP32))
    x = torch.ones(65536, 1)
    layer(x).backward(torch.ones(65536, 1))
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == pytest.approx(65536, rel=2.0**-21)  # both scales are 1 / MAX, rounded


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_recipes_without_fp8_are_nn_linear_in_that_dtype(name: str):
    layer = fe.Linear(48, 24, recipe=name)
    dtype = resolve(name).input.format.dtype
    x = torch.randn(5, 48, requires_grad=True)
    y = layer(x)
    want = nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)).float()
    assert torch.equal(y, want)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_no_bias():
    layer = fe.Linear(32, 16, bias=False, recipe="current")
    with_zero = fe.Linear(32, 16, recipe="current")
    with_zero.load_state_dict({"weight": layer.weight, "bias": torch.zeros(16)})
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), with_zero(x))


def test_backward_needs_only_what_is_asked():
    # No gradient for x: no dgrad; none for w: no wgrad.  Each alone equals the one of all three.
    full = fe.Linear(32, 16, recipe="current")
    x, dy = torch.randn(8, 32), torch.randn(8, 16)
    x_all = x.clone().requires_grad_()
    full(x_all).backward(dy)
    for role in RESULTS[1:]:
        layer = fe.Linear(32, 16, recipe="current")
        layer.load_state_dict(full.state_dict())
        layer.requires_grad_(role == "dw")
        x_one = x.clone().requires_grad_(role == "dx")
        layer(x_one).backward(dy)
        assert (x_one.grad is None) == (role == "dw")
        assert (layer.weight.grad is None) == (role == "dx")
        found, want = (x_one.grad, x_all.grad) if role == "dx" else (layer.weight.grad, full.weight.grad)
        assert found is not None
        assert want is not None
        assert torch.equal(found, want)


def test_the_model_in_this_file_is_independent_of_the_engine():
    # Integers up to 16 are exact in E4M3 after a power-of-two scale: the model then gives the exact product.
    x, w = torch.randint(-8, 9, (4, 6)).float(), torch.randint(-8, 9, (3, 6)).float()
    b, dy = torch.zeros(3), torch.randint(-8, 9, (4, 3)).float()
    found = products(fe.rowwise(), x, w, b, dy)
    want = Products(*(exact(x, w, b, dy)))
    for name in RESULTS:
        assert np.array_equal(getattr(found, name), getattr(want, name)), name
