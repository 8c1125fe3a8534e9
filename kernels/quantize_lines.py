"""Quantise a matrix to FP8 by rows or columns too long for a tile: one launch for the amaxes, one to scale and round.

    amax[m] = max |x[m, :]|, and of columns: an atomic maximum per line and tile
    q[m, k] = saturate(RNE(x[m, k] * s[m])), and q^T by the factors of columns, from one read

As in quantize_groups.py, whose launcher starts both, x is taken as finite and nothing is counted, unless the first
launch has found otherwise or this call's flushed elements are counted.
Twin: fp8engine/ops/reference/quantize.py and cast_transpose.py.
"""

import triton
import triton.language as tl

from fp8engine.kernels.column_sums import add_column_sums, store_column_sums
from fp8engine.kernels.scaling import INF_BITS, NOT_FINITE, codes_of, finish, is_sampled, line_scale, sizes_of
from fp8engine.kernels.tile import load_tile, store_tile


@triton.jit
def _line_amax_kernel(
    x,
    work, amax_M, amax_K, sums,
    M, K, stride_m, stride_k,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Bits of the amax of each row, each column, or both (None: not wanted), which were zero.

    work: its NOT_FINITE is set where something is not.  sums: None, or FP32 [tiles down, K]: the sums of each tile's
    columns.
    """
    across = tl.cdiv(K, BLOCK_K)
    row, column = tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * BLOCK_K
    x_MK = load_tile(x, row, column, M, K, (stride_m, stride_k), BLOCK_M, BLOCK_K, "pointer").to(tl.float32)
    if sums is not None:
        store_column_sums(sums, x_MK, tl.program_id(0) // across, column, K)
    bits_MK = sizes_of(x_MK, False)
    top_M = tl.max(bits_MK, 1)
    top_K = tl.max(bits_MK, 0)
    if tl.max(top_M if amax_K is None else top_K, 0) >= INF_BITS:
        bits_MK = sizes_of(x_MK, True)
        top_M = tl.max(bits_MK, 1)
        top_K = tl.max(bits_MK, 0)
        tl.atomic_max(work + NOT_FINITE, 1, sem="relaxed")
    if amax_M is not None:
        rows = row + tl.arange(0, BLOCK_M)
        tl.atomic_max(amax_M + rows, top_M, mask=rows < M, sem="relaxed")
    if amax_K is not None:
        columns = column + tl.arange(0, BLOCK_K)
        tl.atomic_max(amax_K + columns, top_K, mask=columns < K, sem="relaxed")


@triton.jit
def _line_tiles(
    x, amax_M, amax_K, q, scale, q_t, scale_t, M, K, strides, DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr,
    BY_ROW: tl.constexpr, CAREFUL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast this program's tiles; return (flushed, nonfinite, largest amax, least s)."""
    LINES: tl.constexpr = BLOCK_M if BY_ROW else BLOCK_K
    amax = tl.zeros((LINES,), tl.float32)
    least = tl.full((LINES,), float("inf"), tl.float32)
    flushed = 0
    nonfinite = 0
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        row, column = tile // across * BLOCK_M, tile % across * BLOCK_K
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_K)
        x_MK = load_tile(x, row, column, M, K, strides, BLOCK_M, BLOCK_K, "pointer").to(tl.float32)
        if BY_ROW:
            top, s_M = line_scale(amax_M, scale, rows, M, column, DTYPE, POWER_OF_2)
            least = tl.minimum(least, tl.where(rows < M, s_M, float("inf")))
            codes_MK, lost, bad = codes_of(x_MK, s_M[:, None], DTYPE, CAREFUL)
        else:
            top, s_K = line_scale(amax_K, scale, columns, K, row, DTYPE, POWER_OF_2)
            least = tl.minimum(least, tl.where(columns < K, s_K, float("inf")))
            codes_MK, lost, bad = codes_of(x_MK, s_K[None, :], DTYPE, CAREFUL)
        flushed += lost
        nonfinite += bad
        amax = tl.maximum(amax, top)
        store_tile(q, codes_MK, row, column, M, K, False)
        if q_t is not None:
            if BY_ROW:
                _, t_K = line_scale(amax_K, scale_t, columns, K, row, DTYPE, POWER_OF_2)
                codes_MK, _, _ = codes_of(x_MK, t_K[None, :], DTYPE, CAREFUL)
            else:
                _, t_M = line_scale(amax_M, scale_t, rows, M, column, DTYPE, POWER_OF_2)
                codes_MK, _, _ = codes_of(x_MK, t_M[:, None], DTYPE, CAREFUL)
            store_tile(q_t, codes_MK.T, column, row, K, M, False)
    return flushed, nonfinite, tl.max(amax, 0), tl.min(least, 0)


@triton.jit(do_not_specialize=["P", "index", "stride_live", "stride_counts"])
def _line_cast_kernel(
    x, amax_M, amax_K, parts,
    q, scale, q_t, scale_t, sums, work, live, counts,
    M, K, P, stride_m, stride_k, index, stride_live, stride_counts,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, BY_ROW: tl.constexpr,
    COUNT: tl.constexpr, RECORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CARE: tl.constexpr,
):  # fmt: skip
    """q by the amax of its rows (BY_ROW) or of its columns; q_t, where it is kept, by the other.

    parts: None, or FP32 [P, K], whose columns are added to `sums`.  CARE: as in quantize_groups.py.
    """
    ROWS: tl.constexpr = CARE if CARE > 0 else BLOCK_M
    careful = tl.load(work + NOT_FINITE) > 0
    if COUNT:
        careful = careful | is_sampled(counts, index)
    if careful & (CARE > 0):  # in all programs or in none: its tiles are smaller
        seen = _line_tiles(
            x, amax_M, amax_K, q, scale, q_t, scale_t, M, K, (stride_m, stride_k),
            DTYPE, POWER_OF_2, BY_ROW, True, ROWS, BLOCK_K,
        )  # fmt: skip
    else:
        seen = _line_tiles(
            x, amax_M, amax_K, q, scale, q_t, scale_t, M, K, (stride_m, stride_k),
            DTYPE, POWER_OF_2, BY_ROW, False, BLOCK_M, BLOCK_K,
        )  # fmt: skip
    if parts is not None:
        add_column_sums(parts, sums, P, K)
    if COUNT or RECORD:
        slot = work, live, counts, index, stride_live, stride_counts
        finish(slot, tl.cast(M, tl.int64) * K, seen, COUNT, RECORD)
