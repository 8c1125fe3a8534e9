"""FP8 matmul for Hopper with its roles given to different warps: one loads, eight multiply and store.

    y[M, N] = sum_k a[m, k] b[n, k] * (scale_a[m] * scale_b[n]) + bias[n]      rounded once to 16 bits

    producer    1 warp      for each tile, for each BLOCK_K: wait until a slot is empty, let TMA fill it (gluon_ring.py)
    consumers   8 warps     wait until the slot is full, multiply, give it back; after the last, scale and store

The Tensor Core adds into one accumulator of about 13 mantissa bits below its largest term ("fast").  Sums that are
promoted or scaled along K are kernels/matmul_gluon_scaled.py's.

A consumer gives a slot back only after warpgroup_mma_wait says that the product which reads it is done.  That speaks
for one warpgroup; Triton puts a barrier of all eight warps before the one thread's arrival that speaks for both
(tests/ops/test_kernels_gluon.py looks for it).  Two products are in flight at a time, so that STAGES is at least 2.

Cost: 2 M N K operations and, from L2, (BLOCK_M + BLOCK_N) * BLOCK_K bytes for every BLOCK_M * BLOCK_N * BLOCK_K
multiply-adds; 50 instructions a BLOCK_K.  It cannot be interpreted: its twin on a card is kernels/matmul.py, whose
sums and roundings come in the same order, and whatever it lacks (`unsupported`) is left to that one.
Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2, for the accumulator's width.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from fp8engine.kernels import gluon_ring
from fp8engine.kernels.encoded import encode_once
from fp8engine.kernels.gluon_ring import PRODUCER_REGISTERS, advance, descriptor, new_barriers, produce, store_runs
from fp8engine.kernels.launch import persistent_grid
from fp8engine.kernels.tile import pieces, place_of
from fp8engine.kernels.tuning import Config


@gluon.jit
def _multiply(rings, full, slot, parity, acc_MN, use_acc):
    """Wait for a slot and begin acc + a b^T (use_acc), or a b^T alone: the accumulator is not read then."""
    mbarrier.wait(full.index(slot), parity)
    b_KN = rings[1].index(slot).permute((1, 0))
    return warpgroup_mma(rings[0].index(slot), b_KN, acc_MN, use_acc=use_acc, is_async=True)


@gluon.jit
def _sum(acc_MN, rings, full, empty, slot, parity, K, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """sum_k a b^T in the Tensor Core's accumulator; the next slot and its parity."""
    # A value of its own.  Triton carries a name through a loop if its visit of the body leaves another value in it;
    # `before = slot` here and in the body would both be slot's value ahead of the loop: a deadlock for K > 2 BLOCK_K.
    # tests/house/test_loop_carried.py looks for such aliases.
    before = slot + 0
    for k in range(0, K, BLOCK_K):
        acc_MN = _multiply(rings, full, slot, parity, acc_MN, k > 0)  # at 0 the sum starts
        # All but the newest product are done, so the one before it has read its slot.
        acc_MN = warpgroup_mma_wait(1, deps=(acc_MN,))
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        before = slot
        slot, parity = advance(slot, parity, STAGES)
    acc_MN = warpgroup_mma_wait(0, deps=(acc_MN,))
    mbarrier.arrive(empty.index(before), count=1)
    return acc_MN, slot, parity


@gluon.jit
def _consume(
    scale_a,
    scale_b,
    bias,
    y,
    rings,
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
    BY_ROW_A: gl.constexpr,
    BY_ROW_B: gl.constexpr,
):
    """The consumers' warps, four to a warpgroup, a warpgroup to 64 of a tile's rows."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 32]
    )
    slot = 0
    parity = 0
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc_MN = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, SUMS)
        acc_MN, slot, parity = _sum(acc_MN, rings, full, empty, slot, parity, K, BLOCK_K, STAGES)
        store_runs(
            y, pieces(acc_MN, PARTS), row, column, M, N, scale_a, scale_b, bias, None, staging, 0,
            "none", BY_ROW_A, BY_ROW_B, False,
        )  # fmt: skip
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
    BY_ROW_A: gl.constexpr,
    BY_ROW_B: gl.constexpr,
):
    gl.static_assert(STAGES >= 2, "two products are in flight")
    rings = (
        gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout),
        gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout),
    )
    staging = gl.allocate_shared_memory(y.dtype, [BLOCK_M, BLOCK_N // PARTS], y.layout)
    full, empty = new_barriers(STAGES, 1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    scale_a, scale_b, bias, y, rings, staging, full, empty, M, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, PARTS, BY_ROW_A, BY_ROW_B,
                ),
            ),
            (produce, (a, b, None, rings, full, empty, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def unsupported(a, b, epilogue) -> str | None:
    """Why `matmul_gluon` cannot do this, for operands and an epilogue as in `matmul_fp8`; None where it can."""
    if reason := gluon_ring.unsupported(a, b, epilogue):
        return reason
    if epilogue.out not in (torch.bfloat16, torch.float16):
        return f"the result is not of 16 bits but {epilogue.out}"
    if epilogue.activation != "none":
        return f"activation {epilogue.activation}"
    if epilogue.scale is not None:
        return "a scale of the result"
    if epilogue.amax is not None or epilogue.counts is not None:
        return "statistics of the result"
    return None


def matmul_gluon(a, b, epilogue, config: Config) -> torch.Tensor:
    """y [M, N] of `epilogue.out`, as `matmul_fp8` without promotion, wherever `unsupported` says None.

    a.data [M, K], b.data [N, K]: FP8 codes contiguous along K.  Scales FP32: (), or [M, 1] and [N, 1].
    epilogue: bias_N and out are used.  config: `warps` are the consumers'.
    """
    m, k = a.data.shape
    n = b.data.shape[0]
    y_MN = torch.empty(m, n, dtype=epilogue.out, device=a.data.device)
    launched = _matmul_gluon_kernel[persistent_grid(m, n, config, y_MN.device)](
        descriptor(a.data, (config.block_m, config.block_k)), descriptor(b.data, (config.block_n, config.block_k)),
        a.scale, b.scale, epilogue.bias_N,  # inputs
        descriptor(y_MN, (config.block_m, config.block_n // config.parts)),  # output
        m, n, k,  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        STAGES=config.stages, PARTS=config.parts, BY_ROW_A=a.scale.dim() == 2, BY_ROW_B=b.scale.dim() == 2,
        num_warps=config.warps,
    )  # fmt: skip
    encode_once(launched)
    return y_MN
