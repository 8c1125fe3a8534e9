"""Clusters on the emulated card: what CTAs of one cluster do to each other's memory and barriers, and what orders it.

Each wrong kernel stands beside the right one, as in test_memory_rules.py.  PTX ISA 8.7: 9.7.13.3 (barrier.cluster),
9.7.13.15 (mbarrier), 9.7.9.27 (cp.async.bulk.tensor), 9.7.9.22 (mapa).
"""

import numpy as np
import pytest
from emulator.faults import Deadlock, Fault, OutOfBounds, Race, UnknownInstruction, Unwritten
from emulator.reader import read
from emulator.tma import TensorMap
from ptx import execute, text

SEEDS = [None, 1, 2, 3]
SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
FENCE = "fence.mbarrier_init.release.cluster;"


def launch(body: str, arrays: list, seed: int | None = None, *, threads: int = 64, ctas: int = 2) -> None:
    """Run it in clusters of two CTAs.  %r1: the rank, %r2: the other's; %p1: in one thread of each CTA."""
    head = "mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r0, 0;"
    module = text(head + body, arrays, threads, ".explicitcluster\n.reqnctapercluster 2")
    execute(module, arrays, ctas=ctas, seed=seed)


def words(count: int = 128) -> np.ndarray:
    """Zeros."""
    return np.zeros(count, np.uint32)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cluster_ctarank", [0, 1, 0, 1]),
        ("cluster_ctaid.x", [0, 1, 0, 1]),
        ("cluster_ctaid.y", [0, 0, 0, 0]),
        ("cluster_nctaid.x", [2, 2, 2, 2]),
        ("cluster_nctarank", [2, 2, 2, 2]),
        ("clusterid.x", [0, 0, 1, 1]),
        ("nclusterid.x", [2, 2, 2, 2]),
        ("ctaid.x", [0, 1, 2, 3]),
        ("nctaid.x", [4, 4, 4, 4]),
        ("ntid.x", [32, 32, 32, 32]),
    ],
)
def test_a_cta_knows_its_place_in_the_cluster(name: str, wanted: list[int]):
    found = words(4)
    body = (
        f"mov.u32 %r3, %{name}; mov.u32 %r4, %ctaid.x; mad.wide.u32 %rd8, %r4, 4, %rd0; @%p1 st.global.b32 [%rd8], %r3;"
    )
    launch(body, [found], threads=32, ctas=4)
    assert found.tolist() == wanted


def test_a_grid_is_a_multiple_of_the_cluster():
    with pytest.raises(Fault, match="a grid of 3 CTAs along x, no multiple of the cluster's 2"):
        launch("", [words()], ctas=3)


def test_a_cluster_that_the_card_does_not_run_is_refused():
    sums = ", ".join(f"%r{100 + i}" for i in range(4))
    product = f"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{{sums}}}, %rd1, %rd2, 1, 1, 1;"
    with pytest.raises(UnknownInstruction, match="wgmma in a cluster of CTAs of 64 threads"):
        launch(product, [words(), words(), words()])
    for along_y in (".reqnctapercluster 1, 2", ".reqnctapercluster 2, 2, 1"):
        with pytest.raises(UnknownInstruction, match=rf"{along_y}: a cluster along another axis than x"):
            read(text("", [], limits=along_y))
    assert read(text("", [], limits=".reqnctapercluster 4, 1, 1")).cluster == 4


# Each thread leaves 1000 * rank + its number in its CTA's memory, and takes what the other CTA's thread has left.
EXCHANGE = """
mad.lo.s32 %r3, %r1, 1000, %r0; shl.b32 %r4, %r0, 2; mov.b32 %r5, global_smem; add.s32 %r4, %r4, %r5;
st.shared.b32 [%r4], %r3;
{first}
{address}
ld.shared::{space}.b32 %r7, [%r6];
mad.lo.s32 %r8, %r1, 64, %r0; mad.wide.u32 %rd8, %r8, 4, %rd0; st.global.b32 [%rd8], %r7;
{last}
"""
MAPA = "mapa.shared::cluster.u32 %r6, %r4, %r2;"
EXCHANGED = {"first": SYNC, "address": MAPA, "space": "cluster", "last": SYNC}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"address": "xor.b32 %r6, %r4, 0x1000000;"},  # as CUTLASS and Triton do, who mask the rank's bit
        {"first": SYNC.replace(".aligned", "").replace(".release", "").replace(".acquire", "")},
        {"first": "fence.acq_rel.cluster;" + RELAXED},
        {"first": "fence.sc.gpu;" + RELAXED},
    ],
)
def test_a_cta_reads_the_others_memory(parts: dict[str, str], seed: int | None):
    found = words()
    launch(EXCHANGE.format(**{**EXCHANGED, **parts}), [found], seed)
    assert found.tolist() == [1000 + i for i in range(64)] + list(range(64))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "message", "parts"),
    [
        ((Race, Unwritten), r"of CTA \d", {"first": ""}),
        ((Race, Unwritten), r"of CTA \d", {"first": "bar.sync 0;"}),
        (Race, "not ordered after the last write", {"first": RELAXED}),
        (Race, "not ordered after the last write", {"first": FENCE + RELAXED}),
        (Race, "not ordered after the last write", {"first": "fence.acq_rel.cta;" + RELAXED}),
        (Race, "not ordered after the last write", {"first": RELAXED + "fence.acq_rel.cluster;"}),
        (Fault, r"has ended, and its|ends, not ordered after what CTA \d does", {"last": ""}),
        (Fault, r"CTA \d ends, not ordered after what CTA \d does to its shared memory", {"last": RELAXED}),
        (OutOfBounds, "shared::cta is a CTA's own", {"space": "cta"}),
        (OutOfBounds, "to the CTA of rank 2: the cluster has 2", {"address": "mapa.shared::cluster.u32 %r6, %r4, 2;"}),
        (OutOfBounds, "of 4096 bytes", {"address": "mov.b32 %r6, 0x2000000;"}),
    ],
)
def test_what_is_missing_between_two_ctas_is_named(kind, message: str, parts: dict[str, str], seed: int | None):
    with pytest.raises(kind, match=message):
        launch(EXCHANGE.format(**{**EXCHANGED, **parts}), [words()], seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_names_the_cta_of_the_lanes_that_execute(seed: int | None):
    for rank, who in ((0, "CTA 2"), (1, "CTA 3")):
        body = f"mov.u32 %r3, %ctaid.x; setp.eq.u32 %p2, %r3, {2 + rank}; @%p2 st.shared.b32 [4096], %r3;"
        with pytest.raises(OutOfBounds, match=rf"\[@%p2 st\.shared\.b32 \[4096\], %r3; {who}\]$"):
            launch(body, [words()], seed, ctas=4)


def test_ctas_of_different_clusters_are_not_ordered_by_a_clusters_barrier():
    write = f"setp.eq.u32 %p2, %r3, WRITER; {SYNC} @%p2 st.global.b32 [%rd0], %r3;"
    body = f"mov.u32 %r3, %ctaid.x; {write.replace('WRITER', '0')} {write}"
    launch(body.replace("WRITER", "1"), [words()])
    with pytest.raises(Race, match="this write by CTA 2 is not ordered after the last write, by CTA 0"):
        launch(body.replace("WRITER", "2"), [words()], ctas=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_barrier_waits_for_every_warp_that_has_not_ended(seed: int | None):
    second = "setp.ge.u32 %p2, %r0, 32;"
    launch(f"{second} @%p2 bra $END; {SYNC} $END:", [words()], seed)
    with pytest.raises(Deadlock, match=r"warps \[0\] of rank \d wait for \('cluster', 'all its threads'"):
        launch(f"{second} @%p2 bra $HOLD; {SYNC} bra $END; $HOLD: bar.sync 1, 64; $END:", [words()], seed)
    for body, message in (
        (f"barrier.cluster.arrive; {SYNC}", "a second time, and has not waited"),
        ("barrier.cluster.wait;", "waits at the cluster's barrier, and has not arrived"),
        ("@%p1 barrier.cluster.arrive.aligned;", "a part of a warp"),
    ):
        with pytest.raises(Fault, match=message):
            launch(body, [words()], seed)


# Each CTA writes to the other's memory and arrives at the other's mbarrier; it reads what the other has written to its.
HANDED = """
mov.b32 %r5, global_smem; add.s32 %r9, %r5, 1024;
@%p1 mbarrier.init.shared::cta.b64 [global_smem+1024], {count};
{first}
shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r5;
mapa.shared::cluster.u32 %r6, %r4, %r2; mapa.shared::cluster.u32 %r7, %r9, %r2;
st.shared::cluster.b32 [%r6], %r1;
mbarrier.arrive.{arrive}.b64 _, [%r7];
$L: mbarrier.try_wait.parity.shared::cta.b64 %p3, [{wait}], 0; @!%p3 bra $L;
ld.shared.b32 %r8, [%r4];
mad.lo.s32 %r10, %r1, 64, %r0; mad.wide.u32 %rd8, %r10, 4, %rd0; st.global.b32 [%rd8], %r8;
"""
HANDED_OVER = {"count": "64", "first": FENCE + RELAXED, "arrive": "release.cluster.shared::cluster", "wait": "%r9"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "parts", [{}, {"arrive": "shared::cluster"}, {"first": SYNC}, {"first": "fence.acq_rel.cluster;" + RELAXED}]
)
def test_an_arrival_at_the_other_ctas_mbarrier_hands_over(parts: dict[str, str], seed: int | None):
    """That no CTA ends too early needs no barrier: each has waited for all that the other does to its memory."""
    found = words()
    launch(HANDED.format(**{**HANDED_OVER, **parts}), [found], seed)
    assert found.tolist() == [1] * 64 + [0] * 64


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "message", "parts"),
    [
        (Race, "not ordered after the last write", {"first": RELAXED}),  # the other's mbarrier.init
        ((Race, Unwritten), r"of CTA \d", {"first": FENCE + "bar.sync 0;"}),
        (Race, "not ordered after the last write", {"arrive": "relaxed.cluster.shared::cluster"}),
        (Race, "not ordered after the last write", {"arrive": "release.cta.shared::cluster"}),
        (OutOfBounds, "shared::cta is a CTA's own", {"arrive": "shared::cta"}),
        (OutOfBounds, "shared::cta is a CTA's own", {"wait": "%r7"}),
        (Deadlock, r"wait for \('mbarrier', \d+, 0\)", {"count": "65"}),
        (Fault, r"ends, not ordered after what CTA \d does", {"count": "63"}),  # the last arrival is not waited for
    ],
)
def test_what_is_wrong_with_an_arrival_is_named(kind, message: str, parts: dict[str, str], seed: int | None):
    with pytest.raises(kind, match=message):
        launch(HANDED.format(**{**HANDED_OVER, **parts}), [words()], seed)


# The CTA of rank 0 loads 16 rows of 32 bytes for the CTAs of a mask; each that waits copies them to its half of %rd2.
MULTICAST = """
@%p1 mbarrier.init.shared::cta.b64 [global_smem+1024], 1;
{first}
setp.ge.u32 %p2, %r1, {waits_from}; and.pred %p4, %p1, %p2;
mov.b32 %r5, global_smem; add.s32 %r6, %r5, 1024;
mapa.shared::cluster.u32 %r7, %r5, %r2; mapa.shared::cluster.u32 %r8, %r6, %r2;
@%p4 mbarrier.arrive.expect_tx.{announced}.b64 _, [{at}], {bytes};
setp.eq.u32 %p5, %r1, 0; and.pred %p5, %p5, %p1;
mov.b16 %rs1, {mask};
@%p5 cp.async.bulk.tensor.2d.{copy};
@!%p2 bra $END;
$L: mbarrier.try_wait.parity.shared::cta.b64 %p3, [global_smem+1024], 0; @!%p3 bra $L;
shl.b32 %r4, %r0, 3; add.s32 %r5, %r5, %r4; ld.shared.b64 %rd9, [%r5];
mad.lo.s32 %r10, %r1, 64, %r0; mad.wide.u32 %rd8, %r10, 8, %rd2; st.global.b64 [%rd8], %rd9;
$END: {last}
"""
ONE = "global.mbarrier::complete_tx::bytes {to}, [%rd0, {{0, 0}}], {at}"
SENT = {
    "first": FENCE + RELAXED,
    "announced": "shared::cta",
    "at": "%r6",
    "bytes": "512",
    "copy": "shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r5], [%rd0, {0, 0}], [%r6], %rs1",
    "mask": "3",
    "waits_from": "0",
    "last": "",
}


def sent(seed: int | None, **parts: str) -> tuple[np.ndarray, np.ndarray]:
    """(the 512 bytes, what the CTAs have found)."""
    raw = np.zeros(1024, np.uint8)
    source = raw[-raw.ctypes.data % 128 :][:512].reshape(16, 32)
    source[:] = np.random.default_rng(0).integers(0, 256, (16, 32))
    found = np.zeros((2, 512), np.uint8)
    tensor_map = TensorMap(source.ctypes.data, (16, 32), (32, 1), (16, 32), 1, 0)
    launch(MULTICAST.format(**{**SENT, **parts}), [tensor_map, source, found], seed)
    return source.ravel(), found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_multicast_comes_to_each_cta_of_its_mask(seed: int | None):
    for first in (FENCE + RELAXED, FENCE + SYNC, SYNC + "fence.proxy.async.shared::cluster;"):
        source, found = sent(seed, first=first)
        assert np.array_equal(found, np.stack([source, source])), first
    to_the_other = "shared::cluster." + ONE.format(to="[%r7]", at="[%r8]")
    for parts in ({"mask": "2"}, {"copy": to_the_other}):
        source, found = sent(seed, waits_from="1", **parts)
        assert np.array_equal(found, np.stack([0 * source, source]))


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_announced_at_the_other_ctas_mbarrier(seed: int | None):
    source, found = sent(seed, announced="release.cluster.shared::cluster", at="%r8", last=SYNC)
    assert np.array_equal(found, np.stack([source, source]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "message", "parts"),
    [
        (Fault, r"nothing orders its initialisation|no mbarrier is initialised", {"first": "bar.sync 0;"}),
        (Race, "nothing orders its initialisation before", {"first": RELAXED}),
        (Race, r"is a fence\.mbarrier_init missing", {"first": SYNC}),
        (Race, "nothing orders its initialisation before", {"first": RELAXED + FENCE}),
        (Deadlock, r"wait for \('mbarrier'", {"bytes": "1024"}),  # each CTA gets 512, not the sum of both
        (Deadlock, r"of rank 1 wait for \('mbarrier'", {"mask": "1"}),
        (Fault, "no thread had waited for its last TMA load", {"waits_from": "1"}),
        (Fault, "to the CTAs of mask 0x4: the cluster has 2", {"mask": "4"}),
        (Fault, "of another CTA than", {"copy": "shared::cluster." + ONE.format(to="[%r7]", at="[%r6]")}),
        (OutOfBounds, "shared::cta is a CTA's own", {"copy": "shared::cta." + ONE.format(to="[%r7]", at="[%r8]")}),
    ],
)
def test_what_is_wrong_with_a_multicast_is_named(kind, message: str, parts: dict[str, str], seed: int | None):
    with pytest.raises(kind, match=message):
        sent(seed, **parts)
