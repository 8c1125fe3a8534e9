"""Rounding to FP8: nearest-even, saturating, keeping what is not finite.

    q = saturate(RNE(x * s))     |x * s| beyond MAX gives MAX; NaN stays NaN; Inf stays Inf in E5M2, NaN in E4M3

Two routes to the same values.  `saturating_cast` gives FP8 codes through torch's own conversion.  `round_to_grid`
stays in FP32 arithmetic and gives the values themselves, several times cheaper where only a matmul reads them:

    p = 2^floor(log2 |y|), at least the smallest normal       the exponent bits of y
    RNE(y) = (y + c) - c,   c = 1.5 * 2^(23 - mantissa bits) * p

Adding c leaves exactly `mantissa bits` below the leading bit of y, so the FP32 adder does the rounding.
A sum of that kind has no negative zero: the grid's zeros are all +0, which no matmul can tell apart.

Source: OCP 8-bit floating point specification 1.0, sections 5.2 and 5.3.
"""

from __future__ import annotations

import functools

import torch

from fp8engine._torch import FakeTensor
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops.reference.operand import as_groups, from_groups

EXPONENT_BITS = 0x7F800000
# Elements a CPU rounds at a time: more calls below, more cache misses and page faults above.
CHUNK = 1 << 17
# Below this many elements torch's own conversion, one call, beats rounding in FP32 arithmetic, six.
FEW = 4096


def saturating_cast(y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, finite: bool = False) -> torch.Tensor:
    """FP8 codes of y = x * s.

    y: FP32, overwritten.  x: what y was scaled from, same shape; it alone says what was not finite, because a
    finite x can overflow in x * s and then has to saturate.  finite: the caller knows that all of x is finite
    and |y| <= MAX up to the rounding of s, so nothing can saturate.

    >>> y = torch.tensor([1000.0, -1e30, 17.0])
    >>> saturating_cast(y, y.clone(), torch.float8_e4m3fn).float()
    tensor([ 448., -448.,   16.])
    """
    if finite:
        return y.to(dtype)
    maximum = Format.of(dtype).max
    return torch.where(torch.isfinite(x), y.clamp_(-maximum, maximum), _not_finite(x, dtype)).to(dtype)


def round_to_grid(y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, finite: bool = False) -> torch.Tensor:
    """The values of `saturating_cast`, in FP32; arguments as there.

    >>> y = torch.tensor([0.3, 17.0, float("nan")])
    >>> round_to_grid(y, y.clone(), torch.float8_e4m3fn)
    tensor([ 0.3125, 16.0000,     nan])
    """
    format = Format.of(dtype)
    if not finite:
        y = y.clamp_(-format.max, format.max)
    power = y.view(torch.int32).bitwise_and(EXPONENT_BITS).view(torch.float32).clamp_(min=format.smallest_normal)
    shift = 1.5 * 2.0 ** (23 - format.mantissa_bits)
    grid = y.add_(power, alpha=shift).sub_(power, alpha=shift)
    return grid if finite else torch.where(torch.isfinite(x), grid, _not_finite(x, dtype))


def scale_and_round(
    x_MK: torch.Tensor, s: torch.Tensor | float, cast: Cast, finite: bool, held: torch.dtype | None = None
) -> torch.Tensor:
    """saturate(RNE(x * s)) as FP8 codes, or as values in the dtype `held`; s: one number, or FP32 one per group.

    On a CPU by chunks that stay in its cache: a matrix-sized temporary costs more in page faults than in arithmetic.
    """
    if finite and isinstance(s, float) and x_MK.numel() < FEW:
        q_MK = (x_MK.float() * s).to(cast.dtype)
        return q_MK.to(held) if held else q_MK
    m, k = x_MK.shape
    q_MK = torch.empty(m, k, dtype=held or cast.dtype, device=x_MK.device)
    if x_MK.device.type != "cpu" or x_MK.numel() <= CHUNK:
        _round_rows(x_MK, s, cast, finite, q_MK)
        return q_MK
    step = max(CHUNK // k, 1)
    if cast.rows > 1:
        step = -(-step // cast.rows) * cast.rows
    for start in range(0, m, step):
        rows = slice(start, min(start + step, m))
        part = s
        if isinstance(s, torch.Tensor) and cast.rows != -1:
            part = s[start // cast.rows : -(-rows.stop // cast.rows)]
        _round_rows(x_MK[rows], part, cast, finite, q_MK[rows])
    return q_MK


def _round_rows(x_MK, s: torch.Tensor | float, cast: Cast, finite: bool, out: torch.Tensor) -> None:
    if isinstance(s, torch.Tensor):
        x = as_groups(x_MK, cast.rows, cast.cols)
        y = x.float() * s[:, None, :, None]
        out.copy_(from_groups(_round(y, x, cast, finite, out.dtype), *x_MK.shape))
    else:
        y = x_MK * s if x_MK.dtype == torch.float32 else x_MK.float().mul_(s)
        out.copy_(_round(y, x_MK, cast, finite, out.dtype))


def _round(y: torch.Tensor, x: torch.Tensor, cast: Cast, finite: bool, out: torch.dtype) -> torch.Tensor:
    """FP8 codes, or FP32 values on their grid for another `out`; all finite: y itself, which the copy rounds."""
    if out == cast.dtype:
        return y if finite else saturating_cast(y, x, cast.dtype)
    return round_to_grid(y, x, cast.dtype, finite)


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes as values in FP32, FP16 (all of E5M2 and E4M3 fits) or BF16: exact.

    On a CPU through a table of all pairs of codes, two elements a look-up: several times torch's own conversion.

    >>> decode(torch.tensor([1.5, -0.25]).to(torch.float8_e5m2), torch.bfloat16)
    tensor([ 1.5000, -0.2500], dtype=torch.bfloat16)
    """
    # A fake tensor, of a step that is planned, would leave a fake table to the steps that are taken.
    if codes.device.type != "cpu" or codes.numel() < 2048 or isinstance(codes, FakeTensor):
        return codes.to(dtype)
    if not codes.is_contiguous():
        if codes.dim() == 2 and codes.t().is_contiguous():
            return decode(codes.t(), dtype).t()
        # With the strides that `to` gives, which a graph expects.
        return torch.empty_like(codes, dtype=dtype).copy_(decode(codes.contiguous(), dtype))
    flat = codes.view(torch.uint8).view(-1)
    if flat.numel() % 2 or flat.storage_offset() % 2:  # no pairs
        return codes.to(dtype)
    values = torch.empty(codes.shape, dtype=dtype)
    table = _pair_table(codes.dtype, dtype)
    both, pairs = flat.view(torch.uint16), values.view(-1).view(table.dtype)
    for start in range(0, both.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        torch.index_select(table, 0, both[chunk].int(), out=pairs[chunk])
    return values


def _not_finite(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a non-finite x becomes: itself where the format has Inf, else NaN."""
    if Format.of(dtype).has_inf:
        return x.float()
    return torch.full((), float("nan"), device=x.device)


@functools.cache
def _pair_table(code: torch.dtype, value: torch.dtype) -> torch.Tensor:
    """Values of codes (i % 256, i // 256) side by side at i, as one integer of twice the width."""
    wide = {2: torch.int32, 4: torch.int64}[value.itemsize]
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(code).to(value).view(wide)
