"""The part that norms and activations share: tiles, loads and launch, and the stores of a result that is made in FP32.

What is stored is the result rounded to 16 bits and, beside it, its FP8 codes:

    y        the values rounded to x's dtype, which is the result; all below is of y, bit for bit as a cast of y has it
    plain    no codes: the caller casts y
    tensor   one s.  Predicted: q = saturate(RNE(y * s)), and what each program saw; the cast's second launch
             (quantize.py) recasts y where the prediction did not hold.  Else that launch finds the amax and casts
    group    s of every GROUP columns of a row (128, or the whole row), found while the tile is in registers

Bytes an element of BF16, beside reading x: 2 for y; 1 for q, 1 for q^T; where the amax has to be known first, 2 more,
to read y again.  To make y again would read x, which is as much of a plain activation and twice as much of a gated one;
a cast of its own would read y three times.  So one launch measures for both, and y is made once.

Twins: `store` in fp8engine/ops/reference/cast_transpose.py, and quantize.py and scale.py beside it.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.epilogue import SATURATES
from fp8engine.kernels.launch import processors, told, triton_dtype
from fp8engine.kernels.quantize import MOST_PROGRAMS, cast_measured, tensor_results, workspace
from fp8engine.kernels.rounding import is_finite, largest, saturating_cast
from fp8engine.kernels.scaling import WORK, counted, finish, flushes, peak, rounded_again, scale_factor, scale_of, total

GROUP_COLUMNS = 128
WIDEST_ROW = 16384  # columns that 16 warps hold, 32 FP32 elements a thread
ELEMENTS = 2048  # of a tile of narrow rows
RESIDENT_WARPS = 32  # programs for half of a multiprocessor's 64 warps leave each thread 64 registers


class Tile(NamedTuple):
    """Rows and columns of a tile, warps of a program."""

    m: int
    n: int
    warps: int


def row_tile(n: int) -> Tile:
    """A tile of whole rows of n columns: 16 elements a thread, 32 of the widest."""
    width = max(GROUP_COLUMNS, 1 << (n - 1).bit_length())
    return Tile(max(1, ELEMENTS // width), width, min(16, max(4, width // 512)))


@triton.jit
def read(x, rows, columns, M, K, stride_m, stride_k, AGAIN: tl.constexpr = False):
    """Some rows and columns of x [M, K] in FP32, 0 beyond its edges.  rows: INT64.

    AGAIN: by another instruction, which the compiler does not take for the one before.
    """
    inside = (rows[:, None] < M) & (columns[None, :] < K)
    at = rows[:, None] * stride_m + columns[None, :].to(tl.int64) * stride_k
    return tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first" if AGAIN else "").to(tl.float32)


@triton.jit
def begin(q, slot, HOW: tl.constexpr):
    """(s of the tensor, or 1; what was seen: amax, saturated, flushed, nonfinite, least s).

    slot: work, live, counts, index, strides of live and counts.
    """
    _, live, _, index, stride_live, _ = slot
    s = tl.full((), 1.0, tl.float32)
    if HOW == "tensor" and q is not None:
        s = tl.load(live + tl.cast(stride_live, tl.int64) + index)
    none = tl.zeros((), tl.int32)
    return s, (tl.zeros((), tl.float32), none, none, none, tl.full((), float("inf"), tl.float32))


@triton.jit
def put(
    value_MN, rows, first, limit, M, K, s, outputs, seen,
    HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, POWER_OF_2: tl.constexpr, NOTE: tl.constexpr,
):  # fmt: skip
    """Round a tile of y [M, K] and store it; return `seen` with what was found inside added.

    rows: INT64.  first, limit: the tile's first column, and the one that no element of it lies in or beyond.
    outputs: y, q, q transposed, scale, sums of columns of every tile of rows, None for what this launch does not write;
    and which tile of rows it is.
    """
    y, q, q_t, scale, part, down = outputs
    SIZE_M: tl.constexpr = value_MN.shape[0]
    SIZE_N: tl.constexpr = value_MN.shape[1]
    columns = first + tl.arange(0, SIZE_N)
    inside = (rows[:, None] < M) & (columns[None, :] < limit)
    at = rows[:, None] * K + columns[None, :]
    rounded_MN = value_MN.to(y.dtype.element_ty)
    tl.store(y + at, rounded_MN, mask=inside)
    y_MN = rounded_MN.to(tl.float32)
    if part is not None:
        tl.store(part + tl.cast(down, tl.int64) * K + columns, tl.sum(y_MN, 0), mask=columns < limit)
    if HOW != "plain":
        amax, saturated, flushed, nonfinite, least = seen
        finite = inside & is_finite(y_MN)
        size_MN = tl.where(finite, tl.abs(y_MN), 0.0)
        s_MN = s
        if HOW == "tensor":
            amax = tl.maximum(amax, peak(size_MN))
            if q is None:
                nonfinite += total((inside & (finite == 0)).to(tl.int32))
        else:
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
        if q is not None:
            codes = saturating_cast(y_MN * s_MN, y_MN, OUT)
            tl.store(q + at, codes, mask=inside)
            if HOW == "tensor":
                saturated += total((size_MN * s > largest(OUT) * SATURATES).to(tl.int32))
            if NOTE:  # after the store: before it, up to 40 registers more
                # By y, not by the codes: ptxas 12.8 crashes on their bytes, and on an H200 it miscounts by their values
                # in FP16 (cvt to e4m3x2 and back: other counts in each run).
                # One reduction for both counts: with two, one program fits instead of two.
                lost, bad = counted(flushes(size_MN, size_MN * s_MN, OUT), inside & (finite == 0))
                flushed += lost
                nonfinite += bad
            if q_t is not None:
                at_t = columns[:, None].to(tl.int64) * M + rows[None, :]
                codes_NM = rounded_again(tl.trans(rounded_MN), s, OUT)
                tl.store(q_t + at_t, codes_NM, mask=(columns[:, None] < limit) & (rows[None, :] < M))
        seen = amax, saturated, flushed, nonfinite, least
    return seen


@triton.jit
def end(seen, slot, elements, HOW: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr):
    """Leave what a program saw where the cast's second launch looks for it, or enter it in the slot."""
    amax, saturated, flushed, nonfinite, least = seen
    if HOW == "tensor":
        here = slot[0] + tl.program_id(0)
        tl.store(here, amax.to(tl.int32, bitcast=True))
        tl.store(here + MOST_PROGRAMS, saturated)
        tl.store(here + 2 * MOST_PROGRAMS, flushed)
        tl.store(here + 3 * MOST_PROGRAMS, nonfinite)
    elif HOW == "group" and (COUNT or RECORD):
        finish(slot, elements, (flushed, nonfinite, amax, least), COUNT, RECORD)


class Target:
    """Where y [M, K] goes, and its codes where the kernel makes them: pointers and constants of its launch.

    like: of y's dtype and device.  tile_n: columns of a tile that may hold a whole row, whose scale is then found
    there; 0: none does.  turns: whether tiles have rows enough to store q^T.  y is contiguous, so is all else here.
    No size is 0: ops/norm_act.py leaves what holds nothing to the twin.
    """

    def __init__(self, shape: tuple[int, int], like: torch.Tensor, to, tile_n: int = 0, turns: bool = False):
        cast, slot = to.cast, to.slot
        self.to, self.mode = to, mode_of(to, shape, tile_n, turns)
        self.data = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.codes, self.work, grouped = (None, None, None), None, self.mode == "group"
        (live, counts), self.place, (count, record) = told(slot)
        if self.mode == "tensor":
            self.codes, self.work = tensor_results(self.data, cast, to.transposed), workspace(like.device)
        elif grouped:
            q_MK = torch.empty(shape, dtype=cast.dtype, device=like.device)
            self.codes = q_MK, None, torch.empty(cast.scale_shape(*shape), dtype=torch.float32, device=like.device)
            self.work = torch.zeros(WORK, dtype=torch.int32, device=like.device) if count or record else None
        now = self.codes if grouped or (slot is not None and cast is not None and cast.delayed) else (None, None, None)
        # What every kernel is given, in this order; the scale of the tensor is the second launch's.
        self.pointers = (self.data, *now[:2], now[2] if grouped else None, self.work, live, counts)
        self.constants = {
            "HOW": self.mode,
            "GROUP": GROUP_COLUMNS if by_128(cast) else max(tile_n, 1),
            "OUT": triton_dtype(like.dtype if self.mode == "plain" else cast.dtype),
            "POWER_OF_2": grouped and cast.power_of_2,
            "COUNT": self.mode == "tensor" or (grouped and count),
            "RECORD": grouped and record,
        }

    def launch(self, kernel, tile: Tile, given: tuple, sizes: tuple, **constants) -> tuple:
        """(y, (q, scale), (q^T, scale)), None for codes that the caller makes, made by that kernel.

        given: its pointers before y's.  sizes: M, the columns that tiles lie in, and what it is told beside them.
        """
        tiles = math.ceil(sizes[0] / tile.m) * math.ceil(sizes[1] / tile.n)
        count = programs(tiles, tile.warps, self.data.device)
        kernel[(count,)](
            *given,  # inputs, and outputs beside the codes
            *self.pointers,  # outputs
            *sizes, *self.place,  # sizes
            **constants, **self.constants, ROWS=tile.m, COLUMNS=tile.n, num_warps=tile.warps,  # constants
        )  # fmt: skip
        if self.mode == "tensor":
            cast_measured(self.data, (self.work, count, None), self.to.cast, self.to.slot, self.codes)
        q_MK, q_KM, scale = self.codes
        return self.data, None if q_MK is None else (q_MK, scale), None if q_KM is None else (q_KM, scale)


def by_128(cast) -> bool:
    """Whether it scales groups of 128 columns."""
    return cast is not None and cast.cols == GROUP_COLUMNS


def mode_of(to, shape: tuple[int, int], tile_n: int, turns: bool) -> str:
    """Which of the ways above `to` asks for where tiles are tile_n wide, and hold rows enough to turn or not."""
    cast = to.cast
    if cast is None:
        return "plain"
    if cast.per_tensor:  # a prediction is cast at once, and what is cast at once is turned at once or not at all
        return "plain" if to.transposed and cast.delayed and not turns else "tensor"
    whole = by_128(cast) or (cast.cols == -1 and shape[1] <= tile_n)
    return "group" if cast.rows == 1 and whole and not (to.transposed or cast.delayed) else "plain"


def programs(tasks: int, warps: int, where: torch.device) -> int:
    """As many as are resident at once, as there are tasks, or as a second launch reads the findings of."""
    return min(tasks, processors(where) * max(1, RESIDENT_WARPS // warps), MOST_PROGRAMS.value)
