"""Sums of a matrix's columns in FP32, in an order that never changes: the gradients of biases and of norms' weights.

    sum[k] = sum over m of x[m, k]      x: FP32 partial sums, a row each for a program or a row of tiles

Whoever reads the matrix anyway writes a row of partial sums for every 64 or 128 rows of it, and a later launch adds
these: written and read, 0.12 or 0.06 bytes an element of the matrix.  A cast of two launches adds them in its second
one; after any other kernel it is the launch here.  Atomic additions would give another result each time.
Twins: torch's own sum, in fp8engine/ops/reference/cast_transpose.py, act_quantize.py and norm_quantize.py.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.constant import Constant

# A tile: 16 elements a thread of 8 warps, rows of a whole line of 128 bytes; 4,096 columns make 128 programs.
ROWS, COLUMNS = Constant(128), Constant(32)
WARPS = 8


@triton.jit
def _add(part_PK, sum_K, begin, P, K):
    """The sums of COLUMNS columns from `begin` on."""
    columns = begin + tl.arange(0, COLUMNS)
    sums_PK = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (rows[:, None] < P) & (columns[None, :] < K)
        sums_PK += tl.load(part_PK + (rows[:, None] * K + columns[None, :]), mask=inside, other=0.0)
    tl.store(sum_K + columns, tl.sum(sums_PK, 0).to(sum_K.dtype.element_ty), mask=columns < K)


@triton.jit
def add_column_sums(part_PK, sum_K, P, K):
    """This program's share of the sums, in a launch of any number of programs."""
    for begin in tl.range(tl.program_id(0) * COLUMNS, K, tl.num_programs(0) * COLUMNS):
        _add(part_PK, sum_K, begin, P, K)


@triton.jit
def _column_sums_kernel(
    part_PK,
    sum_K,
    P, K,
):  # fmt: skip
    _add(part_PK, sum_K, tl.program_id(0) * COLUMNS, P, K)


@triton.jit
def store_column_sums(part_PK, x_MK, place, column, K):
    """Row `place` of the partial sums, from `column` on: those of a tile, FP32 and 0 outside of its matrix."""
    columns = tl.arange(0, x_MK.shape[1])
    at = part_PK + (tl.cast(place, tl.int64) * K + column)
    tl.store(at + columns, tl.sum(x_MK, 0), mask=columns < K - column)


def partial_sums(x_MK: torch.Tensor, block_m: int) -> torch.Tensor:
    """Room for the sums of the columns of every tile of block_m rows."""
    m, k = x_MK.shape
    return torch.empty(math.ceil(m / block_m), k, dtype=torch.float32, device=x_MK.device)


def column_sums(part_PK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """sum_K: FP32 partial sums [P, K], contiguous, added in a fixed order and rounded once to `dtype`; 0 for P = 0."""
    p, k = part_PK.shape
    sum_K = torch.empty(k, dtype=dtype, device=part_PK.device)
    if k:
        _column_sums_kernel[(triton.cdiv(k, COLUMNS.value),)](
            part_PK,  # input
            sum_K,  # output
            p, k,  # sizes
            num_warps=WARPS,
        )  # fmt: skip
    return sum_K
