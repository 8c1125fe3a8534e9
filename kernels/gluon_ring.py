"""The parts of Hopper's Gluon matmul that are not its sums: the ring of slots, the producer's warp, the epilogue.

One warp loads (`produce`), the others multiply and store.  They meet at mbarriers alone.

Slots.  Block number i of BLOCK_K (counted over all tiles of a program) lies in slot i % STAGES, in round i // STAGES.
Each slot has an mbarrier `full`, of one arrival a round, and one `empty`, of one arrival a round from each partition of
consumers.  Waiting for parity p returns once a phase of parity p has ended; on a new barrier the phase before the
first, of parity 1, counts as ended.

    wait(full, round & 1)          all tiles of this round have arrived: expect() is the arrival, TMA counts the bytes,
                                   and what it clips or fills with zeros at a ragged edge counts as well
    wait(empty, round & 1 ^ 1)     every consumer gave back the round before; in round 0 it returns at once
    neither side can be more than one phase ahead of the other, so that one bit tells them apart

The producer runs up to STAGES blocks ahead, also across tiles: while the consumers store one tile, the next is loaded.

Sources: PTX ISA, mbarrier, cp.async.bulk.tensor and wgmma; CUTLASS's warp-specialised persistent kernels.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8engine.kernels.constant import Constant
from fp8engine.kernels.epilogue import activated, judged, real_values, rounded
from fp8engine.kernels.launch import Address, triton_dtype
from fp8engine.kernels.walk import tile_at, tiles_of

# Registers of a producer's thread.  The least that setmaxnreg gives: 8 warps at 240 and 4 at 24 (it deals by fours) are
# 64,512 of a multiprocessor's 65,536.
PRODUCER_REGISTERS = Constant(24)

# Named by direction in Triton 3.6, load and store later.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def advance(slot, parity, STAGES: gl.constexpr):
    """The next slot and its round's parity."""
    slot += 1
    around = slot == STAGES
    return gl.where(around, 0, slot), parity ^ around.to(gl.int32)


@gluon.jit
def new_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """(full, empty) of every slot.  CONSUMERS: partitions that give a slot back, one arrival each."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    fence_async_shared()  # TMA, too, sees initialised barriers
    return full, empty


@gluon.jit
def produce(
    a, b, scales, rings, full, empty, walk,
    M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, WAY: gl.constexpr, LEVELS: gl.constexpr,
):  # fmt: skip
    """The producer's warp.  It ends with its last load: the consumers wait for that one too before the program ends.

    rings: of a's and b's tiles, and with `scales`, descriptors [cdiv(K, BLOCK_K), M] and [cdiv(K, BLOCK_K), N] of FP32
    scales, of each of these as well; `scales` is None where no scales travel by TMA.  walk, WAY, LEVELS: walk.py.
    """
    ROWS: gl.constexpr = BLOCK_M + BLOCK_N
    BYTES: gl.constexpr = ROWS * BLOCK_K if scales is None else ROWS * (BLOCK_K + 4)
    slot = 0
    parity = 0
    for tile in range(gl.program_id(0), tiles_of(walk, M, N, WAY, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        row, _, column, expert, _, first, last = tile_at(tile, walk, M, N, K, WAY, LEVELS, BLOCK_M, BLOCK_N, GROUP_M)
        row_b = column + expert * N if WAY == "rows" else column
        for k in range(first, last, BLOCK_K):
            mbarrier.wait(empty.index(slot), parity ^ 1)
            mbarrier.expect(full.index(slot), BYTES)  # before the loads: never complete without
            _load(a, [row, k], full.index(slot), rings[0].index(slot))
            _load(b, [row_b, k], full.index(slot), rings[1].index(slot))
            if scales is not None:
                _load(scales[0], [k // BLOCK_K, row], full.index(slot), rings[2].index(slot))
                _load(scales[1], [k // BLOCK_K, row_b], full.index(slot), rings[3].index(slot))
            slot, parity = advance(slot, parity, STAGES)


@gluon.jit
def store_runs(
    y, y_ptr, runs, row, down, column, M, N,
    scale_a, scale_b, bias, output_scale, staging, statistics,
    ACTIVATION: gl.constexpr, BY_ROW_A: gl.constexpr, BY_ROW_B: gl.constexpr, COUNT: gl.constexpr,
):  # fmt: skip
    """Finish a tile's sums, cut into runs of columns, and store one after another by TMA from a staging buffer.

    y, y_ptr: the result's descriptor and, where the rows of one expert follow another's, its address: TMA would write
    what is left of a tile behind row M over the next expert's rows.  row: of the tile in its matrix; down: of it in y.
    The arithmetic is epilogue.py's.  Returns `statistics`, (largest |y|, saturated, nonfinite) of each row of a tile,
    raised by this one's if COUNT; the rows come together once a program (`publish_rows`).
    """
    LAYOUT: gl.constexpr = runs[0].type.layout
    PART_N: gl.constexpr = runs[0].shape[1]
    rows = row + gl.arange(0, runs[0].shape[0], gl.SliceLayout(1, LAYOUT))
    if output_scale is not None:
        inverse = gl.div_rn(1.0, gl.load(output_scale))  # once a tile: a call, around which registers spill
    for part in gl.static_range(len(runs)):
        first = column + part * PART_N
        columns = first + gl.arange(0, PART_N, gl.SliceLayout(0, LAYOUT))
        y_MN = real_values(runs[part], rows, columns, M, N, scale_a, scale_b, BY_ROW_A, BY_ROW_B)
        y_MN = activated(y_MN, columns, N, bias, ACTIVATION)
        scaled_MN = y_MN * inverse if output_scale is not None else y_MN
        if COUNT:
            magnitude, over, bad = judged(y_MN, scaled_MN, rows, columns, M, N, y.dtype)
            statistics = (
                gl.maximum(statistics[0], as_rows(gl.max(magnitude, 1), statistics[0])),
                statistics[1] + as_rows(gl.sum(over, 1), statistics[1]),
                statistics[2] + as_rows(gl.sum(bad, 1), statistics[2]),
            )
        stored = rounded(y_MN, scaled_MN, y.dtype)
        if y_ptr is not None and row + runs[0].shape[0] > M:
            store_inside(y_ptr, stored, down, first, M - row, N)
        else:
            tma.store_wait(0)  # TMA has read the piece before out of the staging buffer
            staging.store(stored)
            fence_async_shared()  # what was written shows to TMA, which is not ordered with ordinary writes
            _store(y, [down, first], staging)
    return statistics


@gluon.jit
def store_inside(y, value_MN, row, column, rows, N):
    """y[row :, column :] = value, its first `rows` rows, and columns up to N.  y: of a matrix with N columns."""
    LAYOUT: gl.constexpr = value_MN.type.layout
    down = gl.arange(0, value_MN.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    across = gl.arange(0, value_MN.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    # As if N were computed here: else LLVM computes the offsets ahead of the loop over tiles, and they spill.
    N = gl.inline_asm_elementwise("", "=r,0", [N], dtype=gl.int32, is_pure=False, pack=1)
    corner = y + row.to(gl.int64) * N + column
    gl.store(corner + (down * N + across), value_MN, mask=(down < rows) & (across < N - column))


@gluon.jit
def no_statistics(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """(largest |y|, saturated, nonfinite) of ROWS rows in which nothing has been seen."""
    nothing = gl.zeros((ROWS,), gl.int32, LAYOUT)
    return gl.zeros((ROWS,), gl.float32, LAYOUT), nothing, nothing


@gluon.jit
def publish_rows(amax_ptr, counts_ptr, statistics):
    """Enter a partition's statistics where they are wanted: one atomic of each for a warp.

    Warps do not meet for it: what they would exchange through shared memory takes registers in the main loop (spills).
    """
    WARPS: gl.constexpr = gl.num_warps()
    SHAPE: gl.constexpr = (WARPS, statistics[0].shape[0] // WARPS)  # a warp's rows lie together
    over = gl.sum(gl.reshape(statistics[1], SHAPE), 1)
    bad = gl.sum(gl.reshape(statistics[2], SHAPE), 1)
    first = gl.zeros_like(over)
    if amax_ptr is not None:
        gl.atomic_max(amax_ptr + first, gl.max(gl.reshape(statistics[0], SHAPE), 1), sem="relaxed")
    if counts_ptr is not None:
        gl.atomic_add(counts_ptr + first, over.to(gl.int64), mask=over > 0, sem="relaxed")
        gl.atomic_add(counts_ptr + first + 1, bad.to(gl.int64), mask=bad > 0, sem="relaxed")


@gluon.jit
def as_rows(x_M, like_M):
    """x in the other's layout, which differs by name alone: each thread keeps what it has."""
    return gl.convert_layout(x_M, like_M.type.layout, assert_trivial=True)


@functools.lru_cache(maxsize=4096)
def _descriptor(
    address: int, dtype: torch.dtype, shape: tuple, strides: tuple, block: tuple, swizzled: bool
) -> TensorDescriptor:
    if swizzled:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), triton_dtype(dtype))
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=2)
    return TensorDescriptor(Address(address, dtype), list(shape), list(strides), list(block), layout)


def descriptor(x: torch.Tensor, block: tuple[int, int], swizzled: bool = True) -> TensorDescriptor:
    """x as Gluon's tensor descriptor, which also names the box's layout in shared memory.  Kept as launch's are."""
    return _descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), block, swizzled)
