"""Casts to FP8 and back: bit for bit against ml_dtypes, on every value that 16 bits can hold."""

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2, FP8, MAX, NUMPY, assert_same, bits, clamped_cast, every_code, every_value, factor, values

from fp8engine.ops.reference import decode, round_to_grid, saturating_cast

HALF = [torch.bfloat16, torch.float16]
# One; powers of two that flush or saturate a lot; odd ones, where x * s itself rounds; one where x * s overflows.
SCALES = [1.0, 2.0**9, 2.0**-5, 2.0**-20, 0.3, 1234.567, 3e38]


def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
    return x.float() * float(np.float32(s))


@pytest.mark.parametrize("s", SCALES)
@pytest.mark.parametrize("source", HALF)
@pytest.mark.parametrize("dtype", FP8)
def test_cast_is_bit_exact_on_every_finite_16_bit_value(dtype, source, s):
    x = every_value(source)
    found = bits(saturating_cast(scaled(x, s), x, dtype))
    finite = torch.isfinite(x).numpy()
    wanted = clamped_cast(x.float().numpy()[finite], s, dtype)
    assert_same(found[finite], wanted, f"{source} to {dtype}")  # bytes: the sign of zero counts


@pytest.mark.parametrize("source", [*HALF, torch.float32])
def test_what_is_not_finite_stays_so(source):
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], dtype=source)
    for s in SCALES:
        e4m3 = values(saturating_cast(scaled(x, s), x, E4M3))
        assert np.isnan(e4m3[:3]).all(), "E4M3 has no Inf: both infinities and NaN become NaN"
        e5m2 = values(saturating_cast(scaled(x, s), x, E5M2))
        assert_same(e5m2[:3], np.array([np.inf, -np.inf, np.nan]), "E5M2 keeps Inf")
        assert np.isfinite([e4m3[3], e5m2[3]]).all()


@pytest.mark.parametrize("dtype", FP8)
def test_finite_values_saturate_even_where_the_product_overflows_fp32(dtype):
    x = torch.tensor([1e10, -1e10, 3.4e38, 500000.0])
    y = scaled(x, 3e38)
    assert torch.isinf(y).all()
    wanted = np.array([1, -1, 1, 1]) * MAX[dtype]
    assert_same(values(saturating_cast(y.clone(), x, dtype)), wanted)
    assert_same(round_to_grid(y, x, dtype), wanted)


@pytest.mark.parametrize("dtype", FP8)
def test_cast_at_and_beside_every_midpoint(dtype):
    # Between two codes lies a midpoint: exactly there ties go to even, one FP32 step beside it the nearer code wins.
    grid = np.unique(values(every_code(dtype))[np.isfinite(values(every_code(dtype)))])
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    points = np.concatenate(
        [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, -np.float32(np.inf))]
    )
    x = torch.from_numpy(points)
    wanted = points.astype(NUMPY[dtype])
    assert_same(bits(saturating_cast(x.clone(), x, dtype)), wanted.view(np.uint8), "codes")
    assert_same(bits(saturating_cast(x.clone(), x, dtype, finite=True)), wanted.view(np.uint8), "codes, unchecked")
    assert_same(round_to_grid(x.clone(), x, dtype), wanted.astype(np.float32), "values")


@pytest.mark.parametrize("dtype", FP8)
def test_ties_do_not_drift(dtype):
    # In any binade half of the midpoints round up and half down, so their errors cancel exactly.
    grid = np.unique(np.abs(values(every_code(dtype))[np.isfinite(values(every_code(dtype)))]))
    for low in 2.0 ** np.arange(-4, 8):
        binade = grid[(grid >= low) & (grid <= 2 * low)]
        x = torch.from_numpy((binade[1:] + binade[:-1]) / 2).float()
        assert (round_to_grid(x.clone(), x, dtype) - x).sum() == 0, f"binade from {low}"


@pytest.mark.parametrize("s", SCALES)
@pytest.mark.parametrize("source", HALF)
@pytest.mark.parametrize("dtype", FP8)
def test_grid_values_are_the_codes_values(dtype, source, s):
    x = every_value(source)
    codes = saturating_cast(scaled(x, s), x, dtype)
    assert_same(round_to_grid(scaled(x, s), x, dtype), values(codes).astype(np.float32))


@pytest.mark.parametrize("source", HALF)
@pytest.mark.parametrize("dtype", FP8)
def test_the_unchecked_route_agrees_where_its_promise_holds(dtype, source):
    x = every_value(source)
    x = x[torch.isfinite(x)]
    s = float(factor(x.float().abs().max().item(), MAX[dtype]))
    assert float(scaled(x, s).max()) >= MAX[dtype] * (1 - 2**-23), "reaches MAX"
    checked = saturating_cast(scaled(x, s), x, dtype)
    assert_same(bits(saturating_cast(scaled(x, s), x, dtype, finite=True)), bits(checked), "codes")
    assert_same(round_to_grid(scaled(x, s), x, dtype, finite=True), values(checked).astype(np.float32), "values")
    # One ulp above MAX, which rounding of s can produce, is MAX.
    top = torch.full((2,), float(np.nextafter(np.float32(MAX[dtype]), np.float32(np.inf))))
    assert_same(values(saturating_cast(top.clone(), top, dtype, finite=True)), np.full(2, MAX[dtype]))
    assert_same(round_to_grid(top.clone(), top, dtype, finite=True), np.full(2, MAX[dtype], np.float32))


def same_values_and_signs(found: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> None:
    wanted = values(codes)
    assert found.dtype == dtype
    assert_same(found.double().numpy(), wanted, f"{codes.dtype} to {dtype}")
    number = ~np.isnan(wanted)
    assert (np.signbit(found.double().numpy()) == np.signbit(wanted))[number].all(), "sign of zero"


@pytest.mark.parametrize("size", [256, 2047, 2048, 2049, 4100])  # below, at and above the table's threshold; odd
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", FP8)
def test_decode_is_exact(code, dtype, size):
    codes = every_code(code).view(torch.uint8).repeat(17)[:size].view(code)
    same_values_and_signs(decode(codes, dtype), codes, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "view",
    [
        lambda c: c.view(64, 64).t(),
        lambda c: c.view(64, 64)[:, ::2],
        lambda c: c.view(4, 32, 32).transpose(0, 2),
        lambda c: c[1:].contiguous(),
        lambda c: c[1 : 1 + 2048],  # starts at an odd byte: cannot be read two codes at a time
        lambda c: c[:1].expand(64, 64),
        lambda c: c[:0],
        lambda c: c[5],
    ],
    ids=["transposed", "strided", "3-D", "odd size", "odd start", "stride 0", "empty", "0-D"],
)
@pytest.mark.parametrize("code", FP8)
def test_decode_of_any_view(code, view, dtype):
    codes = view(every_code(code).repeat(16))
    found = decode(codes, dtype)
    assert found.shape == codes.shape
    same_values_and_signs(found, codes, dtype)
