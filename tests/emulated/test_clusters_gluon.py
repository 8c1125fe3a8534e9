"""Clusters of two as Triton compiles them from Gluon, on the emulated card: multicast, and the way a slot goes back.

The kernels (tests/helpers/cluster_kernels.py) are in the Gluon of Triton 3.7.  That of 3.6 has no multicast; 3.8 and
3.9 have other names, and their cluster's barrier and `two_ctas` do what is missing here.
"""

import re

import pytest
import torch
import triton
from emulator.faults import Deadlock, Fault, Race
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Always run under the pinned Triton (constraints.txt).  Under another one these kernels do not compile: 3.6 has no
# multicast, and 3.8 and 3.9 name and do the barrier otherwise (above).  tests/emulated/test_clusters.py runs under all.
if not triton.__version__.startswith("3.7."):
    pytest.skip("these kernels, and what is wrong with some, are Triton 3.7's", allow_module_level=True)

import cluster_kernels as kernels
from cluster_kernels import SHARED, SPLIT, layout

TILE = 128
STAGES = 3


def operands(tiles: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Small integers in FP8, whose products are exact: a [tiles * 128, k], b [128, k], and room for y."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-3, 4, (rows, k), generator=generator).float().to(torch.float8_e4m3fn)
        for rows in (tiles * TILE, TILE)
    )
    return a, b, torch.full((tiles * TILE, TILE), float("nan"))


def multiplied(kernel, clusters: int, tiles: int, k: int, *way) -> bool:
    """Launch a kernel; whether its product is exact."""
    a, b, y = operands(tiles, k)
    kernel[(clusters,)](*descriptors(a, b), y, k, *way, num_ctas=2, num_warps=4)
    return torch.equal(y, a.float() @ b.float().t())


def descriptors(a: torch.Tensor, b: torch.Tensor) -> list[TensorDescriptor]:
    """Each CTA has the half of a's rows and all of b's."""
    box = [TILE, TILE]
    return [TensorDescriptor.from_tensor(a, box, layout(SPLIT)), TensorDescriptor.from_tensor(b, box, layout(SHARED))]


@pytest.mark.parametrize("multicast", [True, False])
def test_one_buffer_loaded_for_both(multicast: bool, card):
    """The lab's multicast.py: right with one load of K, and with more where a barrier of the cluster lies between."""
    there = card(90)
    assert multiplied(kernels.product, 2, 2, TILE, multicast, False)
    assert multiplied(kernels.product, 2, 2, 3 * TILE, multicast, True)
    assert [done.ctas for done in there.done] == [4, 4]


def test_a_buffer_is_loaded_over_what_the_other_cta_reads(card):
    card(90)
    assert multiplied(kernels.product, 1, 1, 3 * TILE, False, False)  # each CTA loads for itself
    with pytest.raises(Race, match=r"of CTA 1: this write by TMA is not ordered after the last .*multicast"):
        multiplied(kernels.product, 1, 1, 3 * TILE, True, False)


def empty_at(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, sync: str) -> int:
    """Where the mbarriers of empty slots lie in shared memory: Gluon gives no address of one, its PTX does."""
    compiled = kernels.ring.warmup(*descriptors(a, b), y, TILE, "all", sync, 0, grid=(1,), num_ctas=2, num_warps=4)
    ptx = compiled.asm["ptx"]
    initialised = re.findall(r"mbarrier\.init\S+\s+\[(%r\d+)\], 4;", ptx)
    places = [int(re.findall(rf"add\.s32\s+{register}, %r\d+, (\d+);", ptx)[0]) for register in initialised]
    assert places == [places[0] + 8 * i for i in range(STAGES)]
    return places[0]


def ring(way: str, sync: str, k: int = 5 * TILE) -> bool:
    """Two programs of two tiles."""
    where = empty_at(*operands(2, TILE), sync) if way == "all" else 0
    return multiplied(kernels.ring, 2, 4, k, way, sync, where)


def test_a_ring_whose_slots_come_back_from_both_ctas(card):
    there = card(90)
    assert ring("all", "parts")
    assert there.done[-1].ctas == 4


@pytest.mark.parametrize("way", ["own", "leader"])
def test_a_slot_that_one_cta_alone_gives_back_is_a_race(way: str, card):
    """The trap: Triton 3.7.1 compiles the arrival to `.shared::cta`, with `two_ctas=True` too."""
    card(90)
    with pytest.raises(Race, match=r"of CTA \d: this write by TMA is not ordered after the last .*cp\.async\.bulk"):
        ring(way, "parts")


def test_the_clusters_barrier_of_triton_waits_for_warps_that_never_come(card):
    """The lab's cluster_ring.py as it stands: with `warp_specialize` only four warps come to `sync_cluster_init`."""
    card(90)
    with pytest.raises(Deadlock, match=r"warps \[0.* wait for \('cluster', .* at 'barrier\.cluster\.wait"):
        ring("own", "init")


def test_a_cta_that_ends_while_the_other_still_arrives(card):
    card(90)
    with pytest.raises(Fault, match=r"has ended|ends, not ordered after what CTA \d does to its shared memory"):
        ring("all", "begin")
