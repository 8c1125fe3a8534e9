"""FP8 matmul for Hopper whose sums are promoted or scaled every 128 of K: one warp loads, two partitions multiply.

    "none"      y[M, N] = f(sum_g (sum_{k in g} a[m, k] b[n, k]) * (scale_a[m] * scale_b[n]) + bias[n])
    else        y[M, N] = f(sum_g scale_a[m, g] scale_b[n, g] (sum_{k in g} a[m, k] b[n, k]) + bias[n])

g: 128 values of K.  The inner sum is the Tensor Core's, the outer one is in FP32 registers.  SCALES says what changes
along K, and how it comes: "none", promotion alone; "loaded", 1x128 by 128x128 (forward, dgrad), from global memory one
product ahead of its use; "ring", 1x128 by 1x128 (wgrad), by TMA together with its tiles.

    producer    1 warp      for each tile, for each g: wait until a slot is empty, let TMA fill it (gluon_ring.py)
    consumer 0  4 warps     the upper half of a tile's rows: wait until the slot is full, multiply, promote, store
    consumer 1  4 warps     the lower half, the same

The consumers meet at mbarriers alone, so that one can multiply while the other promotes.  In plain Triton all warps
wait for their products at the same barriers and then promote together, with the Tensor Core idle.

A product has 64 rows (ROWS) and 128 columns: 64 sums a thread, beside which its registers hold two products.  Four
products go together (PRODUCTS): the first three are promoted while the next is in flight, the fourth with nothing in
flight; what is left of K goes one by one.  A product in flight across the turn of the loop would hide that one too, but
ptxas then makes every wgmma wait (note C7514).  In "ring" the 64 factors a thread of a product that is alone in flight
are multiplied meanwhile.

Ceilings (`make codegen`) and the bytes from L2 are in kernels/README.md.  Per element of a tile and g one addition, one
multiply-add, or one multiply-add and a multiplication; from L2 (BLOCK_M + BLOCK_N) * BLOCK_K bytes.  Tiles of 256x128
(two products a consumer, issued in turns) took 0.99 to 1.03 of these tiles' time on an H200, and went.
Of experts it multiplies all in one launch: only which tile is whose changes (walk.py).
It cannot be interpreted: its twins are kernels/matmul.py and matmul_grouped.py, whose sums and roundings come in the
same order, and what it cannot do (`unsupported`) is left to them.
Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3; DeepGEMM for two consumers, of 64 rows each.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fp8engine.kernels import limits
from fp8engine.kernels.constant import Constant
from fp8engine.kernels.encoded import encode_once
from fp8engine.kernels.gluon_ring import (
    PRODUCER_REGISTERS,
    advance,
    descriptor,
    new_barriers,
    no_statistics,
    produce,
    publish_rows,
    store_inside,
    store_runs,
)
from fp8engine.kernels.launch import interpreted, persistent_grid
from fp8engine.kernels.tile import pieces
from fp8engine.kernels.tuning import Config, capability
from fp8engine.kernels.walk import ONE, Walk, scale_rows, tile_at, tiles_of

CONSUMERS = Constant(2)  # tiles: limits.TILE
ROWS = Constant(64)  # of a product
REGISTERS = Constant(240)  # of a consumer's thread
PRODUCTS = Constant(4)  # of one turn of the loop


@gluon.jit
def _multiply(rings, full, slot, parity, zero_MN, PART: gl.constexpr):
    """Wait for a slot and begin its rows number PART of a times b^T; zero_MN is not read."""
    mbarrier.wait(full.index(slot), parity)
    a_MK = rings[0].index(slot).slice(ROWS * PART, ROWS, 0)
    b_KN = rings[1].index(slot).permute((1, 0))
    return warpgroup_mma(a_MK, b_KN, zero_MN, use_acc=False, is_async=True)


@gluon.jit
def _load_scales(
    scale_a, scale_b, rows, column, group, groups, M, strides,
    SCALES: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
):  # fmt: skip
    """The scales of a group of K, if they are "loaded": one for each row of a, and the one of this tile's rows of b."""
    s_M = 0.0
    s_b = 0.0
    if SCALES == "loaded":
        group = gl.maximum(gl.minimum(group, groups - 1), 0)  # there is none ahead of the last, or at all
        s_M = gl.load(scale_a + rows // ROWS_A * strides[0] + group * strides[1], mask=rows < M, other=0.0)
        s_b = gl.load(scale_b + column // ROWS_B * strides[2] + group * strides[3])
    return s_M, s_b


@gluon.jit
def _factors(runs, loaded, rings, slot, SCALES: gl.constexpr, PART: gl.constexpr):
    """What the runs of columns of a product are multiplied by."""
    PART_N: gl.constexpr = runs[0].shape[1]
    LAYOUT: gl.constexpr = runs[0].type.layout
    found = ()
    for part in gl.static_range(len(runs)):
        if SCALES == "ring":
            s_M1 = rings[2].index(slot).slice(ROWS * PART, ROWS, 1).permute((1, 0)).load(LAYOUT)
            s_1N = rings[3].index(slot).slice(PART_N * part, PART_N, 1).load(LAYOUT)
            factor = s_M1 * s_1N
        elif SCALES == "loaded":
            factor = gl.convert_layout(loaded[0] * loaded[1], gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
        else:
            factor = 1.0
        found += (factor,)
    return found


@gluon.jit
def _promoted(runs, sums_MN, factors, SCALES: gl.constexpr):
    """The runs of columns + sums_MN, scaled."""
    new = pieces(sums_MN, len(runs))
    found = ()
    for part in gl.static_range(len(runs)):
        if SCALES == "none":
            acc = runs[part] + new[part]
        else:
            acc = runs[part] + new[part] * factors[part]
        found += (_computed_here(acc),)
    return found


@gluon.jit
def _computed_here(x):
    """x: LLVM would sink multiply-adds below the next wait, where two products are alive beside the sums (spills)."""
    return gl.inline_asm_elementwise("", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _promote_last(runs, sums_MN, loaded, rings, empty, slot, SCALES: gl.constexpr, PART: gl.constexpr):
    """Wait for the only product in flight, give its slot back, promote it.  Its factors are computed meanwhile."""
    factors = _factors(runs, loaded, rings, slot, SCALES, PART)
    if SCALES == "ring":
        waited = ()
        for part in gl.static_range(len(runs)):
            waited += (_computed_here(factors[part]),)
        factors = waited
    done_MN = warpgroup_mma_wait(0, deps=(sums_MN,))
    mbarrier.arrive(empty.index(slot), count=1)
    return _promoted(runs, done_MN, factors, SCALES)


@gluon.jit
def _consume(
    scale_a, scale_b, bias, output_scale,
    y, y_ptr, amax_ptr, counts_ptr, rings, staging, full, empty, walk,
    M, N, K, strides,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, SCALES: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
    ACTIVATION: gl.constexpr, WAY: gl.constexpr, LEVELS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """A consumer's four warps, which take the product number PART of each tile and group of K."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    COUNT: gl.constexpr = amax_ptr is not None or counts_ptr is not None
    statistics = no_statistics(ROWS, gl.SliceLayout(1, SUMS))
    slot = 0
    parity = 0
    for tile in range(gl.program_id(0), tiles_of(walk, M, N, WAY, BLOCK_M, BLOCK_N), gl.num_programs(0)):
        row, end, column, expert, place, first, last = tile_at(
            tile, walk, M, N, K, WAY, LEVELS, BLOCK_M, BLOCK_N, GROUP_M
        )
        first = first // BLOCK_K
        groups = gl.cdiv(last, BLOCK_K)
        row += ROWS * PART
        at_a, end_a, at_b = scale_rows(
            row, M, column, expert, place + ROWS * PART, N, WAY, ROWS_A, ROWS_B, CONSUMERS * ROWS
        )
        rows = at_a + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        zero_MN = gl.zeros((ROWS, BLOCK_N), gl.float32, SUMS)
        runs = pieces(zero_MN, PARTS)  # of columns: the sums
        after = _load_scales(scale_a, scale_b, rows, at_b, first, groups, end_a, strides, SCALES, ROWS_A, ROWS_B)
        whole = first + (groups - first) // PRODUCTS * PRODUCTS
        for g in range(first, whole, PRODUCTS):
            now = after  # a product's scales, and those of the product after it
            after = _load_scales(scale_a, scale_b, rows, at_b, g + 1, groups, end_a, strides, SCALES, ROWS_A, ROWS_B)
            sums_MN = _multiply(rings, full, slot, parity, zero_MN, PART)
            for u in gl.static_range(1, PRODUCTS):
                previous = now
                before = slot + 0  # a value of its own: Triton carries no alias (tests/house/test_loop_carried.py)
                now = after
                after = _load_scales(
                    scale_a, scale_b, rows, at_b, g + u + 1, groups, end_a, strides, SCALES, ROWS_A, ROWS_B
                )
                slot, parity = advance(slot, parity, STAGES)
                next_MN = _multiply(rings, full, slot, parity, zero_MN, PART)
                done_MN = warpgroup_mma_wait(1, deps=(sums_MN,))  # all but the newest
                factors = _factors(runs, previous, rings, before, SCALES, PART)
                mbarrier.arrive(empty.index(before), count=1)  # its scales have been read as well
                runs = _promoted(runs, done_MN, factors, SCALES)
                sums_MN = next_MN
            runs = _promote_last(runs, sums_MN, now, rings, empty, slot, SCALES, PART)
            slot, parity = advance(slot, parity, STAGES)
        for g in range(whole, groups):
            these = after
            after = _load_scales(scale_a, scale_b, rows, at_b, g + 1, groups, end_a, strides, SCALES, ROWS_A, ROWS_B)
            sums_MN = _multiply(rings, full, slot, parity, zero_MN, PART)
            runs = _promote_last(runs, sums_MN, these, rings, empty, slot, SCALES, PART)
            slot, parity = advance(slot, parity, STAGES)
        bias_N = bias
        if bias is not None:
            bias_N = bias + expert * N
        scale_aM = scale_a + expert * M if WAY == "sums" and ROWS_A == 1 and SCALES == "none" else scale_a
        scale_bN = scale_b + expert * N if WAY != "one" and ROWS_B == 1 and SCALES == "none" else scale_b
        statistics = store_runs(
            y, y_ptr, runs, row, row + expert * M if WAY == "sums" else row, column, end, N,
            scale_aM if SCALES == "none" else None, scale_bN, bias_N, output_scale, staging, statistics,
            ACTIVATION, ROWS_A == 1, ROWS_B == 1, COUNT,
        )  # fmt: skip
    if WAY == "rows":  # those behind the last expert's
        nothing = gl.zeros((ROWS, BLOCK_N), y.dtype, SUMS)
        beyond = gl.load(walk[0] + walk[1]) + (gl.program_id(0) * CONSUMERS + PART) * ROWS
        for cleared in range(beyond, M, gl.num_programs(0) * CONSUMERS * ROWS):
            for across in range(0, N, BLOCK_N):
                store_inside(y_ptr, nothing, cleared, across, M - cleared, N)
    if COUNT:
        publish_rows(amax_ptr, counts_ptr, statistics)
    tma.store_wait(0)  # shared memory goes with the program


# M is the number of tokens: no machine code depends on what divides it, and it changes from batch to batch.
@gluon.jit(do_not_specialize=["M"])
def _matmul_gluon_kernel(
    a, b, scale_a, scale_b, bias, output_scale, bounds,
    y, y_ptr, amax_ptr, counts_ptr,
    M, N, K, EXPERTS, stride_scale_am, stride_scale_ak, stride_scale_bn, stride_scale_bk,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, SCALES: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
    ACTIVATION: gl.constexpr, WAY: gl.constexpr, LEVELS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_M == CONSUMERS * ROWS)
    gl.static_assert(STAGES >= 2, "two products are in flight")
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    if SCALES == "ring":
        scale_a_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], scale_a.layout)
        scale_b_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], scale_b.layout)
        rings = (a_ring, b_ring, scale_a_ring, scale_b_ring)
        scales = (scale_a, scale_b)
    else:
        rings = (a_ring, b_ring)
        scales: gl.constexpr = None
    staging_0 = gl.allocate_shared_memory(y.dtype, [ROWS, BLOCK_N // PARTS], y.layout)
    staging_1 = gl.allocate_shared_memory(y.dtype, [ROWS, BLOCK_N // PARTS], y.layout)
    full, empty = new_barriers(STAGES, CONSUMERS)
    strides = (stride_scale_am, stride_scale_ak, stride_scale_bn, stride_scale_bk)
    walk = (bounds, EXPERTS)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scale_a, scale_b, bias, output_scale, y, y_ptr, amax_ptr, counts_ptr, rings, staging_0, full, empty,
                    walk, M, N, K, strides,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PARTS, SCALES, ROWS_A, ROWS_B, ACTIVATION,
                    WAY, LEVELS, 0,
                ),
            ),
            (
                _consume,
                (
                    scale_a, scale_b, bias, output_scale, y, y_ptr, amax_ptr, counts_ptr, rings, staging_1, full, empty,
                    walk, M, N, K, strides,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PARTS, SCALES, ROWS_A, ROWS_B, ACTIVATION,
                    WAY, LEVELS, 1,
                ),
            ),
            (
                produce,
                (
                    a, b, scales, rings, full, empty, walk, M, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, WAY, LEVELS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def unsupported(a, b, epilogue, config: Config, walk: Walk = ONE) -> str | None:
    """Why `matmul_gluon` cannot do this, for its arguments; None where it can."""
    if interpreted():
        return "Gluon has no interpreter"
    if (found := capability(a.data.device)) != (9, 0):
        return f"written for sm_90, and this is sm_{found[0]}{found[1]}"
    return limits.gluon(a, b, epilogue, config, walk.result(a.data, b.data)[0][-1])


def matmul_gluon(a, b, epilogue, config: Config, walk: Walk = ONE) -> torch.Tensor:
    """y [M, N] of `epilogue.out`, wherever `unsupported` says None.

    As a promoted `matmul_fp8`.  epilogue: everything is used.
    config: block_m, block_n and block_k are limits.TILE.
    """
    m, k = a.data.shape
    shape, rows = walk.result(a.data, b.data)
    y = torch.empty(shape, dtype=epilogue.out, device=a.data.device)
    scale_a, scale_b, strides = a.scale, b.scale, (0, 0, 0, 0)
    rows_a, rows_b = (1 if scale.dim() == 2 else 0 for scale in (a.scale, b.scale))
    scales = "none"
    if a.scaled_along_k:
        scales, rows_a, rows_b, strides = "loaded", a.rows, b.rows, (*a.scale.stride(), *b.scale.stride())
        if rows_a == rows_b == 1:
            scales, strides = "ring", (0, 0, 0, 0)
            scale_a = descriptor(a.scale.t(), (1, config.block_m), swizzled=False)
            scale_b = descriptor(b.scale.t(), (1, config.block_n), swizzled=False)
    launched = _matmul_gluon_kernel[persistent_grid(rows, shape[-1], config, y.device)](
        descriptor(a.data, (config.block_m, config.block_k)), descriptor(b.data, (config.block_n, config.block_k)),
        scale_a, scale_b, epilogue.bias_N, epilogue.scale, walk.bounds,  # inputs
        descriptor(y.flatten(0, -2), (ROWS.value, config.block_n // config.parts)),  # outputs
        y if walk.experts else None, epilogue.amax, epilogue.counts,
        m, shape[-1], k, walk.experts, *strides,  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        STAGES=config.stages, PARTS=config.parts, SCALES=scales, ROWS_A=rows_a, ROWS_B=rows_b,
        ACTIVATION=epilogue.activation, WAY=walk.way, LEVELS=walk.levels,
        num_warps=config.warps // CONSUMERS.value,
    )  # fmt: skip
    encode_once(launched)
    return y
