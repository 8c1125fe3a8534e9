"""Bounds of the experts' rows and how a program reads them, for every kernel that runs over all experts in one launch.

    bounds [2, E + 1] INT32    row 0: the first row of each expert, and where the last one ends
                               row 1: the same in blocks of 128 rows, each expert beginning a block of its own

A block is 128 rows of one expert, or what is left of them: T rows make at most (T + 127 E) / 128 blocks, a
number that the host knows, so that no shape depends on how many rows an expert has.  A program finds the expert of a
block by comparing the block's number with all E bounds at once, which it has read before its loop.
Matrices whose columns are rows of experts are laid out in blocks (a transposed FP8 copy is [K, 128 * blocks], with
zeros behind each expert's last row): every group then begins at a multiple of 128 bytes, as TMA and 16-byte stores
want, and a sum over whole blocks needs no mask.
Twin: fp8engine/ops/reference/grouped.py, `bounds_of`.
"""

import torch
import triton
import triton.language as tl

from fp8engine.kernels.constant import Constant

BLOCK = 128  # rows of a block; a group that shares a scale is a power of two up to this
BEYOND = Constant(0x7FFFFFFF)  # no block has this number


@triton.jit
def last_blocks(bounds, EXPERTS, WIDTH: tl.constexpr):
    """The block at which each expert's blocks end, a vector of WIDTH; WIDTH: a power of two, EXPERTS or more."""
    expert = tl.arange(0, WIDTH)
    return tl.load(bounds + EXPERTS + 2 + expert, mask=expert < EXPERTS, other=BEYOND)


@triton.jit
def expert_of(block, ends):
    """The expert that a block belongs to.  ends: of `last_blocks`; an expert without rows ends where it begins."""
    return tl.sum((ends <= block).to(tl.int32), 0)


@triton.jit
def rows_of(bounds, EXPERTS, expert, block):
    """(first row of a block, where its expert's rows end, its expert's first block)."""
    start = tl.load(bounds + expert)
    end = tl.load(bounds + expert + 1)
    first = tl.load(bounds + EXPERTS + 1 + expert)
    return start + (block - first) * 128, end, first


def most_blocks(rows: int, experts: int) -> int:
    """How many blocks `rows` rows of that many experts make at most.

    >>> most_blocks(64 * 17, 64), most_blocks(256, 1)
    (72, 2)
    """
    return (rows + (BLOCK - 1) * experts) // BLOCK


def width(experts: int) -> int:
    """The power of two that `last_blocks` wants."""
    return triton.next_power_of_2(experts)


def experts_of(bounds_2E1: torch.Tensor) -> int:
    """The number of experts."""
    return bounds_2E1.shape[1] - 1
