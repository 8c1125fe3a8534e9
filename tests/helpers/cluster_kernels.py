"""Gluon kernels for clusters of two CTAs, as Triton 3.7 writes them: one tile of b loaded for both by TMA's multicast.

    y[M, N] = a[M, K] @ b[N, K]^T       a program: a cluster; of every BLOCK_M rows each CTA has the half of its rank

`product` has one buffer.  `ring` has a producer and two consumers, as kernels/gluon_ring.py, and slots that the CTA of
rank 0 fills for both: it may do so only when the consumers of both have given the slot back.  ARRIVE says how they do:

    "own"       at their own CTA's mbarrier
    "leader"    at that of `two_ctas=True`, which Triton 3.7.1 compiles to the same instruction
    "all"       at the mbarriers of both CTAs, by inline assembly; EMPTY: where these lie in shared memory

A cluster's barrier waits for every warp.  Triton 3.7 lets the kernel's own four warps come to it alone (from 3.8 on all
do: pull request 9456), so that with `warp_specialize` it is never complete: SYNC "init" asks for that one, "parts" for
one by inline assembly in all partitions, which here have all twelve warps; "begin" for the first of its two alone.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

CLUSTER = gl.constexpr(2)
SPLIT = [[1, 0]]  # cga_layout: each CTA has half of the rows
SHARED = [[0, 0]]  # both have the same
TILE = gl.constexpr(128)
SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32], cga_layout=SPLIT)
)
STAGES = gl.constexpr(3)
BARRIER = gl.constexpr("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;")
ARRIVE_AT = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread, where;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, 127;
    setp.eq.u32 first, thread, 0;
    mov.b32 where, global_smem;
    add.s32 where, where, $1;
    mapa.shared::cluster.u32 where, where, $2;
    @first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [where];
    mov.u32 $0, 0;
}""")


def layout(cga_layout: list[list[int]]) -> gl.NVMMASharedLayout:
    """Of a tile of FP8 whose rows have 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2, cga_layout=cga_layout)


@gluon.jit
def product(a, b, y, K, MULTICAST: gl.constexpr, SYNC: gl.constexpr):
    """One tile a cluster.  SYNC: a barrier of the cluster before a buffer is loaded again."""
    a_s = gl.allocate_shared_memory(a.dtype, [TILE, TILE], a.layout)
    b_s = gl.allocate_shared_memory(b.dtype, [TILE, TILE], b.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.sync_cluster_init()
    sums_MN = gl.zeros((TILE, TILE), gl.float32, SUMS)
    phase = 0
    for k in range(0, K, TILE):
        mbarrier.expect(full, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_copy_global_to_shared(a, [gl.program_id(0) * TILE, k], full, a_s)
        tma.async_copy_global_to_shared(b, [0, k], full, b_s, multicast=MULTICAST)
        mbarrier.wait(full, phase)
        phase ^= 1
        sums_MN = warpgroup_mma(a_s, b_s.permute((1, 0)), sums_MN, is_async=False)
        if SYNC:
            gl.barrier(cluster=True)
    _store(y, sums_MN, gl.program_id(0) * TILE)


@gluon.jit
def _store(y, sums_MN, row):
    m = row + gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
    n = gl.arange(0, TILE, layout=gl.SliceLayout(0, SUMS))
    gl.store(y + m[:, None] * TILE + n[None, :], sums_MN)


@gluon.jit
def _cluster_barrier():
    gl.inline_asm_elementwise(BARRIER, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _give_back(empty, slot, ARRIVE: gl.constexpr, EMPTY: gl.constexpr):
    if ARRIVE == "all":
        gl.barrier()
        for rank in gl.static_range(CLUSTER):
            where = gl.to_tensor(EMPTY + 8 * slot)
            gl.inline_asm_elementwise(
                ARRIVE_AT, "=r,r,r", [where, gl.to_tensor(rank)], dtype=gl.int32, is_pure=False, pack=1
            )
    else:
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _produce(a, b, rings, full, empty, K, SYNC: gl.constexpr):
    if SYNC != "init":
        _cluster_barrier()
    slot = 0
    parity = 1
    for k in range(0, K, TILE):
        mbarrier.wait(empty.index(slot), parity)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_copy_global_to_shared(a, [gl.program_id(0) * 2 * TILE, k], bar, rings[0].index(slot))
        tma.async_copy_global_to_shared(a, [gl.program_id(0) * 2 * TILE + TILE, k], bar, rings[1].index(slot))
        tma.async_copy_global_to_shared(b, [0, k], bar, rings[2].index(slot), multicast=True)
        slot += 1
        if slot == STAGES:
            slot = 0
            parity ^= 1
    if SYNC == "parts":
        _cluster_barrier()


@gluon.jit
def _consume(
    y, rings, full, empty, K, PART: gl.constexpr, ARRIVE: gl.constexpr, SYNC: gl.constexpr, EMPTY: gl.constexpr
):
    if SYNC != "init":
        _cluster_barrier()
    sums_MN = gl.zeros((TILE, TILE), gl.float32, SUMS)
    slot = 0
    parity = 0
    for _ in range(0, K, TILE):
        mbarrier.wait(full.index(slot), parity)
        sums_MN = warpgroup_mma(rings[PART].index(slot), rings[2].index(slot).permute((1, 0)), sums_MN, is_async=False)
        _give_back(empty, slot, ARRIVE, EMPTY)
        slot += 1
        if slot == STAGES:
            slot = 0
            parity ^= 1
    _store(y, sums_MN, gl.program_id(0) * 2 * TILE + PART * TILE)
    if SYNC == "parts":
        _cluster_barrier()


@gluon.jit
def ring(a, b, y, K, ARRIVE: gl.constexpr, SYNC: gl.constexpr, EMPTY: gl.constexpr):
    """Two tiles a cluster, one below the other."""
    first = gl.allocate_shared_memory(a.dtype, [STAGES, TILE, TILE], a.layout)
    second = gl.allocate_shared_memory(a.dtype, [STAGES, TILE, TILE], a.layout)
    both = gl.allocate_shared_memory(b.dtype, [STAGES, TILE, TILE], b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=ARRIVE == "leader")
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=4 if ARRIVE == "all" else 2)
    if SYNC == "init":
        mbarrier.sync_cluster_init()
    else:
        mbarrier.fence_init_release_cluster()
    rings = (first, second, both)
    gl.warp_specialize(
        [
            (_consume, (y, rings, full, empty, K, 0, ARRIVE, SYNC, EMPTY)),
            (_consume, (y, rings, full, empty, K, 1, ARRIVE, SYNC, EMPTY)),
            (_produce, (a, b, rings, full, empty, K, SYNC)),
        ],
        [4, 4],
        [240, 24],
    )
