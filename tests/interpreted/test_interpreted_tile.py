"""The order of tiles: each visited once, in groups of rows, column by column inside a group; and pieces in order.

At the end: what every test of this room relies on, that an access beside a tensor is an error.
"""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError

from fp8engine.kernels.tile import load_tile, pieces, place_of, store_tile

BLOCK_M, BLOCK_N = 32, 16
MOST = 1024


@triton.jit
def _places(rows, columns, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    tile = tl.arange(0, 1024)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    row, column = place_of(tl.minimum(tile, tiles - 1), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    tl.store(rows + tile, row)
    tl.store(columns + tile, column)


@triton.jit
def _pieces(x, y, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    down, across = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    runs = pieces(tl.load(x + down * N + across), PARTS)
    WIDTH: tl.constexpr = N // PARTS
    for part in tl.static_range(PARTS):
        tl.store(y + (part * M + down) * WIDTH + tl.arange(0, WIDTH)[None, :], runs[part])


@triton.jit
def _copy(x, y, row, M, N, SIZE: tl.constexpr):
    tile = load_tile(x, row, 0, M, N, (N, 1), SIZE, SIZE, "pointer")
    store_tile(y, tile, row, 0, M, N, False)


def grouped(down: int, across: int, height: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles in the order that the docstring of kernels/tile.py names."""
    return [
        (row, column)
        for first in range(0, down, height)
        for column in range(across)
        for row in range(first, min(first + height, down))
    ]


def assert_places(m: int, n: int, height: int) -> None:
    rows, columns = torch.full((MOST,), -1), torch.full((MOST,), -1)
    _places[(1,)](rows, columns, m, n, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, GROUP_M=height)
    wanted = grouped(math.ceil(m / BLOCK_M), math.ceil(n / BLOCK_N), height)
    found = list(zip((rows // BLOCK_M).tolist(), (columns // BLOCK_N).tolist(), strict=True))[: len(wanted)]
    assert found == wanted
    assert len(set(found)) == len(found) == math.ceil(m / BLOCK_M) * math.ceil(n / BLOCK_N)
    assert not (rows[: len(wanted)] % BLOCK_M).any()
    assert not (columns[: len(wanted)] % BLOCK_N).any()


def test_every_tile_is_visited_once_in_groups():
    for down, across, height in itertools.product((1, 2, 7, 8, 9, 17), (1, 3, 8), (1, 2, 4, 8)):
        assert_places(down * BLOCK_M, across * BLOCK_N, height)


@given(st.integers(1, 31 * BLOCK_M), st.integers(1, 33 * BLOCK_N), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_ragged_edges_are_tiles_too(m, n, height):
    assert_places(m, n, height)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_pieces_are_runs_of_columns_from_left_to_right(parts):
    x = torch.randn(8, 16)
    y = torch.full((parts, 8, 16 // parts), float("nan"))
    _pieces[(1,)](x, y, M=8, N=16, PARTS=parts)
    assert torch.equal(torch.cat(list(y), dim=1), x)


def test_offsets_of_rows_take_64_bits(far):
    # The last row begins at element 2^31; the copy is made into the same memory, 64 columns further on.
    rows, columns, size = 17, 1 << 27, 16
    x = far(rows, columns, (columns, 1))
    x[16, :size] = torch.randn(size)
    _copy[(1,)](x, x[:, 64:], 16, rows, columns, SIZE=size)
    assert torch.equal(x[16, 64 : 64 + size], x[16, :size])


@triton.jit
def _rounded(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def _raise(x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.atomic_max(x + i, i, mask=i >= 0)


@pytest.mark.parametrize(("read", "written"), [(15, 16), (16, 15)])
def test_memory_beside_a_tensor_is_neither_read_nor_written(read: int, written: int):
    with pytest.raises(InterpreterError, match="no tensor of its launch holds"):
        _rounded[(1,)](torch.zeros(read), torch.zeros(written), SIZE=16)


def test_an_atomic_beside_a_tensor_is_an_error_too():
    with pytest.raises(InterpreterError, match="no tensor of its launch holds"):
        _raise[(1,)](torch.zeros(15, dtype=torch.int32), SIZE=16)
