"""Quantise a matrix to FP8 with a scale per row, column or block, along one dimension or along both.

    x [M, K] ~ q * scale              groups of rows x cols: per row 1 x -1, column -1 x 1, blocks up to 128 x 128
    x^T [K, M] ~ q_t * scale_t        the same groups along M of the transpose: cols x rows of x; scale_t lies in memory
                                      as x's groups do, one beside another along K, as TMA reads a tile's (wgrad)

    short   every group lies inside a tile (blocks; rows of up to 16,384 columns): x is read once, its amaxes are
            taken and its codes rounded from registers.  3 bytes per 16-bit element, 4 with the transpose, for which a
            tile is read once more, from L1
    long    a column, or a wider row: two launches (quantize_lines.py).  5 bytes, 6 with the transpose: both
            orientations share both reads

Every program takes tiles in turn, as if all of x were finite and nothing to be counted, in half of the instructions.
Where something is not finite, and where this call's flushed elements are counted (scaling.py), it takes its tiles once
more, with care.
Twin: fp8engine/ops/reference/quantize.py and cast_transpose.py.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.column_sums import column_sums, partial_sums, store_column_sums
from fp8engine.kernels.launch import MULTIPLE, describable, processors, triton_dtype
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
    bits = sizes_of(x, CAREFUL)
    if COLS == K:
        if ROWS == 1:
            amax = tl.max(bits, 1, keep_dims=True)
        elif ROWS == M:
            amax = tl.max(tl.max(bits, 1, keep_dims=True), 0, keep_dims=True)
        else:
            amax = tl.max(tl.reshape(tl.max(bits, 1), (M // ROWS, ROWS)), 1, keep_dims=True)
    elif ROWS == M and COLS == 1:
        amax = tl.max(bits, 0, keep_dims=True)
    else:
        amax = tl.max(tl.max(tl.reshape(bits, (M // ROWS, ROWS, K // COLS, COLS)), 3), 1)
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
def _group(
    x, q, scale, row, column, M, K, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Cast a tile x of M x K by its ROWS x COLS groups; return (flushed, nonfinite, amaxes' bits, s) of its groups.

    TURN: q is stored transposed.  Scales lie as x's groups do either way.  s is Inf for groups outside.
    """
    DOWN_TILE: tl.constexpr = x.shape[0] // ROWS
    ACROSS_TILE: tl.constexpr = x.shape[1] // COLS
    amax = _amax(x, ROWS, COLS, CAREFUL)
    s = _factor(amax, DTYPE, POWER_OF_2)
    codes, flushed, nonfinite = codes_of(x, _spread(s, x.shape[0], x.shape[1]), DTYPE, CAREFUL)
    down = row // ROWS + tl.arange(0, DOWN_TILE)[:, None]
    beside = column // COLS + tl.arange(0, ACROSS_TILE)[None, :]
    inside = (down * ROWS < M) & (beside * COLS < K)
    if TURN:
        store_tile(q, codes.T, column, row, K, M, False)
    else:
        store_tile(q, codes, row, column, M, K, False)
    tl.store(scale + tl.cast(down, tl.int64) * tl.cdiv(K, COLS) + beside, scale_of(s), mask=inside)
    return flushed, nonfinite, amax, tl.where(inside, s, float("inf"))


@triton.jit
def _group_in_pieces(
    x, q, scale, sums, row, column, M, K, strides, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr, CAREFUL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """As `_group`, PIECE of a group's rows at a time, which are read for the amax and, from cache, once more.

    strides: of x, which for q^T (TURN) has its rows and columns exchanged.  sums: None, or the sums of each row of x.
    """
    GROUPS: tl.constexpr = BLOCK_K // COLS
    flushed = 0
    nonfinite = 0
    amax = tl.zeros((1, GROUPS), tl.int32)
    least = tl.full((1, GROUPS), float("inf"), tl.float32)
    for group in tl.range(0, BLOCK_M // ROWS, disable_licm=True):
        top = tl.zeros((1, GROUPS), tl.int32)
        for part in tl.range(0, ROWS // PIECE, disable_licm=True):
            first = row + group * ROWS + part * PIECE
            x_MK = load_tile(x, first, column, M, K, strides, PIECE, BLOCK_K, "pointer").to(tl.float32)
            if sums is not None:
                store_column_sums(sums, x_MK.T, column // BLOCK_K, first, M)
            top = tl.maximum(top, _amax(x_MK, PIECE, COLS, CAREFUL))
        s = _factor(top, DTYPE, POWER_OF_2)
        for part in tl.range(0, ROWS // PIECE, disable_licm=True):
            first = row + group * ROWS + part * PIECE
            x_MK = load_tile(x, first, column, M, K, strides, PIECE, BLOCK_K, "pointer").to(tl.float32)
            codes_MK, lost, bad = codes_of(x_MK, _spread(s, PIECE, BLOCK_K), DTYPE, CAREFUL)
            store_tile(q, codes_MK, first, column, M, K, False)
            flushed += lost
            nonfinite += bad
        down = row // ROWS + group + tl.arange(0, 1)[:, None]
        beside = column // COLS + tl.arange(0, GROUPS)[None, :]
        inside = (down * ROWS < M) & (beside * COLS < K)
        if TURN:
            tl.store(scale + tl.cast(beside, tl.int64) * tl.cdiv(M, ROWS) + down, scale_of(s), mask=inside)
        else:
            tl.store(scale + tl.cast(down, tl.int64) * tl.cdiv(K, COLS) + beside, scale_of(s), mask=inside)
        amax = tl.maximum(amax, top)
        least = tl.minimum(least, tl.where(inside, s, float("inf")))
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
    flushed = 0
    nonfinite = 0
    amax = tl.zeros((DOWN, BLOCK_K // COLS), tl.int32)
    least = tl.full((DOWN, BLOCK_K // COLS), float("inf"), tl.float32)
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        row, column = tile // across * BLOCK_M, tile % across * BLOCK_K
        if PIECE < ROWS:
            lost, bad, top, s = _group_in_pieces(
                x, q, scale, None, row, column, M, K, strides,
                DTYPE, POWER_OF_2, ROWS, COLS, False, CAREFUL, BLOCK_M, BLOCK_K, PIECE,
            )  # fmt: skip
            flushed += lost
            nonfinite += bad
            amax = tl.maximum(amax, top)
            least = tl.minimum(least, s)
            if q_t is not None:
                _group_in_pieces(
                    x, q_t, scale_t, sums, column, row, K, M, (strides[1], strides[0]),
                    DTYPE, POWER_OF_2, ROWS, COLS, True, CAREFUL, BLOCK_K, BLOCK_M, PIECE,
                )  # fmt: skip
        else:
            for part in tl.range(0, BLOCK_M // PIECE, disable_licm=True):
                first = row + part * PIECE
                x_MK = load_tile(x, first, column, M, K, strides, PIECE, BLOCK_K, "pointer").to(tl.float32)
                lost, bad, top, s = _group(
                    x_MK, q, scale, first, column, M, K, DTYPE, POWER_OF_2, ROWS, COLS, False, CAREFUL
                )
                flushed += lost
                nonfinite += bad
                amax = tl.maximum(amax, top)
                least = tl.minimum(least, s)
            if q_t is not None:
                for part in tl.range(0, BLOCK_K // PIECE, disable_licm=True):
                    first = column + part * PIECE  # read again, from L1
                    x_MK = load_tile(x, row, first, M, K, strides, BLOCK_M, PIECE, "pointer").to(tl.float32)
                    if sums is not None:
                        store_column_sums(sums, x_MK, tile // across, first, K)
                    _group(x_MK, q_t, scale_t, row, first, M, K, DTYPE, POWER_OF_2, COLS, ROWS, True, CAREFUL)
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
        elements = tl.cast(M, tl.int64) * K
        finish(
            work, live, counts, index, stride_live, stride_counts, elements, flushed, nonfinite,
            top.to(tl.float32, bitcast=True), least, COUNT, RECORD,
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
    tile = (LINES if wide else LINES_ODD) if long else _short_tile(cast, k, transposed, wide)
    tiles = math.ceil(m / tile.block_m) * math.ceil(k / tile.block_k)
    programs = min(tiles, processors(where) * tile.resident // tile.warps)
    count, record = (slot.count, slot.record) if slot is not None else (False, False)
    lengths = [WORK * (long or count or record), m * (long and by_row), k * (long and by_column)]
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
        by_amax = x_MK, amax_M, amax_K, parts_PK, *results, sums_K, *tables, m, k, p, *sizes[2:]
        _line_cast_kernel[(programs,)](*by_amax, BY_ROW=cast.cols == -1, CARE=tile.block_m // 2, **constants)
    else:
        cols = tile.block_k if cast.cols == -1 else cast.cols
        piece = max(cast.rows, PIECE if wide else SMALL) if transposed else tile.block_m
        if cast.rows > SMALL and not wide:
            piece = SMALLEST
        care = SMALL if cast.rows > SMALL else piece if wide or not transposed else max(SMALLEST, cast.rows)
        given = x_MK, *results, parts_PK, *tables, *sizes
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
