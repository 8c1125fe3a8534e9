"""Stores of kernels that make FP32 values: written once, in the format that their consumers read.

    plain    y rounded once to 16 bits, or FP32
    tensor   q = saturate(RNE(y * s)), one s: predicted, or MAX / amax
    group    s of every GROUP columns of a row (128, or the whole row), found while the tile is in registers
    lines    s of every row, and of every column for the transposed copy, where no tile holds a whole one

tensor and lines take two launches of one kernel.  The first measures; under a predicted s it stores as well.  The
second makes y again and casts under the measured scale; where a prediction held it has no tile to do: the same-step
recast, for which nobody waits.  Its first program enters the call in the slot; groups and lines are entered by whoever
is done last (`scaling.finish`).  `work` is what is known of the tensor between programs: for one scale INT64, amax
(FP32 bits, whose order is that of integers), saturated, flushed, nonfinite.  Maxima of integers and integer sums: the
order of programs, which is not fixed, changes nothing.

Twins: `store` in fp8engine/ops/reference/cast_transpose.py, and quantize.py and scale.py beside it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.epilogue import SATURATES
from fp8engine.kernels.launch import processors, triton_dtype
from fp8engine.kernels.rounding import is_finite, largest, saturating_cast
from fp8engine.kernels.scaling import (
    PAIR,
    UNDERFLOWED,
    WORK,
    add,
    enter,
    finish,
    line_scale,
    peak,
    scale_factor,
    scale_of,
    total,
)

GROUP_COLUMNS = 128
RESIDENT_WARPS = 32  # programs for half of a multiprocessor's 64 warps leave each thread 64 registers


@triton.jit
def begin(
    scale, slot, elements,
    HOW: tl.constexpr, OUT: tl.constexpr, POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr, SECOND: tl.constexpr,
    COUNT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """(s of the tensor, or 1; whether this launch has tiles to do).  The second launch knows the tensor: it is entered.

    slot: work, live, counts, index, strides of live and counts.
    """
    work, live, counts, index, stride_live, stride_counts = slot
    s = tl.full((), 1.0, tl.float32)
    todo = tl.program_id(0) >= 0
    if HOW == "tensor":
        if DELAYED:
            s = tl.load(live + tl.cast(stride_live, tl.int64) + index)
        if SECOND:
            amax = tl.load(work).to(tl.int32).to(tl.float32, bitcast=True)
            if DELAYED:
                todo = (s == 0) | (amax * s > largest(OUT) * SATURATES)
            s = tl.where(todo, scale_factor(amax, OUT, POWER_OF_2), s)
            if tl.program_id(0) == 0:
                tl.store(scale, scale_of(s))
                if COUNT or RECORD:
                    flushed = tl.where(todo, 0, tl.load(work + 2))
                    enter(
                        live, counts, index, stride_live, stride_counts, elements, amax, s,
                        tl.load(work + 1), flushed, tl.load(work + 3), DELAYED, COUNT, RECORD,
                    )  # fmt: skip
    return s, todo


@triton.jit
def nothing_seen():
    """amax, saturated, flushed, nonfinite, least s."""
    none = tl.zeros((), tl.int32)
    return tl.zeros((), tl.float32), none, none, none, tl.full((), float("inf"), tl.float32)


@triton.jit
def put(
    y_MN, rows, first, limit, M, K, s, outputs, seen,
    HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr,
    SECOND: tl.constexpr, NOTE: tl.constexpr,
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
        amax, saturated, flushed, nonfinite, least = seen
        finite = inside & is_finite(y_MN)
        size_MN = tl.where(finite, tl.abs(y_MN), 0.0)
        s_MN = s
        t_MN = s
        if NOTE and HOW == "tensor" and not SECOND and not DELAYED:
            nonfinite += total((inside & (finite == 0)).to(tl.int32))
        if HOW == "tensor":
            if not SECOND:
                amax = tl.maximum(amax, peak(size_MN))
        elif HOW == "group":
            top = tl.max(tl.reshape(size_MN, (SIZE_M, SIZE_N // GROUP, GROUP)), 2)
            factor = scale_factor(top, OUT, POWER_OF_2)
            groups = first // GROUP + tl.arange(0, SIZE_N // GROUP)
            there = (rows[:, None] < M) & (groups[None, :] * GROUP < limit)
            tl.store(scale + rows[:, None] * tl.cdiv(K, GROUP) + groups[None, :], scale_of(factor), mask=there)
            spread = tl.broadcast_to(factor[:, :, None], (SIZE_M, SIZE_N // GROUP, GROUP))
            s_MN = tl.reshape(spread, (SIZE_M, SIZE_N))
            if NOTE:
                amax = tl.maximum(amax, peak(top))
                least = tl.minimum(least, -peak(tl.where(there, -factor, float("-inf"))))
        elif SECOND:
            top, s_M = line_scale(amax_M, scale, rows, M, first, OUT, POWER_OF_2)
            s_MN = s_M[:, None]
            if NOTE:
                amax = tl.maximum(amax, top)
                least = tl.minimum(least, tl.min(tl.where(rows < M, s_M, float("inf")), 0))
            if q_t is not None:
                _, t_N = line_scale(amax_K, scale_t, columns, limit, tl.min(rows, 0), OUT, POWER_OF_2)
                t_MN = t_N[None, :]
        else:
            top = tl.max(size_MN, 1).to(tl.int32, bitcast=True)
            tl.atomic_max(amax_M + rows, top, mask=rows < M, sem="relaxed")
            if q_t is not None:
                top = tl.max(size_MN, 0).to(tl.int32, bitcast=True)
                tl.atomic_max(amax_K + columns, top, mask=columns < limit, sem="relaxed")
        if SECOND or DELAYED or HOW == "group":
            codes = saturating_cast(y_MN * s_MN, y_MN, OUT)
            tl.store(q + at, codes, mask=inside)
            if NOTE:  # after the store: before it, up to 40 registers more
                if HOW == "tensor" and not SECOND:
                    saturated += total((size_MN * s > largest(OUT) * SATURATES).to(tl.int32))
                # By what was stored: what tells it of y is held in registers until then.  In FP16: by the bytes of the
                # codes ptxas 12.8 crashes (cvt to e4m3x2, comparisons, redux.sync).
                value_MN = codes.to(tl.float16)
                lost = (inside & (y_MN != 0) & (value_MN == 0)).to(tl.int32)
                # One reduction for both counts: with two, one program fits instead of two.
                if HOW != "tensor" or not SECOND:
                    both = total(lost + tl.where(inside & (is_finite(value_MN) == 0), PAIR, 0))
                    flushed += both % PAIR
                    nonfinite += both // PAIR
                else:
                    flushed += total(lost)
            if q_t is not None:
                if HOW == "lines":
                    codes = saturating_cast(y_MN * t_MN, y_MN, OUT)
                at_t = columns[:, None].to(tl.int64) * M + rows[None, :]
                tl.store(q_t + at_t, tl.trans(codes), mask=(columns[:, None] < limit) & (rows[None, :] < M))
        seen = amax, saturated, flushed, nonfinite, least
    return seen


@triton.jit
def end(seen, slot, elements, HOW: tl.constexpr, SECOND: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr):
    """Enter what a program saw, in `work` where another launch goes by it, else in the slot."""
    work, live, counts, index, stride_live, stride_counts = slot
    amax, saturated, flushed, nonfinite, least = seen
    if HOW == "tensor":
        if not SECOND:
            tl.atomic_max(work, amax.to(tl.int32, bitcast=True).to(tl.int64), sem="relaxed")
            add(work, 0, 1, 1, saturated)
            add(work, 0, 1, 2, flushed)
            add(work, 0, 1, 3, nonfinite)
        elif COUNT:
            add(counts, index, stride_counts, UNDERFLOWED, flushed)
    elif (COUNT or RECORD) and (HOW == "group" or SECOND):
        finish(
            work, live, counts, index, stride_live, stride_counts, elements, flushed, nonfinite, amax, least,
            COUNT, RECORD,
        )  # fmt: skip


class Quantized(NamedTuple):
    """The reference's Operand, field by field."""

    data: torch.Tensor
    scale: torch.Tensor
    rows: int
    cols: int
    power_of_2: bool


class Target:
    """Where y [M, K] goes: outputs, what is known of the tensor between programs, and the constants of a launch.

    tile_n: columns of a tile that may hold a whole row, whose scale is then found there; 0: none does.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, where: torch.device, to, tile_n: int):
        (m, k), how, slot = shape, to.how, to.slot
        self.to, self.elements = to, m * k
        self.mode = mode_of(to, k, tile_n)
        out = dtype if how is None else how.dtype
        self.data = torch.empty(m, k, dtype=out, device=where)
        self.data_t = torch.empty(k, m, dtype=out, device=where) if to.transposed else None
        self.scale = self.scale_t = self.amax_M = self.amax_K = self.work = None
        if how is not None:
            self.scale = torch.empty(how.scale_shape(m, k), dtype=torch.float32, device=where)
        if self.mode == "lines":
            self.amax_M = torch.zeros(m, dtype=torch.int32, device=where)
            if to.transposed:  # q^T has scales of its own, of the columns of y
                self.amax_K = torch.zeros(k, dtype=torch.int32, device=where)
                self.scale_t = torch.empty(k, 1, dtype=torch.float32, device=where)
        count = slot is not None and how is not None and slot.count
        record = slot is not None and how is not None and slot.record
        if self.mode == "tensor" or record:
            self.work = torch.zeros(WORK, dtype=torch.int64 if self.mode == "tensor" else torch.int32, device=where)
        live, counts = (None, None) if slot is None else (slot.live_2S, slot.counts_CS)
        # What every kernel is given, in this order.
        self.pointers = (
            self.data, self.data_t, self.scale, self.scale_t, self.amax_M, self.amax_K, self.work, live, counts,
        )  # fmt: skip
        self.place = (0, 0, 0) if slot is None else (slot.index, live.stride(0), counts.stride(0))
        self.constants = {
            "HOW": self.mode,
            "GROUP": GROUP_COLUMNS if how is not None and how.cols == GROUP_COLUMNS else max(tile_n, 1),
            "OUT": triton_dtype(out),
            "POWER_OF_2": how is not None and how.power_of_2,
            "DELAYED": how is not None and how.delayed and slot is not None,
            "COUNT": count,
            "RECORD": record,
        }

    @property
    def launches(self) -> tuple[bool, ...]:
        """SECOND of every launch."""
        return (False, True) if self.mode in ("tensor", "lines") else (False,)

    def result(self) -> tuple:
        """(y, its transpose) as the twin's `store` returns them."""
        how = self.to.how
        if how is None:
            return self.data, None
        q = Quantized(self.data, self.scale, how.rows, how.cols, how.power_of_2)
        if self.data_t is None:
            return q, None
        return q, q._replace(data=self.data_t, scale=self.scale if how.per_tensor else self.scale_t)

    def empty(self) -> tuple:
        """The same of a tensor without elements: scales of 1."""
        for scale in (self.scale, self.scale_t):
            if scale is not None:
                scale.fill_(1.0)
        return self.result()


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
        return f"scales per {how.rows} x {how.cols} block: store FP32, then quantise"
    if to.transposed and how.cols == GROUP_COLUMNS:
        return "tiles of 128 x 128, groups both ways, spill: store FP32, then quantise both ways"
    return "a predicted scale is one per tensor" if how.delayed and not how.per_tensor else None


def programs(tasks: int, warps: int, where: torch.device) -> int:
    """As many as are resident at once, or as there are tasks."""
    return min(tasks, processors(where) * max(1, RESIDENT_WARPS // warps))
