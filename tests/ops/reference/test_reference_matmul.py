"""Emulated matmuls against float64 products of the dequantised operands, with bounds derived from the arithmetic.

u = 2^-24 is FP32's largest relative rounding error, 2^-8 BF16's and 2^-11 FP16's.  With S = sum_k |a| |b| of the
dequantised operands and y their exact product without the bias:

    sums                 K u S: products of FP8 values are exact in FP32, each of K additions rounds
    scales, bias         3 u (S + |bias|): two factors and one addition; folded scales round each operand once, 2 u S
    16-bit products      2^-8 |y|: where products are taken in BF16 the sum is rounded to BF16 before it is scaled
    output               2^-8 or 2^-11 of the result, plus half of FP16's smallest subnormal
"""

import itertools

import pytest
import torch
from casts import E4M3, E5M2, cast_of
from casts import ROUNDING as U
from real_operands import real

from fp8engine.ops import device
from fp8engine.ops.reference import Operand, matmul_fp8, matmul_fp16
from fp8engine.ops.reference.matmul import matmul_block
from fp8engine.ops.reference.quantize import quantize_operand

GROUPS = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
# (tokens, in, out): ones, ragged, and over a block of 128 with more than the 2^14 elements that go to BF16 products.
SIZES = [(1, 1, 1), (3, 5, 7), (17, 129, 33), (150, 257, 131)]
NOTHING = [(0, 5, 3), (2, 0, 3), (2, 5, 0)]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16 products", "fp32 products"], autouse=True)
def product(request, monkeypatch) -> torch.dtype:
    """Both kinds of emulation on any CPU, whichever is faster on this one."""
    monkeypatch.setattr(device, "product_dtype", lambda where: request.param)
    return request.param


def operand(x_MK: torch.Tensor, dtype=E4M3, rows: int = -1, cols: int = -1, power_of_2: bool = False) -> Operand:
    return quantize_operand(x_MK, cast_of(dtype, rows, cols, power_of_2))


def assert_within_bound(found: torch.Tensor, a: Operand, b: Operand, bias_N: torch.Tensor | None = None) -> None:
    a_MK, b_NK = real(a), real(b)
    y_MN, sums_MN = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
    bias = torch.zeros(()) if bias_N is None else bias_N.double()
    u = U[torch.float32]
    bound = u * ((a_MK.shape[1] + 2) * sums_MN + 3 * (sums_MN + bias.abs()))
    if found.dtype != torch.float32:
        bound += U[torch.bfloat16] * y_MN.abs() + U[found.dtype] * ((y_MN + bias).abs() + bound) * (1 + 2**-7)
        bound += 2.0**-25 if found.dtype == torch.float16 else 0.0
    error = (found.double() - (y_MN + bias)).abs()
    assert found.shape == y_MN.shape
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(GROUPS, GROUPS)))
def test_every_pair_of_granularities(first, second, power_of_2):
    """As the forward's matmul reads them, and as wgrad's does: transposes of what was cast down its columns."""
    for (m, k, n), turned in itertools.product([*SIZES, *NOTHING], (False, True)):
        spread = torch.exp2(torch.randint(-4, 5, (max(m, k, n),)))
        x_MK, w_NK = torch.randn(m, k) * spread[:k], torch.randn(n, k) * spread[:n, None]
        (rows_a, cols_a), (rows_b, cols_b) = GROUPS[first], GROUPS[second]
        if turned:
            a = operand(x_MK.t(), E5M2, cols_a, rows_a, power_of_2).t()
            b = operand(w_NK.t(), E4M3, cols_b, rows_b, power_of_2).t()
        else:
            a, b = operand(x_MK, E5M2, rows_a, cols_a, power_of_2), operand(w_NK, E4M3, rows_b, cols_b, power_of_2)
        for out, bias_N in itertools.product(U, (None, torch.randn(n), torch.randn(n).bfloat16())):
            found = matmul_fp8(a, b, bias_N, out)
            assert found.dtype == out
            assert_within_bound(found, a, b, bias_N)
        assert_within_bound(matmul_block(a, b, None, torch.float32), a, b)


def test_held_values_multiply_like_their_codes():
    for (m, k, n), group in itertools.product(SIZES, GROUPS.values()):
        a, b = operand(torch.randn(m, k), E4M3, *group, True), operand(torch.randn(n, k), E4M3, *group, True)
        for held in (torch.float32, torch.bfloat16):
            x = a._replace(data=a.data.to(held))
            for other, out in itertools.product((b.data, b.data.to(held), b.data.float()), (torch.float32, held)):
                assert_within_bound(matmul_fp8(x, b._replace(data=other), None, out), a, b)


def test_fp32_output_may_be_asked_for_without_exactness(product):
    a, b = operand(torch.randn(150, 257)), operand(torch.randn(131, 257))
    fast = matmul_fp8(a, b, None, torch.float32, exact=False)
    assert fast.dtype == torch.float32
    # One rounding to 16 bits of the sum, as hardware's output would have; none where products are in FP32.
    exact = matmul_fp8(a, b, None, torch.float32, exact=True)
    assert ((fast - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-12).all()
    assert torch.equal(fast, exact) == (product == torch.float32)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("out", U)
def test_large_codes_do_not_overflow_a_16_bit_result(out, sizes):
    # Codes of 448 sum to 448^2 K, far over FP16's 65504; with the scales the result is K.
    m, k, n = sizes
    a = Operand(torch.full((m, k), 448.0).to(E4M3), torch.tensor(1 / 448))
    b = Operand(torch.full((n, k), 448.0).to(E4M3), torch.full((n, 1), 1 / 448), 1, -1)
    for pair in ((a, b), (a, b._replace(scale=torch.tensor(1 / 448), rows=-1))):
        assert_within_bound(matmul_fp8(*pair, None, out), *pair)


def test_folded_scales_are_not_squeezed_into_fp16(monkeypatch):
    # A V100 multiplies in FP16, whose range holds every FP8 value but not every value times its scale.
    monkeypatch.setattr(device, "product_dtype", lambda where: torch.float16)
    x_MK = torch.randn(150, 257) * torch.exp2(torch.arange(150) - 75)[:, None]
    a, b = operand(x_MK, E4M3, 1, 128, True), operand(torch.randn(131, 257), E4M3, 128, 128, True)
    assert_within_bound(matmul_fp8(a, b, None, torch.bfloat16), a, b)


@pytest.mark.parametrize("size", [3, 140])
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_reaches_its_row_and_no_other(group, size):
    for dtype, bad in ((E4M3, float("nan")), (E5M2, float("nan")), (E5M2, float("inf"))):
        x_MK, w_NK = torch.randn(size, 2 * size), torch.rand(size, 2 * size) + 0.5
        x_MK[1, 2] = bad
        a, b = operand(x_MK, dtype, *GROUPS[group], True), operand(w_NK, E4M3, *GROUPS[group], True)
        for out in U:
            y_MN = matmul_fp8(a, b, None, out)
            assert (y_MN[1] == bad).all() if bad == float("inf") else y_MN[1].isnan().all()
            assert y_MN[torch.arange(size) != 1].isfinite().all()


@pytest.mark.parametrize("k", [1, 31, 33, 140, 280])
def test_what_is_not_finite_does_not_reach_the_row_before(k):
    """oneDNN's BF16 kernels read up to 31 values behind a row of A whose length is no multiple of 32."""
    for m, n in ((7, 3), (140, 16), (140, 140)):
        a, b = operand(torch.randn(m, k)), operand(torch.rand(n, k))
        wanted = matmul_fp8(a, b)
        codes = a.data.clone()
        codes[1, 0] = torch.tensor(float("nan")).to(E4M3)
        found = matmul_fp8(a._replace(data=codes), b)
        assert found[1].isnan().all()
        assert torch.equal(found[torch.arange(m) != 1], wanted[torch.arange(m) != 1])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("large", ["a", "b"])
def test_a_scale_near_the_end_of_fp32_makes_no_finite_result_infinite(group, large):
    """The scale is near 2^120 / 448, sums reach 2^17 * K: one times the other passes 2^128, the result does not."""
    m, k, n = 19, 130, 9
    large_MK, small_NK = torch.randn(m, k).clamp(-4, 4) * 2.0**118, torch.randn(n, k) * 2.0**-10
    for out, power_of_2 in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        a = operand(large_MK, E5M2, *GROUPS[group], power_of_2)
        b = operand(small_NK, E4M3, *GROUPS[group], power_of_2)
        a, b = (a, b) if large == "a" else (b, a)
        assert_within_bound(matmul_fp8(a, b, None, out), a, b)


@pytest.mark.parametrize("group", GROUPS)
def test_a_product_of_scales_beyond_fp32_gives_infinity_and_leaves_zeros(group):
    x_MK, w_NK = (torch.rand(9, 40) + 0.5) * 2.0**75, (torch.rand(5, 40) + 0.5) * 2.0**76
    x_MK[3] = 0.0
    a, b = operand(x_MK, E4M3, *GROUPS[group]), operand(-w_NK, E4M3, *GROUPS[group])
    for out, bias_N in itertools.product((torch.float32, torch.bfloat16), (None, torch.arange(5.0))):
        y_MN = matmul_fp8(a, b, bias_N, out)
        assert (y_MN[torch.arange(9) != 3] == -float("inf")).all()
        assert torch.equal(y_MN[3], torch.zeros(5, dtype=out) if bias_N is None else bias_N.to(out))


@pytest.mark.parametrize("dtype", U)
def test_matmul_of_16_bit_operands(dtype):
    for m, k, n in SIZES:
        a_MK, b_NK, bias_N = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        exact = a_MK.double() @ b_NK.double().t()
        sums = a_MK.double().abs() @ b_NK.double().abs().t()
        for out, bias in itertools.product((None, torch.float32), (None, bias_N)):
            wanted = exact if bias is None else exact + bias.double()
            found = matmul_fp16(a_MK, b_NK, bias, out)
            assert found.dtype == (out or dtype)
            # One rounding to the output; asked for FP32, none on the way.  Half a subnormal of FP16 besides.
            bound = (k + 2) * 2.0**-24 * (sums + 5) + U[found.dtype] * wanted.abs() * (1 + 2**-7) + 2.0**-25
            assert ((found.double() - wanted).abs() <= bound).all()
