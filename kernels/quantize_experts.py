"""Casts to FP8 whose groups span rows and begin anew at each expert's first row; transposes of codes by experts.

    x [T, K] ~ q * scale      groups of rows x cols within one expert's rows: -1 x 1 (a column of an expert), or blocks
                              of up to 128 x 128, of which those that span rows (32 x 32, 128 x 1) are cast here
    transposed                q [K, 128 * blocks], laid out in blocks (expert_rows.py), zeros behind an expert's rows

A column of an expert takes two launches, one for the amaxes (an atomic maximum per column and block), one to scale and
round: 5 bytes per 16-bit element.  Every other group lies inside of a block, which `cast_groups` casts as it casts a
tile of any matrix (quantize_groups.py): one launch, 3 bytes.
Scales FP32: [E, K] for columns; [128 * blocks / rows, ceil(K / cols)], or its transpose, for blocks.
Blocks behind the last expert's, which only the bound of their number has, are not written.
Twin: fp8engine/ops/reference/grouped.py.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.expert_rows import BLOCK, expert_of, experts_of, last_blocks, most_blocks, rows_of, width
from fp8engine.kernels.launch import MULTIPLE, describable, processors, told, triton_dtype
from fp8engine.kernels.quantize_groups import WARPS_PER_PROCESSOR, cast_groups, round_and_store, zeros_of
from fp8engine.kernels.scaling import WORK, finish, magnitude, peak, scale_factor, scale_of
from fp8engine.kernels.tile import load_tile, store_tile

COLUMNS, WARPS = 64, 16  # of a tile of 128 rows: 16 elements a thread
NARROW = 32  # columns where x is read element by element, and of a group of 128, which is read twice
SUM_COLUMNS = 32  # of a program that sums: rows of a whole line of 128 bytes


@triton.jit
def _expert_amax_kernel(
    x, bounds,
    amax,
    K, EXPERTS, stride_m, stride_k,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Bits of the amax of each column of each expert, [E, K] INT32, which were zero."""
    ends = last_blocks(bounds, EXPERTS, WIDTH)
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.load(bounds + 2 * EXPERTS + 1) * across, tl.num_programs(0)):
        block, column = tile // across, tile % across * BLOCK_K
        expert = expert_of(block, ends)
        row, end, _ = rows_of(bounds, EXPERTS, expert, block)
        x_MK = load_tile(x, row, column, end, K, (stride_m, stride_k), 128, BLOCK_K, "pointer").to(tl.float32)
        top_K = tl.max(magnitude(x_MK), 0).to(tl.int32, bitcast=True)
        columns = column + tl.arange(0, BLOCK_K)
        tl.atomic_max(amax + tl.cast(expert, tl.int64) * K + columns, top_K, mask=columns < K, sem="relaxed")


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _expert_cast_kernel(
    x, bounds, amax,
    q, scale, work, live, counts,
    K, EXPERTS, stride_m, stride_k, WIDE, index, stride_live, stride_counts,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """amax: what `_expert_amax_kernel` found, or None for groups inside of a block.  WIDE: columns of a transposed q.

    PIECE: columns of a tile that are cast at a time; a group of more is read for its amax and, from L1, once more.
    """
    DOWN: tl.constexpr = 128 // ROWS if amax is None else 1
    tops = tl.zeros((DOWN, BLOCK_K // COLS), tl.int32)
    seen = 0, 0, tops, tl.full((DOWN, BLOCK_K // COLS), float("inf"), tl.float32)
    ends = last_blocks(bounds, EXPERTS, WIDTH)
    across = tl.cdiv(K, BLOCK_K)
    strides = (stride_m, stride_k)
    scale_strides = (tl.cdiv(K, COLS), 1)
    for tile in tl.range(tl.program_id(0), tl.load(bounds + 2 * EXPERTS + 1) * across, tl.num_programs(0)):
        block, column = tile // across, tile % across * BLOCK_K
        expert = expert_of(block, ends)
        row, end, first = rows_of(bounds, EXPERTS, expert, block)
        if amax is None:
            seen = cast_groups(
                x, q, scale, None, seen, (row, end, block), column, WIDE, K, strides, scale_strides,
                DTYPE, POWER_OF_2, ROWS, COLS, TRANSPOSED, True, True, 128, BLOCK_K, 128, PIECE,
            )  # fmt: skip
        else:
            x_MK = load_tile(x, row, column, end, K, strides, 128, BLOCK_K, "pointer").to(tl.float32)
            columns = (column + tl.arange(0, BLOCK_K))[None, :]
            at = tl.cast(expert, tl.int64) * K + columns
            found = tl.load(amax + at, mask=columns < K, other=0)
            s = scale_factor(found.to(tl.float32, bitcast=True), DTYPE, POWER_OF_2)
            tl.store(scale + at, scale_of(s), mask=(columns < K) & (block == first))
            here = row, end, block * 128
            lost, bad = round_and_store(x_MK, s, q, here, column, WIDE, K, DTYPE, TRANSPOSED, True)
            flushed, nonfinite, top, least = seen
            least = tl.minimum(least, tl.where(columns < K, s, float("inf")))
            seen = flushed + lost, nonfinite + bad, tl.maximum(top, found), least
    if amax is not None:
        for expert in range(tl.program_id(0), EXPERTS, tl.num_programs(0)):
            empty = tl.load(bounds + expert) == tl.load(bounds + expert + 1)
            for column in range(0, K, BLOCK_K):
                columns = column + tl.arange(0, BLOCK_K)
                at = tl.cast(expert, tl.int64) * K + columns
                tl.store(scale + at, tl.full((BLOCK_K,), 1.0, tl.float32), mask=(columns < K) & empty)
    if COUNT or RECORD:
        flushed, nonfinite, top, least = seen
        seen = flushed, nonfinite, peak(top).to(tl.float32, bitcast=True), tl.min(tl.min(least, 1), 0)
        elements = tl.cast(tl.load(bounds + EXPERTS), tl.int64) * K
        if elements > 0:  # where no expert has a row, there was no call
            finish((work, live, counts, index, stride_live, stride_counts), elements, seen, COUNT, RECORD)


@triton.jit
def _expert_transpose_kernel(
    q, bounds,
    q_t,
    K, EXPERTS, stride_m, stride_k, WIDE,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Codes as bytes, [T, K], to [K, WIDE] in blocks; 0 behind an expert's rows."""
    ends = last_blocks(bounds, EXPERTS, WIDTH)
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.load(bounds + 2 * EXPERTS + 1) * across, tl.num_programs(0)):
        block, column = tile // across, tile % across * BLOCK_K
        row, end, _ = rows_of(bounds, EXPERTS, expert_of(block, ends), block)
        codes = load_tile(q, row, column, end, K, (stride_m, stride_k), 128, BLOCK_K, "pointer")
        store_tile(q_t, codes.T, column, block * 128, K, WIDE, False)


@triton.jit
def _expert_sums_kernel(
    x, bounds,
    sums,
    N, stride_m, stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sums [E, N] FP32: a program for an expert and BLOCK_N columns, its rows added in an order that never changes."""
    expert, column = tl.program_id(1), tl.program_id(0) * BLOCK_N
    end = tl.load(bounds + expert + 1)
    sums_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(tl.load(bounds + expert), end, BLOCK_M):
        sums_MN += load_tile(x, row, column, end, N, (stride_m, stride_n), BLOCK_M, BLOCK_N, "pointer").to(tl.float32)
    columns = column + tl.arange(0, BLOCK_N)
    tl.store(sums + tl.cast(expert, tl.int64) * N + columns, tl.sum(sums_MN, 0), mask=columns < N)


def quantize_experts(x_TK: torch.Tensor, cast, bounds_2E1, slot=None, transposed: bool = False):
    """Return (q, scale): q [T, K], or [K, 128 * blocks] where `transposed`.

    cast: groups of rows x cols of x, -1 x 1, or powers of two up to 128.  No row behind the last expert's is written.
    """
    (t, k), experts, where = x_TK.shape, experts_of(bounds_2E1), x_TK.device
    wide = most_blocks(t, experts) * BLOCK
    q = torch.empty((k, wide) if transposed else (t, k), dtype=cast.dtype, device=where)
    by_column = cast.rows == -1
    shape = experts if by_column else wide // cast.rows, math.ceil(k / cast.cols)
    scale = torch.empty(shape, dtype=torch.float32, device=where)
    given = scale.t() if transposed and not by_column else scale  # contiguous along rows: matmul_gluon.py reads them
    if x_TK.numel() == 0:
        return q, given.fill_(1.0)
    wide_access = describable(x_TK) and k % MULTIPLE == 0
    piece = COLUMNS if wide_access and cast.cols <= COLUMNS else NARROW
    warps = WARPS // 2 if wide_access and piece == NARROW else WARPS  # 16 elements a thread: stores of 16 bytes
    block_k = max(piece, cast.cols)
    programs = _programs(wide, k, block_k, where)
    tables, place, (count, record) = told(slot)
    work, amax = zeros_of((WORK * (count or record), experts * k * by_column), where)
    sizes = k, experts, *x_TK.stride()
    if by_column:
        _expert_amax_kernel[programs](
            x_TK, bounds_2E1,  # inputs
            amax,  # output
            *sizes,
            WIDTH=width(experts), BLOCK_K=block_k, num_warps=WARPS,  # constants
        )  # fmt: skip
    _expert_cast_kernel[programs](
        x_TK, bounds_2E1, amax,  # inputs
        q, scale, work, *tables,  # outputs
        *sizes, wide, *place,  # sizes
        WIDTH=width(experts), DTYPE=triton_dtype(cast.dtype), POWER_OF_2=cast.power_of_2,  # constants
        ROWS=cast.rows, COLS=cast.cols, TRANSPOSED=transposed, COUNT=count, RECORD=record,
        BLOCK_K=block_k, PIECE=piece, num_warps=warps,
    )  # fmt: skip
    return q, given


def transpose_experts(q_TK: torch.Tensor, bounds_2E1: torch.Tensor) -> torch.Tensor:
    """FP8 codes [K, 128 * blocks], laid out in blocks, of codes [T, K] in any strides."""
    (t, k), experts, where = q_TK.shape, experts_of(bounds_2E1), q_TK.device
    wide = most_blocks(t, experts) * BLOCK
    q_t = torch.empty(k, wide, dtype=q_TK.dtype, device=where)
    if q_t.numel():
        _expert_transpose_kernel[_programs(wide, k, COLUMNS, where)](
            q_TK.view(torch.uint8), bounds_2E1,  # inputs
            q_t.view(torch.uint8),  # output
            k, experts, *q_TK.stride(), wide,  # sizes
            WIDTH=width(experts), BLOCK_K=COLUMNS, num_warps=WARPS,  # constants
        )  # fmt: skip
    return q_t


def expert_sums(x_TN: torch.Tensor, bounds_2E1: torch.Tensor) -> torch.Tensor:
    """The sums of each expert's rows, FP32 [E, N]; 0 for an expert without rows.  x: 16 or 32 bits, any strides."""
    n, experts = x_TN.shape[1], experts_of(bounds_2E1)
    sums_EN = torch.empty(experts, n, dtype=torch.float32, device=x_TN.device)
    if n:
        _expert_sums_kernel[(triton.cdiv(n, SUM_COLUMNS), experts)](
            x_TN, bounds_2E1,  # inputs
            sums_EN,  # output
            n, *x_TN.stride(),  # sizes
            BLOCK_M=BLOCK, BLOCK_N=SUM_COLUMNS, num_warps=WARPS,  # constants
        )  # fmt: skip
    return sums_EN


def _programs(rows: int, columns: int, block_k: int, where: torch.device) -> tuple[int]:
    """A program for each tile, as many as fit on the card at once."""
    return (min(rows // BLOCK * math.ceil(columns / block_k), processors(where) * WARPS_PER_PROCESSOR // WARPS),)
