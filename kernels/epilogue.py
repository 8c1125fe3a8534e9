"""The epilogue of a matmul: a tile of FP32 sums is finished in registers before it is stored.

    y    = f(acc * (scale_a[m] * scale_b[n]) + bias[n])                 f: none, or a plain kind of activations.py
    amax = max |y| over finite y     saturated = how many |y| / scale > MAX     nonfinite = how many NaN and Inf
    stored: y rounded once to 16 or 32 bits, or saturate(RNE(y / scale)) in FP8 under a scale given beforehand

The format is decided before storing to memory: an FP8 result costs one byte an element, written once, where a
separate cast would write two, read two and write one.  Statistics cost one atomic each per program.
Twin: fp8engine/ops/reference/epilogue.py.
"""

import triton
import triton.language as tl

from fp8engine.kernels.activations import PLAIN, activate
from fp8engine.kernels.constant import Constant
from fp8engine.kernels.rounding import is_finite, largest, saturating_cast
from fp8engine.kernels.tile import pieces, store_tile

# |y / scale| over MAX by less than the rounding of 1 / scale itself is not saturation.
SATURATES = Constant(1 + 2.0**-22)
ACTIVATIONS = ("none", *PLAIN)


@triton.jit
def real_values(acc, rows, columns, M, N, scale_a, scale_b, BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr):
    """acc * (scale_a * scale_b) in FP32; a scale is one number or one per row of its operand; both None: acc.

    The scales first: a sum times the scale of values near 1e36 alone passes FP32's range where the result does not.
    """
    if scale_a is not None:
        if BY_ROW_A:
            factor = tl.load(scale_a + rows, mask=rows < M, other=1.0)[:, None]
        else:
            factor = tl.load(scale_a)
        if BY_ROW_B:
            factor = factor * tl.load(scale_b + columns, mask=columns < N, other=1.0)[None, :]
        else:
            factor = factor * tl.load(scale_b)
        acc = acc * factor
    return acc


@triton.jit
def finish(
    y, rows, columns, M, N, bias, output_scale, ACTIVATION: tl.constexpr, OUT: tl.constexpr, COUNT: tl.constexpr
):
    """Return (y as it is stored, amax, saturated, nonfinite) of real values y.  COUNT: are the last three used."""
    y = activated(y, columns, N, bias, ACTIVATION)
    scaled = y
    if output_scale is not None:
        scaled = y * tl.div_rn(1.0, tl.load(output_scale))
    amax = 0.0
    saturated = 0
    nonfinite = 0
    if COUNT:
        magnitude, over, bad = judged(y, scaled, rows, columns, M, N, OUT)
        amax = tl.max(tl.max(magnitude, 1), 0)
        saturated = tl.sum(tl.sum(over, 1), 0)
        nonfinite = tl.sum(tl.sum(bad, 1), 0)
    return rounded(y, scaled, OUT), amax, saturated, nonfinite


@triton.jit
def activated(y, columns, N, bias, ACTIVATION: tl.constexpr):
    """f(y + bias)."""
    if bias is not None:
        y += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACTIVATION)
    return y


@triton.jit
def judged(y, scaled, rows, columns, M, N, OUT: tl.constexpr):
    """Of each element: |y| where it is finite, else 0; whether it saturates, and whether it is not finite, as INT32."""
    inside = (rows[:, None] < M) & (columns[None, :] < N)  # the rest holds bias, or what 0 activates to
    finite = is_finite(y)
    magnitude = tl.where(inside & finite, tl.abs(y), 0.0)
    over = inside & finite & (tl.abs(scaled) > largest(OUT) * SATURATES)
    return magnitude, over.to(tl.int32), (inside & (finite == 0)).to(tl.int32)


@triton.jit
def rounded(y, scaled, OUT: tl.constexpr):
    """The results as they are stored."""
    if OUT == tl.float8e4nv or OUT == tl.float8e5:
        stored = saturating_cast(scaled, y, OUT)
    else:
        stored = scaled.to(OUT)
    return stored


@triton.jit
def store_result(
    y, acc_MN, row, column, M, N,
    scale_a, scale_b, bias, output_scale,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, BY_ROW_A: tl.constexpr, BY_ROW_B: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Finish a tile of sums whose first element is [row, column], piece by piece; return its statistics."""
    rows = row + tl.arange(0, acc_MN.shape[0])
    PART_N: tl.constexpr = acc_MN.shape[1] // PARTS
    amax = 0.0
    saturated = 0
    nonfinite = 0
    runs = pieces(acc_MN, PARTS)
    for part in tl.static_range(PARTS):
        first = column + part * PART_N
        columns = first + tl.arange(0, PART_N)
        y_MN = real_values(runs[part], rows, columns, M, N, scale_a, scale_b, BY_ROW_A, BY_ROW_B)
        stored, top, over, bad = finish(y_MN, rows, columns, M, N, bias, output_scale, ACTIVATION, OUT, COUNT)
        store_tile(y, stored, row, first, M, N, BY_DESCRIPTOR)
        if COUNT:
            amax = tl.maximum(amax, top)
            saturated += over
            nonfinite += bad
    return amax, saturated, nonfinite


@triton.jit
def publish(amax_ptr, counts_ptr, amax, saturated, nonfinite):
    """Enter a program's statistics where they are wanted: amax FP32 [1], counts INT64 [2]."""
    if amax_ptr is not None:
        tl.atomic_max(amax_ptr, amax, sem="relaxed")
    if counts_ptr is not None:
        if saturated > 0:
            tl.atomic_add(counts_ptr, saturated.to(tl.int64), sem="relaxed")
        if nonfinite > 0:
            tl.atomic_add(counts_ptr + 1, nonfinite.to(tl.int64), sem="relaxed")
