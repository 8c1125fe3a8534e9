"""Quantise a matrix to FP8 with a scale per row, column or block, along one dimension or along both.

    x [M, K] ~ q * scale              groups of rows x cols: per row 1 x -1, column -1 x 1, blocks up to 128 x 128
    x^T [K, M] ~ q_t * scale_t        the same groups along M of the transpose: cols x rows of x; scale_t lies in memory
                                      as x's groups do, one beside another along K, as TMA reads a tile's (wgrad)

    short   every group lies inside a tile (blocks; rows of up to 16,384 columns): x is read once, its amaxes are
            taken and its codes rounded from registers.  3 bytes per 16-bit element, 4 with the transpose, for which a
            tile is read once more, from L1
    long    a column, or a wider row: one launch for the amaxes (an atomic maximum per line and tile), one to scale and
            round.  5 bytes, 6 with the transpose: both orientations share both reads

Every program takes tiles in turn, so that it counts in registers and enters its counts once.
Twin: fp8engine/ops/reference/quantize.py and cast_transpose.py.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.column_sums import add_column_sums, column_sums, partial_sums, store_column_sums
from fp8engine.kernels.launch import MULTIPLE, describable, processors, triton_dtype
from fp8engine.kernels.rounding import is_finite
from fp8engine.kernels.scaling import (
    HELD,
    WORK,
    counted,
    finish,
    line_scale,
    magnitude,
    peak,
    scale_and_round,
    scale_factor,
    scale_of,
    sums_of,
    total,
)
from fp8engine.kernels.tile import load_tile, store_tile

WIDEST = 16384  # columns of a row that 16 warps hold in registers, 32 a thread
NARROWEST = 16  # columns of a tile: an FP8 vector of 16 bytes
PIECE, SMALL = 64, 32  # rows of a piece; the second where x is read element by element, or columns are summed
SMALLEST = 16  # where groups are higher than that, too: of 128 columns and 16 warps, 4 a thread
WARPS_PER_PROCESSOR = 32  # half of what fits: registers for a tile of 32 to 64 elements a thread


class Tile(NamedTuple):
    """A tile: rows, columns, warps; and how many warps of such programs a multiprocessor has, at most."""

    block_m: int
    block_k: int
    warps: int
    resident: int = WARPS_PER_PROCESSOR


# Sizes are the fastest of those tried on an H200 (kernels/README.md).
LINES = Tile(32, 64, 4, resident=48)  # long groups
LINES_AMAX = Tile(128, 64, 8)  # fewer atomics


@triton.jit
def _amax(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Largest magnitude of each ROWS x COLS group of a tile: [groups down, groups across]."""
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    x = magnitude(x)
    if COLS == K:
        if ROWS == 1:
            amax = tl.max(x, 1, keep_dims=True)
        elif ROWS == M:
            amax = tl.max(tl.max(x, 1, keep_dims=True), 0, keep_dims=True)
        else:
            amax = tl.max(tl.reshape(tl.max(x, 1), (M // ROWS, ROWS)), 1, keep_dims=True)
    elif ROWS == M and COLS == 1:
        amax = tl.max(x, 0, keep_dims=True)
    else:
        amax = tl.max(tl.max(tl.reshape(x, (M // ROWS, ROWS, K // COLS, COLS)), 3), 1)
    return amax


@triton.jit
def _spread(s, M: tl.constexpr, K: tl.constexpr):
    """One number per group as one per element of an M x K tile (or in a shape that broadcasts to it)."""
    DOWN: tl.constexpr = s.shape[0]
    ACROSS: tl.constexpr = s.shape[1]
    if (DOWN == 1 or DOWN == M) and (ACROSS == 1 or ACROSS == K):
        spread = s
    else:
        spread = tl.reshape(
            tl.broadcast_to(s[:, None, :, None], (DOWN, M // DOWN, ACROSS, K // ACROSS)), (M, K)
        )  # fmt: skip
    return spread


@triton.jit
def _group(
    x, q, scale, row, column, M, K,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Cast a tile x of M x K by its ROWS x COLS groups; return (which elements were flushed, amaxes, s) of groups.

    TURN: q is stored transposed.  Scales lie as x's groups do either way.  s is Inf for groups outside.
    """
    DOWN_TILE: tl.constexpr = x.shape[0] // ROWS
    ACROSS_TILE: tl.constexpr = x.shape[1] // COLS
    amax = _amax(x, ROWS, COLS)
    s = scale_factor(amax, DTYPE, POWER_OF_2)
    codes, lost = scale_and_round(x, _spread(s, x.shape[0], x.shape[1]), DTYPE)
    down = row // ROWS + tl.arange(0, DOWN_TILE)[:, None]
    beside = column // COLS + tl.arange(0, ACROSS_TILE)[None, :]
    inside = (down * ROWS < M) & (beside * COLS < K)
    if TURN:
        store_tile(q, codes.T, column, row, K, M, False)
    else:
        store_tile(q, codes, row, column, M, K, False)
    tl.store(scale + tl.cast(down, tl.int64) * tl.cdiv(K, COLS) + beside, scale_of(s), mask=inside)
    return lost, amax, tl.where(inside, s, float("inf"))


@triton.jit
def _group_in_pieces(
    x, q, scale, sums, seen, row, column, M, K, strides, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr, TURN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """As `_group`, PIECE of a group's rows at a time, which are read for the amax and, from cache, once more.

    strides: of x, which for q^T (TURN) has its rows and columns exchanged.  sums: None, or the sums of each row of x.
    seen: what a program has seen so far, as `_short_kernel` keeps it; it is returned with what is seen here.
    """
    GROUPS: tl.constexpr = BLOCK_K // COLS
    flushed, nonfinite, amax, least = seen
    for group in tl.range(0, BLOCK_M // ROWS, disable_licm=True):
        top = tl.zeros((1, GROUPS), tl.float32)
        for part in tl.range(0, ROWS // PIECE, disable_licm=True):
            first = row + group * ROWS + part * PIECE
            x_MK = load_tile(x, first, column, M, K, strides, PIECE, BLOCK_K, "pointer").to(tl.float32)
            if sums is not None:
                store_column_sums(sums, x_MK.T, column // BLOCK_K, first, M)
            top = tl.maximum(top, _amax(x_MK, PIECE, COLS))
        s = scale_factor(top, DTYPE, POWER_OF_2)
        for part in tl.range(0, ROWS // PIECE, disable_licm=True):
            first = row + group * ROWS + part * PIECE
            x_MK = load_tile(x, first, column, M, K, strides, PIECE, BLOCK_K, "pointer").to(tl.float32)
            codes_MK, lost_MK = scale_and_round(x_MK, _spread(s, PIECE, BLOCK_K), DTYPE)
            store_tile(q, codes_MK, first, column, M, K, False)
            if COUNT:
                lost, bad = counted(lost_MK, is_finite(x_MK) == 0)
                flushed += lost
                nonfinite += bad
        down = row // ROWS + group + tl.arange(0, 1)[:, None]
        beside = column // COLS + tl.arange(0, GROUPS)[None, :]
        inside = (down * ROWS < M) & (beside * COLS < K)
        if TURN:
            tl.store(scale + tl.cast(beside, tl.int64) * tl.cdiv(M, ROWS) + down, scale_of(s), mask=inside)
        else:
            tl.store(scale + tl.cast(down, tl.int64) * tl.cdiv(K, COLS) + beside, scale_of(s), mask=inside)
        if COUNT:
            amax = tl.maximum(amax, peak(top))
            least = tl.minimum(least, -peak(tl.where(inside, -s, float("-inf"))))
    return flushed, nonfinite, amax, least


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _short_kernel(
    x,
    q, scale, q_t, scale_t, sums, work, live, counts,
    M, K, stride_m, stride_k, index, stride_live, stride_counts,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    COUNT: tl.constexpr, RECORD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Every group inside a tile; q_t: None, or the transpose, by groups of COLS x ROWS.

    sums: None, or, beside q_t, FP32 [tiles down, K]: the sums of each tile's columns.
    PIECE: rows of a tile that are cast at a time, and columns for q_t: more would be spilled, as would be addresses
    computed before the loop (disable_licm).  A piece may be less than a group where x is read element by element.
    """
    NOTE: tl.constexpr = COUNT or RECORD
    # The warps of a large group meet for its amax, and count then; whose groups lie inside a warp count for themselves,
    # to the end of the program, where registers are left for that.
    TOGETHER: tl.constexpr = ROWS > 32 or COLS == BLOCK_K or sums is not None
    amax = tl.zeros((1, 1) if TOGETHER else (PIECE // ROWS, BLOCK_K // COLS), tl.float32)
    least = tl.full((1, 1) if TOGETHER else (PIECE // ROWS, BLOCK_K // COLS), float("inf"), tl.float32)
    flushed = tl.zeros((1, 1) if TOGETHER else (PIECE, BLOCK_K // HELD), tl.int32)
    nonfinite = tl.zeros((1, 1) if TOGETHER else (PIECE, BLOCK_K // HELD), tl.int32)
    tiles_across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_across, tl.num_programs(0)):
        row, column = tile // tiles_across * BLOCK_M, tile % tiles_across * BLOCK_K
        if PIECE < ROWS:
            flushed, nonfinite, amax, least = _group_in_pieces(
                x, q, scale, None, (flushed, nonfinite, amax, least), row, column, M, K, (stride_m, stride_k),
                DTYPE, POWER_OF_2, ROWS, COLS, NOTE, False, BLOCK_M, BLOCK_K, PIECE,
            )  # fmt: skip
            if q_t is not None:
                _group_in_pieces(
                    x, q_t, scale_t, sums, (0, 0, 0.0, 0.0), column, row, K, M, (stride_k, stride_m),
                    DTYPE, POWER_OF_2, ROWS, COLS, False, True, BLOCK_K, BLOCK_M, PIECE,
                )  # fmt: skip
        else:
            for part in tl.range(0, BLOCK_M // PIECE, disable_licm=True):
                first = row + part * PIECE
                x_MK = load_tile(x, first, column, M, K, (stride_m, stride_k), PIECE, BLOCK_K, "pointer").to(tl.float32)
                lost_MK, top, s = _group(x_MK, q, scale, first, column, M, K, DTYPE, POWER_OF_2, ROWS, COLS, False)
                if NOTE:
                    if TOGETHER:
                        lost, bad = counted(lost_MK, is_finite(x_MK) == 0)
                        top, s = peak(top), -peak(-s)
                    else:
                        lost, bad = sums_of(lost_MK, HELD), sums_of(is_finite(x_MK) == 0, HELD)
                    flushed += lost
                    nonfinite += bad
                    amax = tl.maximum(amax, top)
                    least = tl.minimum(least, s)
            if q_t is not None:
                for part in tl.range(0, BLOCK_K // PIECE, disable_licm=True):
                    first = column + part * PIECE  # read again, from L1
                    x_MK = load_tile(x, row, first, M, K, (stride_m, stride_k), BLOCK_M, PIECE, "pointer").to(
                        tl.float32
                    )
                    if sums is not None:
                        store_column_sums(sums, x_MK, tile // tiles_across, first, K)
                    _group(x_MK, q_t, scale_t, row, first, M, K, DTYPE, POWER_OF_2, COLS, ROWS, True)
    if NOTE:
        elements = tl.cast(M, tl.int64) * K
        finish(
            work, live, counts, index, stride_live, stride_counts, elements, total(flushed), total(nonfinite),
            peak(amax), -peak(-least), COUNT, RECORD,
        )  # fmt: skip


@triton.jit
def _line_amax_kernel(
    x,
    amax_M, amax_K, sums,
    M, K, stride_m, stride_k,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Bits of the amax of each row, each column, or both (None: not wanted), which were zero.

    sums: None, or FP32 [tiles down, K]: the sums of each tile's columns.
    """
    across = tl.cdiv(K, BLOCK_K)
    row, column = tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * BLOCK_K
    x_MK = load_tile(x, row, column, M, K, (stride_m, stride_k), BLOCK_M, BLOCK_K, "pointer").to(tl.float32)
    if sums is not None:
        store_column_sums(sums, x_MK, tl.program_id(0) // across, column, K)
    size_MK = magnitude(x_MK)
    if amax_M is not None:
        rows = row + tl.arange(0, BLOCK_M)
        tl.atomic_max(amax_M + rows, tl.max(size_MK, 1).to(tl.int32, bitcast=True), mask=rows < M, sem="relaxed")
    if amax_K is not None:
        columns = column + tl.arange(0, BLOCK_K)
        tl.atomic_max(amax_K + columns, tl.max(size_MK, 0).to(tl.int32, bitcast=True), mask=columns < K, sem="relaxed")


@triton.jit(do_not_specialize=["P", "index", "stride_live", "stride_counts"])
def _line_cast_kernel(
    x, amax_M, amax_K, parts,
    q, scale, q_t, scale_t, sums, work, live, counts,
    M, K, P, stride_m, stride_k, index, stride_live, stride_counts,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, BY_ROW: tl.constexpr,
    COUNT: tl.constexpr, RECORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q by the amax of its rows (BY_ROW) or of its columns; q_t, where it is kept, by the other.

    parts: None, or FP32 [P, K], whose columns are added to `sums`.
    """
    NOTE: tl.constexpr = COUNT or RECORD
    LINES: tl.constexpr = BLOCK_M if BY_ROW else BLOCK_K
    amax = tl.zeros((LINES,), tl.float32)
    least = tl.full((LINES,), float("inf"), tl.float32)
    flushed = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.int32)
    nonfinite = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.int32)
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        row, column = tile // across * BLOCK_M, tile % across * BLOCK_K
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_K)
        x_MK = load_tile(x, row, column, M, K, (stride_m, stride_k), BLOCK_M, BLOCK_K, "pointer").to(tl.float32)
        if BY_ROW:
            top, s_M = line_scale(amax_M, scale, rows, M, column, DTYPE, POWER_OF_2)
            least = tl.minimum(least, tl.where(rows < M, s_M, float("inf")))
            codes_MK, lost_MK = scale_and_round(x_MK, s_M[:, None], DTYPE)
        else:
            top, s_K = line_scale(amax_K, scale, columns, K, row, DTYPE, POWER_OF_2)
            least = tl.minimum(least, tl.where(columns < K, s_K, float("inf")))
            codes_MK, lost_MK = scale_and_round(x_MK, s_K[None, :], DTYPE)
        if NOTE:
            flushed += sums_of(lost_MK, HELD)
            nonfinite += sums_of(is_finite(x_MK) == 0, HELD)
        amax = tl.maximum(amax, top)
        store_tile(q, codes_MK, row, column, M, K, False)
        if q_t is not None:
            if BY_ROW:
                _, t_K = line_scale(amax_K, scale_t, columns, K, row, DTYPE, POWER_OF_2)
                codes_MK, _ = scale_and_round(x_MK, t_K[None, :], DTYPE)
            else:
                _, t_M = line_scale(amax_M, scale_t, rows, M, column, DTYPE, POWER_OF_2)
                codes_MK, _ = scale_and_round(x_MK, t_M[:, None], DTYPE)
            store_tile(q_t, codes_MK.T, column, row, K, M, False)
    if parts is not None:
        add_column_sums(parts, sums, P, K)
    if NOTE:
        elements = tl.cast(M, tl.int64) * K
        finish(
            work, live, counts, index, stride_live, stride_counts, elements, total(flushed), total(nonfinite),
            tl.max(amax, 0), tl.min(least, 0), COUNT, RECORD,
        )  # fmt: skip


def quantize_groups(x_MK: torch.Tensor, cast, slot, transposed: bool, sums: bool = False):
    """Return (q_MK, scale, q_KM, scale_t, sums_K); None where not `transposed`, not `sums`.

    q_KM [K, M] has groups as `cast` says of its own rows and columns, taken from x and not from q_MK.
    cast: groups of rows x cols, each a power of two up to 128, or per row, or per column.
    sums, with `transposed` only: the sums of x's columns, FP32.
    """
    (m, k), where = x_MK.shape, x_MK.device
    q_MK, scale = _results(m, k, cast, where)
    q_KM, scale_t = _results(k, m, cast, where, turned=True) if transposed else (None, None)
    if x_MK.numel() == 0:
        ones = scale_t.fill_(1.0) if scale_t is not None else None
        return q_MK, scale.fill_(1.0), q_KM, ones, torch.zeros(k, dtype=torch.float32, device=where) if sums else None
    by_row = cast.cols == -1 or (transposed and cast.rows == -1)
    by_column = cast.rows == -1 or (transposed and cast.cols == -1)
    long = by_column or (by_row and k > WIDEST)
    wide = _wide(x_MK, transposed)
    roomy = wide and not sums
    tile = LINES if long else _short_tile(cast, k, transposed, roomy)
    tiles = math.ceil(m / tile.block_m) * math.ceil(k / tile.block_k)
    programs = min(tiles, processors(where) * tile.resident // tile.warps)
    count, record = (slot.count, slot.record) if slot is not None else (False, False)
    lengths = [WORK * record, m * (long and by_row), k * (long and by_column)]
    zeros = torch.zeros(sum(lengths), dtype=torch.int32, device=where).split(lengths) if any(lengths) else [None] * 3
    work, amax_M, amax_K = (part if size else None for part, size in zip(zeros, lengths, strict=True))
    parts_PK = partial_sums(x_MK, LINES_AMAX.block_m if long else tile.block_m) if sums else None
    live, stride_live = (slot.live_2S, slot.live_2S.stride(0)) if record else (None, 0)
    counts, stride_counts = (slot.counts_CS, slot.counts_CS.stride(0)) if count else (None, 0)
    results, tables = (q_MK, scale, q_KM, scale_t), (work, live, counts)
    sizes = m, k, *x_MK.stride(), slot.place if slot is not None else 0, stride_live, stride_counts
    constants = {
        "DTYPE": triton_dtype(cast.dtype), "POWER_OF_2": cast.power_of_2, "COUNT": count, "RECORD": record,
        "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "num_warps": tile.warps,
    }  # fmt: skip
    if long:
        top = LINES_AMAX
        _line_amax_kernel[(math.ceil(m / top.block_m) * math.ceil(k / top.block_k),)](
            x_MK,  # input
            amax_M, amax_K, parts_PK,  # outputs
            m, k, *x_MK.stride(),  # sizes
            BLOCK_M=top.block_m, BLOCK_K=top.block_k, num_warps=top.warps,  # constants
        )  # fmt: skip
        sums_K = None if parts_PK is None else parts_PK.new_empty(k)
        p = 0 if parts_PK is None else len(parts_PK)
        by_amax = x_MK, amax_M, amax_K, parts_PK, *results, sums_K, *tables, m, k, p, *sizes[2:]
        _line_cast_kernel[(programs,)](*by_amax, BY_ROW=cast.cols == -1, **constants)
    else:
        cols = tile.block_k if cast.cols == -1 else cast.cols
        piece = max(cast.rows, PIECE if roomy else SMALL) if transposed else tile.block_m
        if cast.rows > SMALL and not (roomy if transposed else wide):
            piece = SMALLEST
        given = x_MK, *results, parts_PK, *tables, *sizes
        _short_kernel[(programs,)](*given, ROWS=cast.rows, COLS=cols, PIECE=piece, **constants)
        sums_K = None if parts_PK is None else column_sums(parts_PK, torch.float32)
    return *results, sums_K


def _short_tile(cast, k: int, transposed: bool, roomy: bool) -> Tile:
    """A tile that holds whole groups, in both orientations where asked.  roomy: registers for 64 rows are there."""
    if cast.cols == -1:
        block_k = max(triton.next_power_of_2(k), NARROWEST)
        return Tile(max(4096 // block_k, 1), block_k, max(block_k // 1024, 8))
    if transposed:
        warps = (32, 16) if cast.rows > SMALL else (4, 8)
        return Tile(128, 128, warps[not roomy])
    if cast.rows <= SMALL:
        rows = max(cast.rows, 16)
        return Tile(rows, 128, rows // 4, resident=48)
    return Tile(128, max(cast.cols, 64), 16)


def _wide(x_MK: torch.Tensor, transposed: bool) -> bool:
    """Whether x is read, and what comes of it written, 16 elements at a time."""
    m, k = x_MK.shape
    return describable(x_MK) and k % MULTIPLE == 0 and (not transposed or m % MULTIPLE == 0)


def _results(
    rows: int, columns: int, cast, where: torch.device, turned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales), to be written.  turned: of the transpose, whose scales lie the other way round in memory."""
    down, across = cast.scale_shape(rows, columns)
    if turned:
        scale = torch.empty(across, down, dtype=torch.float32, device=where).t()
    else:
        scale = torch.empty(down, across, dtype=torch.float32, device=where)
    return torch.empty(rows, columns, dtype=cast.dtype, device=where), scale
