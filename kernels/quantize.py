"""Quantise a matrix to FP8 with a scale per tensor, row, column or block, and count what it cost.

    a[g]    = max |x| over the finite elements of group g
    s[g]    = MAX / a[g]                        current scaling, or predicted from earlier steps (per tensor)
    q[m, k] = saturate(RNE(x[m, k] * s[g]))     scale[g] = 1 / s[g]     x ≈ q * scale

Per tensor, two launches, and nothing read back by the host:

    current    1 measures: each program writes the amax of its tiles    2 scales and rounds by the largest of them
    predicted  1 measures and casts in one pass                         2 returns at once, or recasts

A predicted s under which a finite element saturates is replaced in the same call: the second launch finds the count
that the first left behind.  Partial results lie in a workspace, a column a program: nothing needs to be zeroed, and
nothing depends on the order of programs.

Bytes per 16-bit element: predicted 3, current 5 (2 of them from L2 where the tensor fits); groups: quantize_groups.py.
Twin: fp8engine/ops/reference/quantize.py.  Source: OCP 8-bit floating point specification 1.0, section 5.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.column_sums import add_column_sums, partial_sums, store_column_sums
from fp8engine.kernels.constant import Constant
from fp8engine.kernels.epilogue import SATURATES
from fp8engine.kernels.launch import MULTIPLE, processors, told, triton_dtype
from fp8engine.kernels.limits import ALIGNMENT, describable
from fp8engine.kernels.quantize_groups import quantize_groups, results_of
from fp8engine.kernels.rounding import is_finite, largest
from fp8engine.kernels.scaling import (
    HELD,
    UNDERFLOWED,
    add,
    enter,
    magnitude,
    peak,
    peaks_of,
    rounded_again,
    scale_and_round,
    scale_factor,
    scale_of,
    sums_of,
    total,
)
from fp8engine.kernels.tile import load_tile, store_tile

MOST_PROGRAMS = Constant(1024)  # whose partial results a program of the second launch reads at once
# Tiles: rows, columns, warps, and programs a multiprocessor: the fastest of those tried on an H200 (kernels/README.md).
FLAT = (1, 8192, 8, 4)  # of a contiguous tensor
STRIDED = (64, 64, 4, 6)  # and with a transposed copy
FLAT_ODD, STRIDED_ODD = (1, 1024, 8, 4), (64, 64, 8, 4)  # whose elements are read and written one by one


@triton.jit
def _store(q, q_t, x_MK, codes_MK, s, row, column, M, K, DTYPE: tl.constexpr):
    """A tile of codes and, where it is kept, its transpose, rounded anew from the transpose of x."""
    store_tile(q, codes_MK, row, column, M, K, False)
    if q_t is not None:
        store_tile(q_t, rounded_again(x_MK.T, s, DTYPE), column, row, K, M, False)


@triton.jit(do_not_specialize=["index", "stride_live"])
def _measure_kernel(
    x, live,
    q, q_t, found, sums,
    M, K, stride_m, stride_k, index, stride_live,
    DTYPE: tl.constexpr, PREDICTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """found [4, MOST_PROGRAMS] INT32: bits of amax, saturated, flushed, nonfinite.  PREDICTED: cast, too.

    sums: None, or FP32 [tiles down, K]: the sums of each tile's columns.
    """
    amax_MT = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.float32)
    saturated_MT = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.int32)
    flushed_MT = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.int32)
    nonfinite_MT = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.int32)
    s = 0.0
    if PREDICTED:
        s = tl.load(live + tl.cast(stride_live, tl.int64) + index)
    across = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        row, column = tile // across * BLOCK_M, tl.cast(tile % across, tl.int64) * BLOCK_K
        given_MK = load_tile(x, row, column, M, K, (stride_m, stride_k), BLOCK_M, BLOCK_K, "pointer")
        x_MK = given_MK.to(tl.float32)
        if sums is not None:
            store_column_sums(sums, x_MK, tile // across, column, K)
        size_MK = magnitude(x_MK)
        amax_MT = tl.maximum(amax_MT, peaks_of(size_MK, HELD))
        nonfinite_MT += sums_of(is_finite(x_MK) == 0, HELD)
        if PREDICTED and s > 0:
            codes_MK, lost_MK = scale_and_round(x_MK, s, DTYPE)
            saturated_MT += sums_of(size_MK * s > largest(DTYPE) * SATURATES, HELD)
            flushed_MT += sums_of(lost_MK, HELD)
            _store(q, q_t, given_MK, codes_MK, s, row, column, M, K, DTYPE)
    here = found + tl.program_id(0)
    tl.store(here, peak(amax_MT).to(tl.int32, bitcast=True))
    tl.store(here + MOST_PROGRAMS, total(saturated_MT))
    tl.store(here + 2 * MOST_PROGRAMS, total(flushed_MT))
    tl.store(here + 3 * MOST_PROGRAMS, total(nonfinite_MT))


@triton.jit
def _partial(found, ROW: tl.constexpr):
    """Row ROW of the workspace, one number a program of this launch and of the one before."""
    i = tl.arange(0, MOST_PROGRAMS)
    return tl.load(found + ROW * MOST_PROGRAMS + i, mask=i < tl.num_programs(0), other=0)


@triton.jit(do_not_specialize=["P", "index", "stride_live", "stride_counts"])
def _cast_kernel(
    x, found, parts,
    q, q_t, scale, sums, live, counts,
    M, K, P, stride_m, stride_k, index, stride_live, stride_counts,
    DTYPE: tl.constexpr, POWER_OF_2: tl.constexpr, PREDICTED: tl.constexpr,
    COUNT: tl.constexpr, RECORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scale and round by what was found, or, PREDICTED, only where the prediction did not hold.

    parts: None, or FP32 [P, K], whose columns are added to `sums`.
    """
    s = 0.0
    saturated = tl.zeros((), dtype=tl.int64)
    if PREDICTED:
        s = tl.load(live + tl.cast(stride_live, tl.int64) + index)
        saturated = tl.sum(_partial(found, 1).to(tl.int64), 0)
    cast = (s == 0) | (saturated > 0)
    amax = tl.max(_partial(found, 0), 0).to(tl.float32, bitcast=True)
    if cast:
        s = scale_factor(amax, DTYPE, POWER_OF_2)
    if tl.program_id(0) == 0:
        tl.store(scale, scale_of(s))
        if COUNT or RECORD:
            flushed = tl.where(cast, 0, tl.sum(_partial(found, 2).to(tl.int64), 0))
            nonfinite = tl.sum(_partial(found, 3).to(tl.int64), 0)
            enter(
                live, counts, index, stride_live, stride_counts, tl.cast(M, tl.int64) * K, amax, s,
                saturated, flushed, nonfinite, PREDICTED, COUNT, RECORD,
            )  # fmt: skip
    if cast:
        flushed_MT = tl.zeros((BLOCK_M, BLOCK_K // HELD), tl.int32)
        across = tl.cdiv(K, BLOCK_K)
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
            row, column = tile // across * BLOCK_M, tl.cast(tile % across, tl.int64) * BLOCK_K
            x_MK = load_tile(x, row, column, M, K, (stride_m, stride_k), BLOCK_M, BLOCK_K, "pointer")
            codes_MK, lost_MK = scale_and_round(x_MK.to(tl.float32), s, DTYPE)
            if COUNT:
                flushed_MT += sums_of(lost_MK, HELD)
            _store(q, q_t, x_MK, codes_MK, s, row, column, M, K, DTYPE)
        if COUNT:
            add(counts, index, stride_counts, UNDERFLOWED, total(flushed_MT))
    if parts is not None:
        add_column_sums(parts, sums, P, K)


@triton.jit
def _given_kernel(
    x, factor,
    q,
    M, K, stride_m, stride_k, stride_down, stride_across,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per tile; ROWS, COLS: elements that share a scale, -1 for all."""
    across = tl.cdiv(K, BLOCK_K)
    row, column = tl.program_id(0) // across * BLOCK_M, tl.cast(tl.program_id(0) % across, tl.int64) * BLOCK_K
    rows, columns = row + tl.arange(0, BLOCK_M)[:, None], column + tl.arange(0, BLOCK_K)[None, :]
    x_MK = load_tile(x, row, column, M, K, (stride_m, stride_k), BLOCK_M, BLOCK_K, "pointer").to(tl.float32)
    at, inside = 0, True
    if ROWS > 0:
        at, inside = at + rows // ROWS * stride_down, rows < M
    if COLS > 0:
        at, inside = at + columns // COLS * stride_across, inside & (columns < K)
    s = tl.load(factor + at, mask=inside, other=1.0)
    codes_MK, _ = scale_and_round(x_MK, s, DTYPE)
    store_tile(q, codes_MK, row, column, M, K, False)


def quantize(x_MK: torch.Tensor, cast, slot=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q_MK, scale) with x_MK ≈ q_MK * scale: FP8 codes, row-major, and FP32 of shape `cast.scale_shape(M, K)`.

    x_MK: FP32, BF16 or FP16, any strides (`launch.addressable`).  cast, slot: the twin's.
    """
    launch = quantize_tensor if cast.per_tensor else quantize_groups
    q_MK, scale, *_ = launch(x_MK, cast, slot, False)
    return q_MK, scale


def quantize_tensor(x_MK: torch.Tensor, cast, slot, transposed: bool, sums: bool = False) -> tuple:
    """Return (q_MK, scale, q_KM, scale, sums_K), as `quantize_groups` does: one scale for both."""
    results = q_MK, q_KM, scale = tensor_results(x_MK, cast, transposed)
    if x_MK.numel() == 0:
        return q_MK, scale, q_KM, scale, None
    sizes, (block_m, block_k, warps, resident) = _tiles(x_MK, transposed)
    tiles = math.ceil(sizes[0] / block_m) * math.ceil(sizes[1] / block_k)
    programs = min(tiles, resident * processors(x_MK.device), MOST_PROGRAMS.value)
    parts_PK = partial_sums(x_MK, block_m) if sums else None
    found = workspace(x_MK.device)
    predicted = slot is not None and cast.delayed
    (live, _), place, _ = told(slot)
    _measure_kernel[(programs,)](
        x_MK, live if predicted else None,  # inputs
        q_MK, q_KM, found, parts_PK,  # outputs
        *sizes, *place[:2],  # sizes
        DTYPE=triton_dtype(cast.dtype), PREDICTED=predicted,  # constants
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    sums_K = cast_measured(x_MK, (found, programs, parts_PK), cast, slot, results)
    return q_MK, scale, q_KM, scale, sums_K


def tensor_results(x_MK: torch.Tensor, cast, transposed: bool) -> tuple:
    """(q_MK, q_KM or None, scale), to be written, of a tensor under one scale; of an empty one as they stay."""
    q_MK, scale = results_of(x_MK.shape, cast, x_MK.device)
    return q_MK, q_MK.new_empty(q_MK.shape[::-1]) if transposed else None, scale


def workspace(where: torch.device) -> torch.Tensor:
    """Room for what each program of a first launch finds: `_measure_kernel`'s, or a producer's (produce.py)."""
    return torch.empty(4, MOST_PROGRAMS.value, dtype=torch.int32, device=where)


def cast_measured(x_MK: torch.Tensor, measured: tuple, cast, slot, results) -> torch.Tensor | None:
    """The second launch, which writes `results` and returns the sums of columns.

    measured: the workspace, how many programs have written it, and FP32 partial sums of columns [P, K] or None.
    """
    found, programs, parts_PK = measured
    sums_K = None if parts_PK is None else parts_PK.new_empty(parts_PK.shape[1])
    sizes, (block_m, block_k, warps, _) = _tiles(x_MK, results[1] is not None)
    tables, place, (count, record) = told(slot)
    _cast_kernel[(programs,)](
        x_MK, found, parts_PK,  # inputs
        *results, sums_K, *tables,  # outputs
        *sizes[:2], 0 if parts_PK is None else len(parts_PK), *sizes[2:], *place,  # sizes
        DTYPE=triton_dtype(cast.dtype), POWER_OF_2=cast.power_of_2,  # constants
        PREDICTED=slot is not None and cast.delayed, COUNT=count, RECORD=record,
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    return sums_K


def quantize_given(x_MK: torch.Tensor, cast, s: torch.Tensor) -> torch.Tensor:
    """FP8 codes of x under given factors (q ≈ x * s, s of shape `cast.scale_shape`); beyond its range q saturates."""
    m, k = x_MK.shape
    q_MK = torch.empty(m, k, dtype=cast.dtype, device=x_MK.device)
    if x_MK.numel() == 0:
        return q_MK
    s = s.expand(cast.scale_shape(m, k))
    sizes, (block_m, block_k, warps, _) = _tiles(x_MK, not cast.per_tensor)
    _given_kernel[(math.ceil(sizes[0] / block_m) * math.ceil(sizes[1] / block_k),)](
        x_MK, s,  # inputs
        q_MK,  # output
        *sizes, *(s.stride() or (0, 0)),  # sizes
        DTYPE=triton_dtype(cast.dtype), ROWS=cast.rows, COLS=cast.cols,  # constants
        BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps,
    )  # fmt: skip
    return q_MK


def _tiles(x_MK: torch.Tensor, by_place: bool) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
    """((M, K, strides), tile) as a kernel walks x: as one row where x is contiguous, unless rows and columns matter."""
    m, k = x_MK.shape
    if by_place or not x_MK.is_contiguous():
        return (m, k, *x_MK.stride()), STRIDED if m % MULTIPLE == 0 and describable(x_MK) else STRIDED_ODD
    wide = x_MK.numel() % MULTIPLE == 0 and x_MK.data_ptr() % ALIGNMENT == 0
    return (1, m * k, m * k, 1), FLAT if wide else FLAT_ODD
