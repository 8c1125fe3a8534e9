"""Casts to FP8 and back: bit for bit against ml_dtypes, on every value that 16 bits can hold."""

import numpy as np
import pytest
import torch
from casts import E5M2, FP8, MAX, NUMPY, assert_same, bits, clamped_cast, every_code, every_value, factor, values

from fp8engine._torch import FakeTensor, FakeTensorMode
from fp8engine.ops.reference import decode, round_to_grid, rounding, saturating_cast
from fp8engine.ops.reference.attention import attention_cast, rotation_of

HALF = [torch.bfloat16, torch.float16]
# One; powers of two that flush or saturate a lot; odd ones, where x * s itself rounds; one where x * s overflows.
SCALES = [1.0, 2.0**9, 2.0**-5, 2.0**-20, 0.3, 1234.567, 3e38]


def scaled(x: torch.Tensor, s: float) -> torch.Tensor:
    return x.float() * float(np.float32(s))


@pytest.mark.parametrize("s", SCALES)
@pytest.mark.parametrize("source", HALF)
@pytest.mark.parametrize("dtype", FP8)
def test_every_16_bit_value_is_cast_to_the_bit(dtype, source, s):
    """Finite ones as ml_dtypes does; E4M3 has no Inf: NaN.  Values on the grid are those of the codes."""
    x = every_value(source)
    codes = saturating_cast(scaled(x, s), x, dtype)
    finite = torch.isfinite(x).numpy()
    wanted = clamped_cast(x.float().numpy()[finite], s, dtype)
    assert_same(bits(codes)[finite], wanted, f"{source} to {dtype}")  # bytes: the sign of zero counts
    lost = x.double().numpy()[~finite]
    assert_same(values(codes)[~finite], lost if dtype == E5M2 else np.full_like(lost, np.nan))
    assert_same(round_to_grid(scaled(x, s), x, dtype), values(codes).astype(np.float32))


@pytest.mark.parametrize("dtype", FP8)
def test_of_fp32_the_product_may_overflow_and_only_what_was_infinite_is_not_finite(dtype):
    x = torch.tensor([1e10, -1e10, 3.4e38, 500000.0, np.inf, -np.inf, np.nan])
    y = scaled(x, 3e38)
    assert torch.isinf(y[:6]).all()
    ends = [np.inf, -np.inf, np.nan] if dtype == E5M2 else [np.nan] * 3
    wanted = np.array([*(np.array([1, -1, 1, 1]) * MAX[dtype]), *ends])
    assert_same(values(saturating_cast(y.clone(), x, dtype)), wanted)
    assert_same(round_to_grid(y, x, dtype), wanted)


@pytest.mark.parametrize("dtype", FP8)
def test_cast_at_and_beside_every_midpoint(dtype):
    """Between two codes is a midpoint: exactly there ties go to even, one FP32 step beside it the nearer code wins."""
    grid = np.unique(values(every_code(dtype))[np.isfinite(values(every_code(dtype)))])
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    points = np.concatenate([middle, *(np.nextafter(middle, np.float32(way)) for way in (np.inf, -np.inf))])
    x, wanted = torch.from_numpy(points), points.astype(NUMPY[dtype])
    for finite in (False, True):
        assert_same(bits(saturating_cast(x.clone(), x, dtype, finite)), wanted.view(np.uint8))
        assert_same(round_to_grid(x.clone(), x, dtype, finite), wanted.astype(np.float32))


@pytest.mark.parametrize("source", HALF)
@pytest.mark.parametrize("dtype", FP8)
def test_the_unchecked_route_agrees_where_its_promise_holds(dtype, source):
    """|y| <= MAX, and one ulp above, which rounding of s can produce: that is MAX."""
    x = every_value(source)
    x = x[torch.isfinite(x)]
    s = float(factor(x.float().abs().max().item(), MAX[dtype]))
    assert float(scaled(x, s).max()) >= MAX[dtype] * (1 - 2**-23), "reaches MAX"
    top = torch.full((2,), float(np.nextafter(np.float32(MAX[dtype]), np.float32(np.inf))))
    for y, given in ((scaled(x, s), x), (top, top)):
        checked = saturating_cast(y.clone(), given, dtype)
        assert_same(bits(saturating_cast(y.clone(), given, dtype, finite=True)), bits(checked), "codes")
        assert_same(round_to_grid(y.clone(), given, dtype, finite=True), values(checked).astype(np.float32), "values")


VIEWS = {
    "few": lambda c: c,
    "below the table's threshold": lambda c: c.repeat(17)[:2047],
    "at it": lambda c: c.repeat(17)[:2048],
    "above it, odd": lambda c: c.repeat(17)[:2049],
    "even": lambda c: c.repeat(17)[:4100],
    "transposed": lambda c: c.repeat(16).view(64, 64).t(),
    "strided": lambda c: c.repeat(16).view(64, 64)[:, ::2],
    "3-D": lambda c: c.repeat(16).view(4, 32, 32).transpose(0, 2),
    "odd start": lambda c: c.repeat(16)[1 : 1 + 2048],  # cannot be read two codes at a time
    "stride 0": lambda c: c[5:6].expand(64, 64),
    "empty": lambda c: c[:0],
    "0-D": lambda c: c[5],
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("code", FP8)
def test_decode_of_any_view_is_exact(code, view, dtype):
    codes = VIEWS[view](every_code(code).view(torch.uint8)).view(code)
    found, wanted = decode(codes, dtype), values(codes)
    assert (found.shape, found.dtype) == (codes.shape, dtype)
    assert found.stride() == torch.empty_like(codes, dtype=dtype).stride(), "as a graph expects it"
    assert_same(found.double().numpy(), wanted, f"{code} to {dtype}")
    number = ~np.isnan(wanted)
    assert (np.signbit(found.double().numpy()) == np.signbit(wanted))[number].all(), "sign of zero"


def test_tables_of_codes_and_rotations_are_real_after_a_step_was_planned():
    """Tensors of a step that is only planned are fake, and are not kept."""
    for cached in (rounding._pair_table, rotation_of):
        cached.cache_clear()
    for plan in (True, False):
        with FakeTensorMode(allow_non_fake_inputs=True) if plan else torch.no_grad():
            codes = [torch.ones(shape).to(torch.float8_e4m3fn) for shape in ((3, 999), (4, 1000))]
            values = [decode(each, torch.float32) for each in codes]
            rotated, _ = attention_cast(torch.ones(1, 1, 3, 64), rotated=True)
        assert [isinstance(x, FakeTensor) for x in (*values, rotated)] == [plan] * 3
    assert all(torch.equal(x, torch.ones_like(x)) for x in values)
