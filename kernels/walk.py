"""The tiles of a matmul's result and their order over its programs: of one matrix, or of all experts in one launch.

    "one"     y[m, n]     a [M, K], b [N, K]
    "rows"    y[t, n]     a [T, K] rows of experts, b [E * N, K] a stack of their matrices: forward, dgrad
    "sums"    y[e, m, n]  a [M, T], b [N, T] whose columns are rows of experts, in blocks of 128: wgrad

Where an expert's rows lie is read on the card (expert_rows.py).  In a kernel a walk is (bounds [2, E + 1] INT32, E), of
one matrix (None, None), and everything that is found is a number: Triton's kernel and Gluon's partitions share it.
A tile's expert is found by halves, by loads of single numbers.  Casts compare with all bounds at once
(expert_rows.expert_of), a vector that they keep through their loop; in the consumers of the Gluon kernel it spilled.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.expert_rows import BEYOND, BLOCK, experts_of, most_blocks, rows_of
from fp8engine.kernels.tile import place_of


class Walk(NamedTuple):
    """The way, and where the rows of experts lie."""

    way: str = "one"
    bounds: torch.Tensor | None = None

    @property
    def experts(self) -> int | None:
        """How many experts there are."""
        return None if self.bounds is None else experts_of(self.bounds)

    @property
    def levels(self) -> int:
        """Halvings that find one of them."""
        return ((self.experts or 1) - 1).bit_length()

    def result(self, a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """(shape of the result, most rows that its tiles have)."""
        m, n, experts = len(a), len(b), self.experts or 1
        if self.way == "rows":
            return (m, n // experts), most_blocks(m, experts) * BLOCK
        if self.way == "sums":
            return (experts, m, n), experts * math.ceil(m / BLOCK) * BLOCK
        return (m, n), m


ONE = Walk()


@triton.jit
def tiles_of(walk, M, N, WAY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles there are."""
    if WAY == "rows":
        tiles = tl.load(walk[0] + 2 * walk[1] + 1) * (128 // BLOCK_M) * tl.cdiv(N, BLOCK_N)
    elif WAY == "sums":
        tiles = walk[1] * tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    else:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    return tiles


@triton.jit
def tile_at(
    tile, walk, M, N, K,
    WAY: tl.constexpr, LEVELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """(row, end, column, expert, place, first, last) of a tile.

    row, column: of the expert's matrix; end: where its rows end.  place: the row counted in blocks, each expert
    beginning one of its own.  first, last: what is summed, of K.  LEVELS: halvings that find one of E experts.
    """
    bounds = walk[0]
    EXPERTS = walk[1]
    if WAY == "rows":
        place, column = place_of(tile, tl.load(bounds + 2 * EXPERTS + 1) * 128, N, BLOCK_M, BLOCK_N, GROUP_M)
        block = place // 128
        expert = _expert_of(block, bounds, EXPERTS, LEVELS)
        row, end, _ = rows_of(bounds, EXPERTS, expert, block)
        found = row + place % 128, end, column, expert, place, 0, K
    elif WAY == "sums":
        of_one = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        expert = tile // of_one
        row, column = place_of(tile % of_one, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        blocks = bounds + EXPERTS + 1 + expert
        found = row, M, column, expert, row, tl.load(blocks) * 128, tl.load(blocks + 1) * 128
    else:
        row, column = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        found = row, M, column, 0, row, 0, K
    return found


@triton.jit
def _expert_of(block, bounds, EXPERTS, LEVELS: tl.constexpr):
    """The expert that a block belongs to: the last that begins at it or before, found by halves."""
    expert = 0
    for power in tl.static_range(1, LEVELS + 1):
        ahead = expert + (1 << LEVELS - power)
        begins = tl.load(bounds + EXPERTS + 1 + ahead, mask=ahead < EXPERTS, other=BEYOND)
        expert = tl.where(begins <= block, ahead, expert)
    return expert


@triton.jit
def scale_rows(
    row, end, column, expert, place, N,
    WAY: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(first row of a's scales, where they end, first row of b's): groups of several rows lie in blocks of experts."""
    found = row, end, column
    if WAY == "rows":
        at_b = column + expert * (tl.cdiv(N, 128) * 128 if ROWS_B > 1 else N)
        found = (place, place + BLOCK_M, at_b) if ROWS_A > 1 else (row, end, at_b)
    return found
