"""Device functions of every cast to FP8: amax to scale, rounding of a tile, counters.

    s = MAX / amax     FP32, correctly rounded; 1 for amax 0; the largest finite FP32 where it overflows
    q = saturate(RNE(x * s))          stored scale = 1 / s
    flushed: x was not zero and q is      nonfinite: NaN and Inf

Flushed elements are counted in one call of SAMPLE_EVERY under scales of groups, as a CPU does: they are half of such a
cast's instructions.

Counters and amaxes go to column `index` of a model's tables: live [2, slots] FP32 (row 0 the largest amax of this step,
row 1 the factor s), counts [7, slots] INT64, rows as in the reference's COUNTERS.  Only whoever knows that no element
of the whole tensor was NaN or Inf may enter an amax: one Inf must not freeze a window.

Twin: fp8engine/ops/reference/scale.py and the counters of fp8engine/ops/reference/quantize.py.
"""

import triton
import triton.language as tl

from fp8engine.kernels.constant import Constant
from fp8engine.kernels.rounding import cast_finite, is_finite, largest, round_to_grid, saturating_cast

FP32_MAX = Constant(3.4028234663852886e38)
UP = Constant(0x001FFFFF)  # to FP32's bits: a mantissa over 1.75 carries into the exponent
INF_BITS = Constant(0x7F800000)
ALL_BUT_SIGN = Constant(0x7FFFFFFF)
CALLS, ELEMENTS, SAMPLED, SATURATED, UNDERFLOWED, NONFINITE, RECASTS = (Constant(row) for row in range(7))
WORK = 8  # INT32, zero at first: programs done, amax, whether not finite, least s's bits inverted, NOT_FINITE; aligned
NOT_FINITE = Constant(4)  # its place: something is not, as a launch before has found
SAMPLE_EVERY = Constant(16)  # calls of a slot, the first included
HELD = Constant(16)  # columns whose counts and largest value a thread keeps to the end: no warps meet for a tile
PAIR = Constant(1 << 16)  # a tile has at most 2^14 elements, so two counts of it fit into one INT32


@triton.jit
def scale_factor(amax, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr):
    """s for amaxes of any shape, which are finite.

    A power of two, the largest that is not over MAX / amax: by exponents, without a division.  Both formats' MAX is
    1.75 times a power of two, so an amax whose mantissa is over 1.75 counts as of the next exponent: adding UP carries.
    Else div_rn: a plain `/` is one ulp off now and then, and every backend must agree.
    """
    if POWER_OF_2:
        TOP: tl.constexpr = 254 + (8 if DTYPE == tl.float8e4nv else 15)  # 254: of 2^127, twice the exponents' bias
        exponent = (amax.to(tl.int32, bitcast=True) + UP) >> 23
        s = (tl.minimum(TOP - exponent, 254) << 23).to(tl.float32, bitcast=True)
    else:
        s = tl.div_rn(largest(DTYPE), tl.where(amax > 0, amax, 1.0))
        s = tl.where(s > FP32_MAX, FP32_MAX, s)
    return tl.where(amax > 0, s, 1.0)


@triton.jit
def scale_of(s):
    """1 / s, correctly rounded."""
    return tl.div_rn(1.0, s)


@triton.jit
def sizes_of(x, FINITE: tl.constexpr):
    """The bits of |x|, INT32, which are ordered as |x| is; from INF_BITS on they are not finite, and 0 where FINITE."""
    bits = x.to(tl.int32, bitcast=True) & ALL_BUT_SIGN
    if FINITE:
        bits = tl.where(bits < INF_BITS, bits, 0)
    return bits


@triton.jit
def magnitude(x):
    """|x| of what is finite, 0 of the rest."""
    return sizes_of(x, True).to(tl.float32, bitcast=True)


@triton.jit
def total(x):
    """The sum over a tile of INT32."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def sums_of(x, SIZE: tl.constexpr):
    """[R, C / SIZE] of x [R, C]: the sum of every SIZE columns, INT32."""
    return tl.sum(tl.reshape(x.to(tl.int32), (x.shape[0], x.shape[1] // SIZE, SIZE)), 2)


@triton.jit
def peaks_of(x, SIZE: tl.constexpr):
    """[R, C / SIZE] of x [R, C]: the largest of every SIZE columns."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // SIZE, SIZE)), 2)


@triton.jit
def peak(x):
    """The maximum over a tile."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def line_scale(amax, scale, lines, SIZE, first, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Return (amaxes, s) of some lines, whose amaxes are known as bits; tiles that are the first store 1 / s."""
    inside = lines < SIZE
    top = tl.load(amax + lines, mask=inside, other=0).to(tl.float32, bitcast=True)
    s = scale_factor(top, DTYPE, POWER_OF_2)
    if first == 0:  # a division is 16 instructions
        tl.store(scale + lines, scale_of(s), mask=inside)
    return top, s


@triton.jit
def flushes(x, y, DTYPE: tl.constexpr):
    """Whether x is not zero and the code of y = x * s is."""
    TIE: tl.constexpr = 2.0**-10 if DTYPE == tl.float8e4nv else 2.0**-17  # half the smallest subnormal goes to 0
    return (x != 0) & (tl.abs(y) <= TIE)


@triton.jit
def scale_and_round(x, s, DTYPE: tl.constexpr):
    """Return (FP8 codes of x * s, which elements were flushed).  x: FP32, zero outside of its matrix."""
    y = x * s
    return saturating_cast(y, x, DTYPE), flushes(x, y, DTYPE)


@triton.jit
def rounded_again(x, s, DTYPE: tl.constexpr):
    """FP8 codes of x * s for a second store, beside the codes that the first has.  x: of its own dtype.

    ptxas 12.8 is wrong where the pairs that the conversion makes are stored as words and taken apart as well: it takes
    bytes of the tile before (seen on an H200; in PTX all is right; `make codegen` looks for such pairs).  So each store
    has a conversion of its own.  Of FP32 values, where Triton would make one of both, they are brought onto the grid
    first, which changes nothing.
    """
    wide = x.to(tl.float32)
    y = wide * s
    if x.dtype == tl.float32:
        y = round_to_grid(y, DTYPE)
    return saturating_cast(y, wide, DTYPE)


@triton.jit
def counted(lost, bad):
    """(how many are lost, how many are bad) of a tile, by one reduction over the program, not two."""
    both = total(lost.to(tl.int32) + tl.where(bad, PAIR, 0))
    return both % PAIR, both // PAIR


@triton.jit
def codes_of(x, s, DTYPE: tl.constexpr, CAREFUL: tl.constexpr):
    """Return (codes of x * s, how many were flushed, how many are not finite).

    x: FP32 [rows, columns], zero outside of its matrix.  Without CAREFUL it is finite, and nothing is counted: 0, 0.
    """
    if CAREFUL:
        codes, lost = scale_and_round(x, s, DTYPE)
        flushed, nonfinite = counted(lost, is_finite(x) == 0)
    else:
        codes = cast_finite(x * s, DTYPE)
        flushed = 0
        nonfinite = 0
    return codes, flushed, nonfinite


@triton.jit
def add(counts, index, stride, ROW: tl.constexpr, value):
    """counts[ROW, index] += value, where there is something to add."""
    if value > 0:
        tl.atomic_add(counts + ROW * tl.cast(stride, tl.int64) + index, tl.cast(value, tl.int64), sem="relaxed")


@triton.jit
def is_sampled(counts, index):
    """Whether the call that runs is one whose flushed elements are counted."""
    return tl.load(counts + index) % SAMPLE_EVERY == 0  # CALLS is row 0


@triton.jit
def add_call(counts, index, stride, elements, sampled):
    """Count one call of that many elements, and how many of them were looked at."""
    add(counts, index, stride, CALLS, 1)
    add(counts, index, stride, ELEMENTS, elements)
    add(counts, index, stride, SAMPLED, sampled)


@triton.jit
def enter(
    live, counts, index, stride_live, stride_counts, elements, amax, s, saturated, flushed, nonfinite,
    PREDICTED: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One call under one scale, entered by the one program that knows all of it.

    flushed: of codes that stay; a recast adds its own.
    """
    if COUNT:
        add_call(counts, index, stride_counts, elements, elements)
        add(counts, index, stride_counts, SATURATED, saturated)
        add(counts, index, stride_counts, UNDERFLOWED, flushed)
        add(counts, index, stride_counts, NONFINITE, nonfinite)
        if saturated > 0:
            add(counts, index, stride_counts, RECASTS, 1)
    clean = nonfinite == 0
    if RECORD and clean:
        tl.atomic_max(live + index, amax, sem="relaxed")
        if not PREDICTED:
            tl.store(live + tl.cast(stride_live, tl.int64) + index, s)


@triton.jit
def finish(slot, elements, seen, COUNT: tl.constexpr, RECORD: tl.constexpr):
    """The end of every program of a launch that scales by groups, where COUNT or RECORD.

    slot: work (WORK integers), live, counts, index, strides of live and counts.  seen: by this program: flushed,
    nonfinite, amax, least s.  The last program to come here knows about all of them: it counts the call, and enters
    amax and s unless something was not finite.
    """
    work, live, counts, index, stride_live, stride_counts = slot
    flushed, nonfinite, amax, s = seen
    sampled = tl.cast(0, tl.int64)
    if COUNT:
        if is_sampled(counts, index):
            sampled = elements
            add(counts, index, stride_counts, UNDERFLOWED, flushed)
        add(counts, index, stride_counts, NONFINITE, nonfinite)
    if RECORD:
        # A positive FP32 is ordered as its bits are.
        tl.atomic_max(work + 1, amax.to(tl.int32, bitcast=True), sem="relaxed")
        if nonfinite > 0:
            tl.atomic_max(work + 2, 1, sem="relaxed")
        tl.atomic_max(work + 3, s.to(tl.int32, bitcast=True) ^ ALL_BUT_SIGN, sem="relaxed")
    done = tl.atomic_add(work, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:  # an atomic reads past this multiprocessor's own cache
        if COUNT:
            add_call(counts, index, stride_counts, elements, sampled)
        if RECORD:
            clean = tl.atomic_max(work + 2, 0) == 0
            top = tl.atomic_max(work + 1, 0).to(tl.float32, bitcast=True)
            least = (tl.atomic_max(work + 3, 0) ^ ALL_BUT_SIGN).to(tl.float32, bitcast=True)
            if clean:
                tl.atomic_max(live + index, top, sem="relaxed")
                tl.store(live + tl.cast(stride_live, tl.int64) + index, least)
