"""How a kernel that makes FP32 values stores them: once, in the format that their consumers read.

    plain    y rounded once to 16 bits, or FP32
    tensor   q = saturate(RNE(y * s)), one s: predicted, or MAX / amax
    group    s of every GROUP columns of a row (128, or the whole row), found while the tile is in registers
    lines    s of every row, and of every column for the transposed copy, where no tile holds a whole one

tensor and lines take two launches of one kernel.  The first measures; under a predicted s it stores as well.  The
second makes y again and casts under the measured scale; where a prediction held it has no tile to do: the same-step
recast, for which nobody waits.  `work`, INT64 [6], is what is known of the tensor between launches: amax (FP32 bits,
whose order is that of integers), saturated, underflowed, nonfinite, BOUND - bits of the smallest s, underflowed in the
second launch.  `_note_kernel` enters it in the slot.  Maxima of integers and integer sums: the order of programs,
which is not fixed, changes nothing.

Twins: `store` in fp8engine/reference/cast_transpose.py, and quantize.py and scale.py beside it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.epilogue import SATURATES
from fp8engine.kernels.launch import processors, triton_dtype
from fp8engine.kernels.rounding import is_finite, largest, saturating_cast

FP32_MAX = tl.constexpr(3.4028234663852886e38)
EXPONENT_BITS = tl.constexpr(0x7F800000)  # of a positive FP32
BOUND = tl.constexpr(0x7F800000)  # bits of Inf, above those of any s: `work` starts at 0 and only grows
WORK_SIZE = 6
GROUP_COLUMNS = 128
RESIDENT_WARPS = 32  # programs for half of a multiprocessor's 64 warps leave each thread 64 registers


@triton.jit
def scale_factor(amax, MAX, POWER_OF_2: tl.constexpr):
    """s = MAX / amax: 1 for amax 0, at most the largest finite FP32, rounded down to a power of two where asked."""
    s = tl.div_rn(tl.zeros_like(amax) + MAX, tl.where(amax > 0, amax, 1.0))
    s = tl.where(amax > 0, tl.where(s > FP32_MAX, FP32_MAX, s), 1.0)
    if POWER_OF_2:
        s = (s.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    return s


@triton.jit
def inverse(s):
    """The scale that is stored, 1 / s correctly rounded."""
    return tl.div_rn(tl.zeros_like(s) + 1.0, s)


@triton.jit
def from_bits(bits):
    """The non-negative FP32 number that these bits are."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def tensor_factor(work, live, index, stride, MAX, POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr):
    """(s, whether it is the measured one) of a tensor that the first launch has measured."""
    amax = from_bits(tl.load(work))
    s = scale_factor(amax, MAX, POWER_OF_2)
    measured = amax >= 0
    if DELAYED:
        predicted = tl.load(live + stride + index)
        measured = (predicted == 0) | ((predicted > 0) & (amax * predicted > MAX * SATURATES))
        s = tl.where(measured, s, predicted)
    return s, measured


@triton.jit
def begin(
    work, live, scale, index, stride,
    HOW: tl.constexpr, OUT: tl.constexpr, POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """(s of the tensor, or 1; whether this launch has tiles to do).  The second launch writes the tensor's scale."""
    s = tl.full((), 1.0, tl.float32)
    todo = tl.program_id(0) >= 0
    if HOW == "tensor":
        if SECOND:
            s, todo = tensor_factor(work, live, index, stride, largest(OUT), POWER_OF_2, DELAYED)
            if tl.program_id(0) == 0:
                tl.store(scale, inverse(s))
        elif DELAYED:
            s = tl.load(live + stride + index)
    return s, todo


@triton.jit
def total(condition):
    """How many, as INT64."""
    return tl.sum(tl.sum(condition.to(tl.int32), 1), 0).to(tl.int64)


@triton.jit
def put(
    y_MN, rows, first, limit, M, K, s, outputs, seen,
    HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr,
    SECOND: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Measure a tile of y [M, K] in FP32 and store it; return `seen` with what was found inside added.

    rows: INT64.  first, limit: the tile's first column, and the one that no element of it lies in or beyond.
    outputs: q, q transposed, scale, scale transposed, amax of rows, of columns; None for what there is not.
    """
    q, q_t, scale, scale_t, amax_M, amax_K = outputs
    SIZE_M: tl.constexpr = y_MN.shape[0]
    SIZE_N: tl.constexpr = y_MN.shape[1]
    columns = first + tl.arange(0, SIZE_N)
    inside = (rows[:, None] < M) & (columns[None, :] < limit)
    at = rows[:, None] * K + columns[None, :]
    if HOW == "plain":
        tl.store(q + at, y_MN.to(OUT), mask=inside)
    else:
        MAX = largest(OUT)
        finite = inside & is_finite(y_MN)
        magnitude = tl.where(finite, tl.abs(y_MN), 0.0)
        amax, saturated, underflowed, nonfinite, smallest = seen
        if not SECOND:
            if COUNT or HOW == "tensor":
                amax = tl.maximum(amax, tl.max(tl.max(magnitude, 1), 0))
            if COUNT:
                nonfinite += total(inside & (finite == 0))
            if COUNT and DELAYED:
                saturated += total(magnitude * s > MAX * SATURATES)
            if HOW == "lines":
                top = tl.max(magnitude, 1).to(tl.int32, bitcast=True)
                tl.atomic_max(amax_M + rows, top, mask=rows < M, sem="relaxed")
                if q_t is not None:
                    top = tl.max(magnitude, 0).to(tl.int32, bitcast=True)
                    tl.atomic_max(amax_K + columns, top, mask=columns < limit, sem="relaxed")
        if SECOND or HOW == "group" or DELAYED:
            y_t = y_MN
            if HOW == "tensor":
                scaled = y_MN * s
            elif HOW == "group":
                GROUPS: tl.constexpr = SIZE_N // GROUP
                top = tl.max(tl.reshape(magnitude, (SIZE_M, GROUPS, GROUP)), 2)
                factor = scale_factor(top, MAX, POWER_OF_2)
                groups = first // GROUP + tl.arange(0, GROUPS)
                there = (rows[:, None] < M) & (groups[None, :] * GROUP < limit)
                tl.store(scale + rows[:, None] * tl.cdiv(K, GROUP) + groups[None, :], inverse(factor), mask=there)
                spread = tl.broadcast_to(factor[:, :, None], (SIZE_M, GROUPS, GROUP))
                scaled = y_MN * tl.reshape(spread, (SIZE_M, SIZE_N))
                if COUNT:
                    smallest = tl.minimum(smallest, tl.min(tl.min(tl.where(there, factor, float("inf")), 1), 0))
                if q_t is not None:  # SIZE_M is 128 rows: one group of every column
                    factor = scale_factor(tl.max(magnitude, 0), MAX, POWER_OF_2)
                    group = tl.min(rows, 0) // SIZE_M
                    at_t = columns.to(tl.int64) * tl.cdiv(M, SIZE_M) + group
                    tl.store(scale_t + at_t, inverse(factor), mask=columns < limit)
                    y_t = y_MN * factor[None, :]
            else:
                factor = scale_factor(from_bits(tl.load(amax_M + rows, mask=rows < M, other=0)), MAX, POWER_OF_2)
                tl.store(scale + rows, inverse(factor), mask=(rows < M) & (first == 0))
                scaled = y_MN * factor[:, None]
                if COUNT:
                    smallest = tl.minimum(smallest, tl.min(tl.where(rows < M, factor, float("inf")), 0))
                if q_t is not None:
                    top = tl.load(amax_K + columns, mask=columns < limit, other=0)
                    factor = scale_factor(from_bits(top), MAX, POWER_OF_2)
                    tl.store(scale_t + columns, inverse(factor), mask=(columns < limit) & (tl.min(rows, 0) == 0))
                    y_t = y_MN * factor[None, :]
            codes = saturating_cast(scaled, y_MN, OUT)
            tl.store(q + at, codes, mask=inside)
            if COUNT:
                flushed = (codes.to(tl.uint8, bitcast=True) & 0x7F) == 0
                underflowed += total(inside & (y_MN != 0) & flushed)
            if q_t is not None:
                if HOW != "tensor":
                    codes = saturating_cast(y_t, y_MN, OUT)
                at_t = columns[:, None].to(tl.int64) * M + rows[None, :]
                tl.store(q_t + at_t, tl.trans(codes), mask=(columns[:, None] < limit) & (rows[None, :] < M))
        seen = amax, saturated, underflowed, nonfinite, smallest
    return seen


@triton.jit
def nothing_seen():
    """amax, saturated, underflowed, nonfinite, smallest s."""
    none = tl.zeros((), tl.int64)
    return tl.zeros((), tl.float32), none, none, none, tl.full((), float("inf"), tl.float32)


@triton.jit
def publish_seen(work, seen, SECOND: tl.constexpr):
    """Enter what a program saw: one atomic for each thing there was any of."""
    if work is not None:
        amax, saturated, underflowed, nonfinite, smallest = seen
        if amax > 0:
            tl.atomic_max(work, amax.to(tl.int32, bitcast=True).to(tl.int64), sem="relaxed")
        if saturated > 0:
            tl.atomic_add(work + 1, saturated, sem="relaxed")
        if underflowed > 0:
            tl.atomic_add(work + (5 if SECOND else 2), underflowed, sem="relaxed")
        if nonfinite > 0:
            tl.atomic_add(work + 3, nonfinite, sem="relaxed")
        if smallest < float("inf"):
            tl.atomic_max(work + 4, (-smallest.to(tl.int32, bitcast=True) + BOUND).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["index", "elements"])
def _note_kernel(
    work, live, counts, index, elements, stride_live, stride_counts,
    HOW: tl.constexpr, OUT: tl.constexpr, POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr, COUNT: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    """Enter one call in its slot: one program, so that no other order of additions is possible."""
    amax, nonfinite = from_bits(tl.load(work)), tl.load(work + 3)
    underflowed, recast = tl.load(work + 2), nonfinite * 0
    s = from_bits(-tl.load(work + 4) + BOUND)
    if HOW == "tensor":
        s, measured = tensor_factor(work, live, index, stride_live, largest(OUT), POWER_OF_2, DELAYED)
        underflowed = tl.where(measured, tl.load(work + 5), underflowed)
        if DELAYED:
            recast = (measured & (tl.load(live + stride_live + index) > 0)).to(tl.int64)
    elif HOW == "lines":
        underflowed = tl.load(work + 5)
    tl.debug_barrier()  # the predicted s is read before it is written
    if COUNT:
        at = counts + index
        tl.store(at, tl.load(at) + 1)
        tl.store(at + stride_counts, tl.load(at + stride_counts) + elements)
        tl.store(at + 2 * stride_counts, tl.load(at + 2 * stride_counts) + elements)
        tl.store(at + 3 * stride_counts, tl.load(at + 3 * stride_counts) + tl.load(work + 1))
        tl.store(at + 4 * stride_counts, tl.load(at + 4 * stride_counts) + underflowed)
        tl.store(at + 5 * stride_counts, tl.load(at + 5 * stride_counts) + nonfinite)
        tl.store(at + 6 * stride_counts, tl.load(at + 6 * stride_counts) + recast)
    if RECORD and nonfinite == 0:
        tl.store(live + index, tl.maximum(tl.load(live + index), amax))
        if not DELAYED:
            tl.store(live + stride_live + index, s)


class Quantized(NamedTuple):
    """The reference's Operand, field by field."""

    data: torch.Tensor
    scale: torch.Tensor
    rows: int
    cols: int
    power_of_2: bool


class Target:
    """Where y [M, K] goes: outputs, what is known of the tensor between launches, and the constants of a launch.

    tile_n: columns of a tile that may hold a whole row, whose scale is then found there; 0: none does.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, where: torch.device, to, tile_n: int):
        m, k = shape
        self.to, self.elements = to, m * k
        how, slot = to.how, to.slot
        self.mode, group = mode_of(to, k, tile_n), 1
        out = dtype if how is None else how.dtype
        self.data = torch.empty(m, k, dtype=out, device=where)
        self.data_t = self.scale = self.scale_t = self.amax_M = self.amax_K = self.work = None
        self.note = slot is not None and how is not None and (slot.count or (slot.record and how.per_tensor))
        if how is not None:
            self.scale = torch.empty(how.scale_shape(m, k), dtype=torch.float32, device=where)
            group = GROUP_COLUMNS if how.cols == GROUP_COLUMNS else tile_n
        if to.transposed:
            self.data_t = torch.empty(k, m, dtype=out, device=where)
            if not how.per_tensor:  # q^T has groups of its own, down the columns of y
                groups = 1 if how.cols == -1 else triton.cdiv(m, GROUP_COLUMNS)
                self.scale_t = torch.empty(k, groups, dtype=torch.float32, device=where)
        if self.mode == "lines":
            self.amax_M = torch.zeros(m, dtype=torch.int32, device=where)
            self.amax_K = torch.zeros(k, dtype=torch.int32, device=where) if to.transposed else None
        if self.note or self.mode == "tensor":
            self.work = torch.zeros(WORK_SIZE, dtype=torch.int64, device=where)
        self.delayed = how is not None and how.delayed and slot is not None
        self.index = 0 if slot is None else slot.index
        self.stride = 0 if slot is None else slot.live_2S.stride(0)
        self.live = slot.live_2S if slot is not None else None
        self.constants = {
            "HOW": self.mode,
            "OUT": triton_dtype(out),
            "POWER_OF_2": how is not None and how.power_of_2,
            "DELAYED": self.delayed,
        }
        self.group = group

    @property
    def launches(self) -> tuple[bool, ...]:
        """SECOND of every launch."""
        return (False, True) if self.mode in ("tensor", "lines") else (False,)

    @property
    def pointers(self) -> tuple:
        """What every kernel is given of it, in this order."""
        return self.data, self.data_t, self.scale, self.scale_t, self.amax_M, self.amax_K, self.work, self.live

    def result(self) -> tuple:
        """Enter the call in its slot and return (y, its transpose) as the twin's `store` does."""
        how, slot = self.to.how, self.to.slot
        if how is None:
            return self.data, None
        if self.note:
            _note_kernel[(1,)](
                self.work, slot.live_2S, slot.counts_CS, slot.index, self.elements, self.stride,
                slot.counts_CS.stride(0), **self.constants, COUNT=slot.count, RECORD=slot.record, num_warps=1,
            )  # fmt: skip
        return self.operands()

    def operands(self) -> tuple:
        """(q, q transposed) with their scales."""
        how = self.to.how
        if how is None:
            return self.data, None
        q = Quantized(self.data, self.scale, how.rows, how.cols, how.power_of_2)
        if self.data_t is None:
            return q, None
        if how.per_tensor:
            return q, q._replace(data=self.data_t)
        return q, Quantized(self.data_t, self.scale_t, how.rows, how.cols, how.power_of_2)

    def empty(self) -> tuple:
        """The same of a tensor without elements: scales of 1."""
        for scale in (self.scale, self.scale_t):
            if scale is not None:
                scale.fill_(1.0)
        return self.operands()


def mode_of(to, k: int, tile_n: int) -> str:
    """Which of the ways above `to` asks for where tiles are tile_n wide."""
    if to.how is None:
        return "plain"
    if to.how.per_tensor:
        return "tensor"
    return "group" if to.how.cols == GROUP_COLUMNS or (k <= tile_n and not to.transposed) else "lines"


def cannot_store(to) -> str | None:
    """Why no kernel stores as `to` says, or None."""
    how = to.how
    if how is None:
        return "a transposed copy is kept in FP8 only" if to.transposed else None
    if how.held is not None:
        return "values held on the FP8 grid in 16 bits are an emulation's"
    if (how.rows, how.cols) not in ((-1, -1), (1, -1), (1, GROUP_COLUMNS)):
        return f"scales per {how.rows} x {how.cols} block: store 16 bits, then quantise"
    return "a predicted scale is one per tensor" if how.delayed and not how.per_tensor else None


def programs(tasks: int, warps: int, where: torch.device) -> int:
    """As many as are resident at once, or as there are tasks."""
    return min(tasks, processors(where) * max(1, RESIDENT_WARPS // warps))
