"""Quantise a matrix to FP8 with a scale per row, column or block, along one dimension or along both.

    x [M, K] ~ q * scale              groups of rows x cols: per row 1 x -1, column -1 x 1, blocks up to 128 x 128
    x^T [K, M] ~ q_t * scale_t        the same groups along M of the transpose: cols x rows of x; scale_t lies in memory
                                      as x's groups do, one beside another along K, as TMA reads a tile's (wgrad)

    short   every group lies inside a tile (blocks; rows of up to 16,384 columns): x is read once, its amaxes are
            taken and its codes rounded from registers.  3 bytes per 16-bit element, 4 with the transpose, for which a
            tile is read once more, from L1.  `cast_groups` casts a tile, of experts too (quantize_experts.py)
    long    a column, or a wider row: two launches (quantize_lines.py).  5 bytes, 6 with the transpose: both
            orientations share both reads

Every program takes tiles in turn, as if all of x were finite and nothing to be counted, in half of the instructions.
Where something is not finite, and where this call's flushed elements are counted (scaling.py), it takes its tiles once
more, with care.
Twin: fp8engine/ops/reference/quantize.py and cast_transpose.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.column_sums import column_sums, partial_sums, store_column_sums
from fp8engine.kernels.launch import MULTIPLE, describable, processors, told, triton_dtype
from fp8engine.kernels.quantize_lines import _line_amax_kernel, _line_cast_kernel
from fp8engine.kernels.scaling import INF_BITS, WORK, codes_of, finish, is_sampled, scale_factor, scale_of, sizes_of
from fp8engine.kernels.tile import load_tile, store_tile

WIDEST = 16384  # columns of a row that 16 warps hold in registers, 32 a thread
NARROWEST = 16  # columns of a tile: an FP8 vector of 16 bytes
PIECE, SMALL = 64, 32  # rows of a piece; the second where x is read element by element, or columns are summed
SMALLEST = 16  # where groups are higher than that, too: of 128 columns and 16 warps, 4 a thread
WARPS_PER_PROCESSOR = 32  # half of what fits: registers for a tile of 32 to 64 elements a thread


class Tile(NamedTuple):
    """A tile: rows, columns, warps; how many warps of such programs a multiprocessor has, at most; registers a thread.

    registers: at most so many, where the rare way with care would take more from the usual one; 0: as many as it takes.
    """

    block_m: int
    block_k: int
    warps: int
    resident: int = WARPS_PER_PROCESSOR
    registers: int = 0


# Sizes that keep enough loads on their way by the machine code (kernels/README.md); none was timed on a card.
LINES, LINES_ODD = Tile(64, 64, 4, resident=16, registers=128), Tile(32, 64, 4)  # long groups; read one by one
LINES_AMAX = Tile(128, 64, 8)  # fewer atomics


@triton.jit
def _amax(x, ROWS: tl.constexpr, COLS: tl.constexpr, CAREFUL: tl.constexpr):
    """Largest magnitude of each ROWS x COLS group of a tile, [groups down, groups across], as bits.

    CAREFUL: of what is finite.  Otherwise INF_BITS or more where something is not.
    """
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    HIGH: tl.constexpr = M if M < ROWS else ROWS  # of a group, or of what is here of it
    WIDE: tl.constexpr = K if K < COLS else COLS
    bits = sizes_of(x, CAREFUL)
    if WIDE < K:
        amax = tl.max(tl.max(tl.reshape(bits, (M // HIGH, HIGH, K // WIDE, WIDE)), 3), 1)
    elif HIGH < M:
        amax = tl.max(tl.reshape(tl.max(bits, 1), (M // HIGH, HIGH)), 1, keep_dims=True)
    else:
        FIRST: tl.constexpr = 1 if K >= 32 else 0  # the lanes of a warp lie along a row of as many
        amax = tl.max(tl.max(bits, FIRST, keep_dims=True), 1 - FIRST, keep_dims=True)
    return amax


@triton.jit
def _factor(bits, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr):
    """s of amaxes as bits; one that is not finite counts as the largest that is, and its tile is taken once more."""
    return scale_factor(tl.minimum(bits, INF_BITS - 1).to(tl.float32, bitcast=True), DTYPE, POWER_OF_2)


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
def round_and_store(
    x_MK, s, q, place, column, M, K, DTYPE: tl.constexpr, TURN: tl.constexpr, CAREFUL: tl.constexpr
):  # fmt: skip
    """Store the codes of a piece of a tile; return how many were flushed, and are not finite.

    place: the piece's first row, where rows of x end, and its first column in q^T (TURN), which has M.
    """
    row, end, at = place
    codes, flushed, nonfinite = codes_of(x_MK, _spread(s, x_MK.shape[0], x_MK.shape[1]), DTYPE, CAREFUL)
    if TURN:
        store_tile(q, codes.T, column, at, K, M, False)
    else:
        store_tile(q, codes, row, column, end, K, False)
    return flushed, nonfinite


@triton.jit
def cast_groups(
    x, q, scale, sums, seen, place, column, M, K, strides, scale_strides,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TURN: tl.constexpr, PADDED: tl.constexpr, CAREFUL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE_M: tl.constexpr, PIECE_K: tl.constexpr,
):  # fmt: skip
    """Cast a tile of x by its groups of ROWS x COLS, in one orientation; return `seen` with what was found in it.

    seen: (flushed, nonfinite, each group's largest amax as bits, its least s) of the tiles before, or None.
    sums: None, or FP32 [tiles down, K]: the sums of each tile's columns.
    place: (the tile's first row, the row at which x ends, the tile's number among tiles of BLOCK_M rows).
    TURN: q is the transpose, [K, M].  M: the rows that the groups have; PADDED: they go on behind the end of x.
    scale_strides: of the scale, down and across.
    PIECE_M, PIECE_K: of the tile that is cast at a time.  A group of more is read for its amax and, from cache, again.
    """
    HIGH: tl.constexpr = ROWS if PIECE_M < ROWS else PIECE_M
    WIDE: tl.constexpr = COLS if PIECE_K < COLS else PIECE_K
    PARTS: tl.constexpr = HIGH // PIECE_M * (WIDE // PIECE_K)
    tile, end, block = place
    if seen is not None:
        flushed, nonfinite, amax, least = seen
    for run in tl.range(0, BLOCK_M // HIGH * (BLOCK_K // WIDE), disable_licm=True):
        down = run * (HIGH % BLOCK_M)  # 0 where there is one run
        first = column + run * (WIDE % BLOCK_K)
        if PARTS > 1:
            top = tl.zeros((HIGH // ROWS, WIDE // COLS), tl.int32)
            for part in tl.range(0, PARTS, disable_licm=True):
                below, beside = down + part * (PIECE_M % HIGH), first + part * (PIECE_K % WIDE)
                x_MK = load_tile(x, tile + below, beside, end, K, strides, PIECE_M, PIECE_K, "pointer").to(tl.float32)
                if sums is not None:
                    store_column_sums(sums, x_MK, block, beside, K)
                top = tl.maximum(top, _amax(x_MK, ROWS, COLS, CAREFUL))
            s = _factor(top, DTYPE, POWER_OF_2)
            for part in tl.range(0, PARTS, disable_licm=True):
                below, beside = down + part * (PIECE_M % HIGH), first + part * (PIECE_K % WIDE)
                x_MK = load_tile(x, tile + below, beside, end, K, strides, PIECE_M, PIECE_K, "pointer").to(tl.float32)
                here = tile + below, end, block * BLOCK_M + below
                lost, bad = round_and_store(x_MK, s, q, here, beside, M, K, DTYPE, TURN, CAREFUL)
                if seen is not None:
                    flushed += lost
                    nonfinite += bad
        else:
            x_MK = load_tile(x, tile + down, first, end, K, strides, PIECE_M, PIECE_K, "pointer").to(tl.float32)
            if sums is not None:
                store_column_sums(sums, x_MK, block, first, K)
            top = _amax(x_MK, ROWS, COLS, CAREFUL)
            s = _factor(top, DTYPE, POWER_OF_2)
            here = tile + down, end, block * BLOCK_M + down
            lost, bad = round_and_store(x_MK, s, q, here, first, M, K, DTYPE, TURN, CAREFUL)
            if seen is not None:
                flushed += lost
                nonfinite += bad
        local = tl.arange(0, HIGH // ROWS)[:, None]
        across = first // COLS + tl.arange(0, WIDE // COLS)[None, :]
        inside = (tile + down + local * ROWS < end) & (across * COLS < K)
        group = block * (BLOCK_M // ROWS) + run * (HIGH % BLOCK_M // ROWS) + local
        at = tl.cast(group, tl.int64) * scale_strides[0] + tl.cast(across, tl.int64) * scale_strides[1]
        tl.store(scale + at, scale_of(s), mask=(across * COLS < K) if PADDED else inside)
        if seen is not None:
            amax = tl.maximum(amax, top)
            least = tl.minimum(least, tl.where(inside, s, float("inf")))
    if seen is not None:  # Triton 3.6 does not compile a `return` of None
        return flushed, nonfinite, amax, least


@triton.jit
def _short_tiles(
    x, q, scale, q_t, scale_t, sums, M, K, strides,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Cast this program's tiles; return (flushed, nonfinite, largest amax as bits, least s).

    PIECE: rows of a tile that are cast at a time, and columns for q_t: more would be spilled, as would be addresses
    computed before the loop (disable_licm).  A piece may be less than a group where x is read element by element.
    """
    DOWN: tl.constexpr = 1 if PIECE < ROWS else PIECE // ROWS
    amax = tl.zeros((DOWN, BLOCK_K // COLS), tl.int32)
    seen = 0, 0, amax, tl.full((DOWN, BLOCK_K // COLS), float("inf"), tl.float32)
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        column = tile % across * BLOCK_K
        place = tile // across * BLOCK_M, M, tile // across
        seen = cast_groups(
            x, q, scale, None, seen, place, column, M, K, strides, (tl.cdiv(K, COLS), 1),
            DTYPE, POWER_OF_2, ROWS, COLS, False, False, CAREFUL, BLOCK_M, BLOCK_K, PIECE, BLOCK_K,
        )  # fmt: skip
        if q_t is not None:
            cast_groups(
                x, q_t, scale_t, sums, None, place, column, M, K, strides, (tl.cdiv(K, ROWS), 1),
                DTYPE, POWER_OF_2, COLS, ROWS, True, False, CAREFUL, BLOCK_M, BLOCK_K, BLOCK_M, PIECE,
            )  # fmt: skip
    flushed, nonfinite, amax, least = seen
    return flushed, nonfinite, tl.max(tl.max(amax, 1), 0), tl.min(tl.min(least, 1), 0)


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _short_kernel(
    x,
    q, scale, q_t, scale_t, sums, work, live, counts,
    M, K, stride_m, stride_k, index, stride_live, stride_counts,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    COUNT: tl.constexpr, RECORD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr, CARE: tl.constexpr,
):  # fmt: skip
    """Every group inside a tile; q_t: None, or the transpose, by groups of COLS x ROWS.

    sums: None, or, beside q_t, FP32 [tiles down, K]: the sums of each tile's columns.
    CARE: PIECE where tiles are taken once more; 0: they never are, which is for who reads the machine code.
    """
    strides = (stride_m, stride_k)
    flushed, nonfinite, top, least = _short_tiles(
        x, q, scale, q_t, scale_t, sums, M, K, strides,
        DTYPE, POWER_OF_2, ROWS, COLS, False, BLOCK_M, BLOCK_K, PIECE,
    )  # fmt: skip
    if CARE:
        again = top >= INF_BITS
        if COUNT:
            again = again | is_sampled(counts, index)
        if again:
            tl.debug_barrier()  # another thread may have stored the codes that a thread stores now
            flushed, nonfinite, top, least = _short_tiles(
                x, q, scale, q_t, scale_t, None, M, K, strides,
                DTYPE, POWER_OF_2, ROWS, COLS, True, BLOCK_M, BLOCK_K, CARE,
            )  # fmt: skip
    if COUNT or RECORD:
        slot = work, live, counts, index, stride_live, stride_counts
        seen = flushed, nonfinite, top.to(tl.float32, bitcast=True), least
        finish(slot, tl.cast(M, tl.int64) * K, seen, COUNT, RECORD)


def quantize_groups(x_MK: torch.Tensor, cast, slot, transposed: bool, sums: bool = False):
    """Return (q_MK, scale, q_KM, scale_t, sums_K); None where not `transposed`, not `sums`.

    q_KM [K, M] has groups as `cast` says of its own rows and columns, taken from x and not from q_MK.
    cast: groups of rows x cols, each a power of two up to 128, or per row, or per column.
    sums, with `transposed` only: the sums of x's columns, FP32.
    """
    (m, k), where = x_MK.shape, x_MK.device
    turned = results_of((k, m), cast, where, turned=True) if transposed else (None, None)
    results = *results_of((m, k), cast, where), *turned
    if x_MK.numel() == 0:
        return *results, None
    by_row = cast.cols == -1 or (transposed and cast.rows == -1)
    by_column = cast.rows == -1 or (transposed and cast.cols == -1)
    long = by_column or (by_row and k > WIDEST)
    wide = _wide(x_MK, transposed)
    tile = (LINES if wide else LINES_ODD) if long else _short_tile(cast, k, transposed, wide)
    tiles = math.ceil(m / tile.block_m) * math.ceil(k / tile.block_k)
    programs = min(tiles, processors(where) * tile.resident // tile.warps)
    tables, place, (count, record) = told(slot)
    lengths = WORK * (long or count or record), m * (long and by_row), k * (long and by_column)
    work, amax_M, amax_K = zeros_of(lengths, where)
    parts_PK = partial_sums(x_MK, LINES_AMAX.block_m if long else tile.block_m) if sums else None
    constants = {
        "DTYPE": triton_dtype(cast.dtype), "POWER_OF_2": cast.power_of_2, "COUNT": count, "RECORD": record,
        "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "num_warps": tile.warps,
    } | ({"maxnreg": tile.registers} if tile.registers else {})  # fmt: skip
    if long:
        top = LINES_AMAX
        _line_amax_kernel[(math.ceil(m / top.block_m) * math.ceil(k / top.block_k),)](
            x_MK,  # input
            work, amax_M, amax_K, parts_PK,  # outputs
            m, k, *x_MK.stride(),  # sizes
            BLOCK_M=top.block_m, BLOCK_K=top.block_k, num_warps=top.warps,  # constants
        )  # fmt: skip
        sums_K = None if parts_PK is None else parts_PK.new_empty(k)
        p = 0 if parts_PK is None else len(parts_PK)
        by_amax = x_MK, amax_M, amax_K, parts_PK, *results, sums_K, work, *tables, m, k, p, *x_MK.stride(), *place
        _line_cast_kernel[(programs,)](*by_amax, BY_ROW=cast.cols == -1, CARE=tile.block_m // 2, **constants)
    else:
        cols = tile.block_k if cast.cols == -1 else cast.cols
        piece = max(cast.rows, PIECE if wide else SMALL) if transposed else tile.block_m
        if cast.rows > SMALL and not wide:
            piece = SMALLEST
        care = SMALL if cast.rows > SMALL else piece if wide or not transposed else max(SMALLEST, cast.rows)
        given = x_MK, *results, parts_PK, work, *tables, m, k, *x_MK.stride(), *place
        _short_kernel[(programs,)](*given, ROWS=cast.rows, COLS=cols, PIECE=piece, CARE=care, **constants)
        sums_K = None if parts_PK is None else column_sums(parts_PK, torch.float32)
    return *results, sums_K


def _short_tile(cast, k: int, transposed: bool, wide: bool) -> Tile:
    """A tile that holds whole groups, in both orientations where asked.  wide: x is read 16 elements at a time."""
    if cast.cols == -1:
        block_k = max(triton.next_power_of_2(k), NARROWEST)
        few = wide and block_k <= 4096  # 16 elements a thread; of 32 the way with care would be spilled
        return Tile(max(4096 // block_k, 1), block_k, max(block_k // 1024, 8), registers=64 if few else 0)
    if transposed:
        warps = (32, 16) if cast.rows > SMALL else (4, 8)
        return Tile(128, 128, warps[not wide], resident=24 if cast.rows <= SMALL and wide else WARPS_PER_PROCESSOR)
    if cast.rows <= SMALL:
        rows = max(cast.rows, 16)
        return Tile(rows, 128, rows // 4, registers=64 if wide else 0)
    return Tile(128, max(cast.cols, 64), 16, registers=80)


def _wide(x_MK: torch.Tensor, transposed: bool) -> bool:
    """Whether x is read, and what comes of it written, 16 elements at a time."""
    m, k = x_MK.shape
    return describable(x_MK) and k % MULTIPLE == 0 and (not transposed or m % MULTIPLE == 0)


def results_of(shape: tuple[int, int], cast, where: torch.device, turned: bool = False) -> tuple:
    """(codes, scales), to be written; of nothing the scale is 1.

    turned: of the transpose, whose scales lie the other way round in memory.
    """
    make = torch.empty if shape[0] * shape[1] else torch.ones
    lie = cast.scale_shape(*shape)
    scale = make(lie[::-1] if turned else lie, dtype=torch.float32, device=where)
    return torch.empty(shape, dtype=cast.dtype, device=where), scale.t() if turned else scale


def zeros_of(lengths: Sequence[int], where: torch.device) -> list[torch.Tensor | None]:
    """INT32 zeros of each length, from one fill; None for 0."""
    if not any(lengths):
        return [None] * len(lengths)
    zeros = torch.zeros(sum(lengths), dtype=torch.int32, device=where).split(lengths)
    return [part if len(part) else None for part in zeros]
