"""Device functions of every matmul: order of programs, loads and stores of a tile.

    tile t of cdiv(M, BLOCK_M) x cdiv(N, BLOCK_N)  ->  (row of tiles, column of tiles)

Tiles are visited in groups of GROUP_M rows, column by column inside a group, so that the programs running at one
moment read a square of A and B that stays in L2.  Source: "L2 cache optimizations" in Triton's matmul tutorial.

A tile is reached by a tensor descriptor (Hopper's TMA: bounds checked and zero-filled by hardware; 32-bit coordinates),
or by pointers with masks: a corner in 64 bits, because row * stride passes 2^31 on real activations, and offsets from
it in 32, which halves the registers that addresses take; `launch.addressable` says where they suffice.
"""

import triton
import triton.language as tl


@triton.jit
def place_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and first column of a tile, in the grouped order above."""
    across = tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * across)
    first = group * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    inside = tile % (GROUP_M * across)
    return (first + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@triton.jit
def part_of(item, tiles, K, depth):
    """(number, first k, end) of the part of K that item `item` sums: all of K where depth is None (split_k.py)."""
    if depth is None:
        return 0, 0, K
    else:
        number = item // tiles
        return number, number * depth, tl.minimum(number * depth + depth, K)


@triton.jit
def load_tile(x, row, k, ROWS, K, strides, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, LOAD: tl.constexpr):
    """x[row : row + BLOCK_ROWS, k : k + BLOCK_K], zeros outside of ROWS x K.

    x: a pointer with `strides` (along rows, along K), or a descriptor as LOAD says.
    """
    if LOAD == "descriptor":
        tile = x.load([row, k])
    elif LOAD == "transposed":
        tile = x.load([k, row]).T
    else:
        down = tl.arange(0, BLOCK_ROWS)[:, None]
        across = tl.arange(0, BLOCK_K)[None, :]
        corner = x + tl.cast(row, tl.int64) * strides[0] + tl.cast(k, tl.int64) * strides[1]
        inside = (down < ROWS - row) & (across < K - k)
        tile = tl.load(corner + (down * strides[0] + across * strides[1]), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(y, value, row, column, M, N, BY_DESCRIPTOR: tl.constexpr):
    """y[row :, column :] = value, cut off at M x N.  y: a row-major pointer with N columns, or a descriptor."""
    if BY_DESCRIPTOR:
        y.store([row, column], value)
    else:
        down = tl.arange(0, value.shape[0])[:, None]
        across = tl.arange(0, value.shape[1])[None, :]
        corner = y + tl.cast(row, tl.int64) * N + column
        tl.store(corner + (down * N + across), value, mask=(down < M - row) & (across < N - column))


@triton.jit
def pieces(x_MN, PARTS: tl.constexpr):
    """A tile cut into 1, 2, 4 ... equal runs of columns, left to right.

    A tile stored in pieces needs less shared memory and fewer registers: 128x256 BF16 in one piece beside four stages
    of operands would take 262,176 bytes, and an H100 has 232,448.
    """
    if PARTS == 1:
        return (x_MN,)
    else:
        left, right = _halves(x_MN)
        return pieces(left, PARTS // 2) + pieces(right, PARTS // 2)


@triton.jit
def _halves(x_MN):
    M: tl.constexpr = x_MN.shape[0]
    N: tl.constexpr = x_MN.shape[1]
    left, right = tl.split(tl.permute(tl.reshape(x_MN, (M, 2, N // 2)), (0, 2, 1)))
    return left, right
