"""FP8 matmul for Hopper with its roles given to different warps: one loads, eight multiply and store.

    y[M, N] = sum_k a[m, k] b[n, k] * scale_a[m] * scale_b[n] + bias[n]      rounded once to 16 bits

    producer    1 warp      for each tile, for each BLOCK_K: wait until a slot is empty, let TMA fill it
    consumers   8 warps     wait until the slot is full, multiply, hand it back; after the last, scale and store

    fast        the Tensor Core adds into one accumulator of about 13 mantissa bits below its largest term
    promoted    each BLOCK_K products are summed there, and the sums in FP32 registers

The producer runs up to STAGES blocks ahead, also across tiles: while the consumers store one tile, the next is loaded.

Slots.  Block number i (counted over all tiles of a program) lies in slot i % STAGES, in round i // STAGES.  An mbarrier
`full` and one `empty` per slot, each of one arrival a round; waiting for parity p returns once a phase of parity p has
ended, and on a new barrier the phase before the first, of parity 1, counts as ended.

    wait(full, round & 1)          both tiles of this round have arrived: expect() is the arrival, TMA counts the bytes,
                                   and what it clips or fills with zeros at a ragged edge counts as well
    wait(empty, round & 1 ^ 1)     the consumers gave back the round before; in round 0 it returns at once
    neither side can be more than one phase ahead of the other, so that one bit tells them apart

A consumer gives a slot back only after warpgroup_mma_wait says that the product which reads it is done.  That speaks
for one warpgroup; Triton puts a barrier of all eight warps before the one thread's arrival that speaks for both
(tests/ops/test_kernels_gluon.py looks for it).  Two products are in flight at a time, so that STAGES is at least 2.

Cost: 2 M N K operations and, from L2, (BLOCK_M + BLOCK_N) * BLOCK_K bytes for every BLOCK_M * BLOCK_N * BLOCK_K
multiply-adds; 50 instructions a BLOCK_K.  It cannot be interpreted: its twin on a card is kernels/matmul_fp8.py, whose
sums and roundings come in the same order, and whatever it lacks (`unsupported`) is left to that one.
Sources: PTX ISA, mbarrier, cp.async.bulk.tensor and wgmma; CUTLASS's warp-specialised persistent cooperative kernels;
DeepSeek-V3, arXiv 2412.19437, section 3.3.2, for the accumulator's width and its remedy.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8engine.kernels.launch import Address, describable, interpreted, persistent_grid, triton_dtype
from fp8engine.kernels.tile import pieces, place_of
from fp8engine.kernels.tuning import Config, capability

# Registers of a producer's thread.  The least that setmaxnreg gives: 8 warps at 240 and 4 at 24 (it deals by fours) are
# 64,512 of a multiprocessor's 65,536.
PRODUCER_REGISTERS = gl.constexpr(24)

# Named by direction in Triton 3.6, load and store later.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _advance(slot, parity, STAGES: gl.constexpr):
    """The next slot and its round's parity."""
    slot += 1
    around = slot == STAGES
    return gl.where(around, 0, slot), parity ^ around.to(gl.int32)


@gluon.jit
def _multiply(a_ring, b_ring, full, slot, parity, acc_MN, use_acc):
    """Wait for a slot and begin acc + a b^T (use_acc), or a b^T alone: the accumulator is not read then."""
    mbarrier.wait(full.index(slot), parity)
    b_KN = b_ring.index(slot).permute((1, 0))
    return warpgroup_mma(a_ring.index(slot), b_KN, acc_MN, use_acc=use_acc, is_async=True)


@gluon.jit
def _produce(
    a,
    b,
    a_ring,
    b_ring,
    full,
    empty,
    M,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer's warp.  It ends with its last load: the consumers wait for that one too before the program ends."""
    slot = 0
    parity = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), parity ^ 1)
            mbarrier.expect(full.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K)  # before the loads: never complete without
            _load(a, [row, k], full.index(slot), a_ring.index(slot))
            _load(b, [column, k], full.index(slot), b_ring.index(slot))
            slot, parity = _advance(slot, parity, STAGES)


@gluon.jit
def _sum_fast(acc_MN, a_ring, b_ring, full, empty, slot, parity, K, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """sum_k a b^T in the Tensor Core's accumulator; the next slot and its parity."""
    # A value of its own.  Triton carries a name through a loop if its visit of the body leaves another value in it;
    # `before = slot` here and in the body would both be slot's value ahead of the loop: a deadlock for K > 2 BLOCK_K.
    # tests/house/test_loop_carried.py looks for such aliases.
    before = slot + 0
    for k in range(0, K, BLOCK_K):
        acc_MN = _multiply(a_ring, b_ring, full, slot, parity, acc_MN, k > 0)  # at 0 the sum starts
        # All but the newest product are done, so the one before it has read its slot.
        acc_MN = warpgroup_mma_wait(1, deps=(acc_MN,))
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        before = slot
        slot, parity = _advance(slot, parity, STAGES)
    acc_MN = warpgroup_mma_wait(0, deps=(acc_MN,))
    mbarrier.arrive(empty.index(before), count=1)
    return acc_MN, slot, parity


@gluon.jit
def _sum_promoted(acc_MN, a_ring, b_ring, full, empty, slot, parity, K, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """sum_k a b^T, every BLOCK_K added to acc_MN = 0 in FP32; the next slot and its parity.

    Two at a time: the first is added while the Tensor Core works on the second.  A product in flight across the turn of
    the loop would hide both additions, but ptxas then makes every wgmma wait (note C7514).
    """
    zero_MN = acc_MN  # never read by the Tensor Core
    blocks = gl.cdiv(K, BLOCK_K)
    for _ in range(0, blocks - 1, 2):
        left_MN = _multiply(a_ring, b_ring, full, slot, parity, zero_MN, False)
        before = slot
        slot, parity = _advance(slot, parity, STAGES)
        right_MN = _multiply(a_ring, b_ring, full, slot, parity, zero_MN, False)
        left_MN = warpgroup_mma_wait(1, deps=(left_MN,))
        mbarrier.arrive(empty.index(before), count=1)
        acc_MN += left_MN
        right_MN = warpgroup_mma_wait(0, deps=(right_MN,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc_MN += right_MN
        slot, parity = _advance(slot, parity, STAGES)
    if blocks % 2 == 1:
        last_MN = _multiply(a_ring, b_ring, full, slot, parity, zero_MN, False)
        last_MN = warpgroup_mma_wait(0, deps=(last_MN,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc_MN += last_MN
        slot, parity = _advance(slot, parity, STAGES)
    return acc_MN, slot, parity


@gluon.jit
def _consume(
    scale_a,
    scale_b,
    bias,
    y,
    a_ring,
    b_ring,
    staging,
    full,
    empty,
    M,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PROMOTED: gl.constexpr,
    BY_ROW_A: gl.constexpr,
    BY_ROW_B: gl.constexpr,
):
    """The consumers' warps, four to a warpgroup, a warpgroup to 64 of a tile's rows."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 32]
    )
    PART_N: gl.constexpr = BLOCK_N // PARTS
    # What a tile needs besides its columns' numbers is loaded before its products, not after: latency is hidden.
    factor_b = 1.0
    if not BY_ROW_B:
        factor_b = gl.load(scale_b)
    slot = 0
    parity = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
        if BY_ROW_A:
            factor_a = gl.load(scale_a + rows, mask=rows < M, other=1.0)[:, None]
        else:
            factor_a = gl.load(scale_a)
        acc_MN = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, SUMS)
        if PROMOTED:
            acc_MN, slot, parity = _sum_promoted(acc_MN, a_ring, b_ring, full, empty, slot, parity, K, BLOCK_K, STAGES)
        else:
            acc_MN, slot, parity = _sum_fast(acc_MN, a_ring, b_ring, full, empty, slot, parity, K, BLOCK_K, STAGES)
        runs = pieces(acc_MN * factor_a, PARTS)
        for part in gl.static_range(PARTS):
            y_MN = runs[part]
            first = column + part * PART_N
            columns = first + gl.arange(0, PART_N, gl.SliceLayout(0, y_MN.type.layout))
            if BY_ROW_B:
                y_MN *= gl.load(scale_b + columns, mask=columns < N, other=1.0)[None, :]
            else:
                y_MN *= factor_b
            if bias is not None:
                y_MN += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
            stored = y_MN.to(y.dtype)
            tma.store_wait(0)  # TMA has read the piece before out of the staging buffer
            staging.store(stored)
            fence_async_shared()  # what was written shows to TMA, which is not ordered with ordinary writes
            _store(y, [row, first], staging)
    tma.store_wait(0)  # shared memory goes with the program


# M is the number of tokens: no machine code depends on what divides it, and it changes from batch to batch.
@gluon.jit(do_not_specialize=["M"])
def _matmul_gluon_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    y,
    M,
    N,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    PROMOTED: gl.constexpr,
    BY_ROW_A: gl.constexpr,
    BY_ROW_B: gl.constexpr,
):
    gl.static_assert(STAGES >= 2, "two products are in flight")
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    staging = gl.allocate_shared_memory(y.dtype, [BLOCK_M, BLOCK_N // PARTS], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()  # TMA, too, sees initialised barriers
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scale_a, scale_b, bias, y, a_ring, b_ring, staging, full, empty, M, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PARTS, PROMOTED, BY_ROW_A, BY_ROW_B,
                ),
            ),
            (_produce, (a, b, a_ring, b_ring, full, empty, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def unsupported(a, b, epilogue) -> str | None:
    """Why `matmul_gluon` cannot do this, for operands and an epilogue as in `matmul_fp8`; None where it can."""
    major, minor = capability(a.data.device)
    (m, k), n = a.data.shape, b.data.shape[0]
    if interpreted():
        return "Gluon has no interpreter"
    if (major, minor) != (9, 0):
        return f"written for sm_90, and this is sm_{major}{minor}"
    if min(m, n, k) == 0:
        return f"nothing to multiply in M, N, K = {m}, {n}, {k}"
    if not describable(a.data):
        return "a is not 16-byte aligned rows contiguous along K"
    if not describable(b.data):
        return "b is not 16-byte aligned rows contiguous along K"
    if epilogue.out not in (torch.bfloat16, torch.float16):
        return f"the result is not of 16 bits but {epilogue.out}"
    if n % 8 != 0:
        return f"N = {n} is no multiple of 8: rows of the result are not 16-byte aligned"
    if epilogue.activation != "none":
        return f"activation {epilogue.activation}"
    if epilogue.into is not None:
        return "a result that is added to what is there"
    if epilogue.scale is not None:
        return "a scale of the result"
    if epilogue.amax is not None or epilogue.counts is not None:
        return "statistics of the result"
    return None


@functools.lru_cache(maxsize=4096)
def _descriptor(address: int, dtype: torch.dtype, shape: tuple, strides: tuple, block: tuple) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), triton_dtype(dtype))
    return TensorDescriptor(Address(address, dtype), list(shape), list(strides), list(block), layout)


def descriptor(x: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """x as Gluon's tensor descriptor, which also names the box's layout in shared memory.  Kept as launch's are."""
    return _descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), block)


def matmul_gluon(a, b, epilogue, promoted: bool, config: Config) -> torch.Tensor:
    """y [M, N] of `epilogue.out`, as `matmul_fp8` with the same arguments, wherever `unsupported` says None.

    a.data [M, K], b.data [N, K]: FP8 codes contiguous along K.  Scales FP32: (), or [M, 1] and [N, 1].
    epilogue: bias_N and out are used.  config: `warps` are the consumers'.
    """
    m, k = a.data.shape
    n = b.data.shape[0]
    y_MN = torch.empty(m, n, dtype=epilogue.out, device=a.data.device)
    _matmul_gluon_kernel[persistent_grid(m, n, config, y_MN.device)](
        descriptor(a.data, (config.block_m, config.block_k)), descriptor(b.data, (config.block_n, config.block_k)),
        a.scale, b.scale, epilogue.bias_N,  # inputs
        descriptor(y_MN, (config.block_m, config.block_n // config.parts)),  # output
        m, n, k,  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        STAGES=config.stages, PARTS=config.parts, PROMOTED=promoted,
        BY_ROW_A=a.scale.dim() == 2, BY_ROW_B=b.scale.dim() == 2,
        num_warps=config.warps,
    )  # fmt: skip
    return y_MN
