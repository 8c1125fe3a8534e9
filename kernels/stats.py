"""Statistics of a tensor in one pass: amax, sum of squares, and a histogram of binary exponents.

    amax = max |x|    sum_sq = sum x^2    hist[e] = how many x have FP32 exponent field e     x in FP32

amax and sum_sq over finite x; bin 0 counts zeros and FP32 subnormals, bin 255 what is not finite.  None depends on the
order of the elements, so that they are read in the order of memory, whatever the shape and the strides.

Each of a few programs per multiprocessor reads its share and writes its results to a row of a workspace; a second
launch reduces the rows.  No atomics: the sum is added up in one order, the same every time, nothing is zeroed first.
Cost: x is read once, but the histogram takes longer than the reading.  Triton counts by ballots: 65 instructions for 32
elements on sm_90, at full issue rate 2 elements a clock and multiprocessor, a fifth of what memory delivers in 16 bits.
Hence `every`: a sample of the rows says as much.
Twin: fp8engine/ops/reference/stats.py.
"""

import torch
import triton
import triton.language as tl

from fp8engine.kernels.launch import processors

BINS = 256
TILE = 2048  # elements: 16 a thread; with 8 a histogram costs half as much again an element, with 32 no less
WARPS = 4
PROGRAMS = 5  # of each multiprocessor: as many as registers allow (80 to 96 a thread), to count while others wait
REDUCED = (128, 32)  # rows and bins of a program of the second launch: 660 rows of an H200 are six turns
FIRST = 1 << 62  # sorts before every stride


@triton.jit
def _stats_kernel(
    x,
    partial,
    counts,
    M,
    K,
    stride_m,
    stride_k,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row of the workspace: amax and sum of squares in partial[2, programs], 256 counts in counts[programs]."""
    BLOCK_M: tl.constexpr = TILE // BLOCK_K
    i = tl.arange(0, TILE)
    amax = tl.zeros((TILE,), tl.float32)
    sum_sq = tl.zeros((TILE,), tl.float32)
    histogram = tl.zeros((BINS,), tl.int32)
    padding = 0
    across = tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        row = (tile // across).to(tl.int64) * BLOCK_M
        column = (tile % across).to(tl.int64) * BLOCK_K
        rows, columns = row + i // BLOCK_K, column + i % BLOCK_K
        inside = (rows < M) & (columns < K)
        value = tl.load(x + rows * stride_m + columns * stride_k, mask=inside, other=0.0).to(tl.float32)
        exponent = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
        finite = tl.where(exponent == 255, 0.0, tl.abs(value))
        amax = tl.maximum(amax, finite)
        sum_sq += finite * finite
        histogram += tl.histogram(exponent, BINS)
        padding += TILE - (tl.minimum(M - row, BLOCK_M) * tl.minimum(K - column, BLOCK_K)).to(tl.int32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    tl.store(partial + program, tl.max(amax, 0))
    tl.store(partial + programs + program, tl.sum(sum_sq, 0))
    tl.store(counts + program * BINS + bins, tl.where(bins == 0, histogram - padding, histogram))


@triton.jit
def _reduce_kernel(
    partial,
    counts,
    amax,
    sum_sq,
    histogram,
    PROGRAMS,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program adds up COLUMNS bins of the workspace; the first one also the two numbers."""
    bins = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.zeros((COLUMNS,), tl.int64)
    largest = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, PROGRAMS, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < PROGRAMS
        some = tl.load(counts + row[:, None] * BINS + bins[None, :], mask=inside[:, None], other=0)
        count += tl.sum(some.to(tl.int64), 0)
        largest = tl.maximum(largest, tl.load(partial + row, mask=inside, other=0.0))
        total += tl.load(partial + PROGRAMS + row, mask=inside, other=0.0)
    tl.store(histogram + bins, count)
    if tl.program_id(0) == 0:
        tl.store(amax, tl.max(largest, 0))
        tl.store(sum_sq, tl.sum(total, 0))


def stats(x_MK: torch.Tensor, every: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(amax [], sum_sq [], histogram [256]) in FP32, FP32 and INT64 of an FP32, BF16 or FP16 tensor of any shape.

    every: look at one row in that many.
    """
    x = _matrix(torch.atleast_1d(x_MK)[::every])
    m, k = x.shape
    block_k = min(triton.next_power_of_2(max(k, 1)), TILE)
    tiles = triton.cdiv(m, TILE // block_k) * triton.cdiv(k, block_k)
    programs = max(min(tiles, PROGRAMS * processors(x.device)), 1)
    partial = torch.empty(2, programs, dtype=torch.float32, device=x.device)
    counts = torch.empty(programs, BINS, dtype=torch.int32, device=x.device)
    amax = torch.empty((), dtype=torch.float32, device=x.device)
    sum_sq = torch.empty((), dtype=torch.float32, device=x.device)
    histogram = torch.empty(BINS, dtype=torch.int64, device=x.device)
    _stats_kernel[(programs,)](
        x,  # input
        partial, counts,  # outputs
        m, k, *x.stride(),  # sizes
        BINS=BINS, TILE=TILE, BLOCK_K=block_k, num_warps=WARPS,  # constants
    )  # fmt: skip
    _reduce_kernel[(BINS // REDUCED[1],)](
        partial, counts,  # inputs
        amax, sum_sq, histogram,  # outputs
        programs,  # sizes
        BINS=BINS, ROWS=REDUCED[0], COLUMNS=REDUCED[1], num_warps=8,  # constants
    )  # fmt: skip
    return amax, sum_sq, histogram


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """x's elements as a matrix, in the order of memory: one row where they lie without gaps.

    A view, or a copy where two strides do not describe them.
    """
    if x.is_contiguous():
        return x.view(1, -1)
    x = x.squeeze()
    x = x.permute(sorted(range(x.dim()), key=lambda d: -(x.stride(d) or FIRST)))
    while x.dim() > 1 and x.stride(-2) == x.shape[-1] * x.stride(-1):
        x = x.flatten(-2)
    return x.flatten(0, -2) if x.dim() > 1 else x.view(1, -1)
