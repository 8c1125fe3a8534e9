"""Bytes counted in each collective are those that a ring sends, for eager and functional collectives."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from benchmarks.distributed.processes import run
from fp8engine.distributed.traffic import Traffic

RANKS = 3
SIZE = 12  # numbers of a rank


def work(rank: int, ranks: int) -> dict:
    """Bytes of each collective on this rank, alone in a block of its own."""
    x, whole = torch.ones(SIZE), torch.empty(RANKS * SIZE)
    group = dist.group.WORLD
    splits = [[1, 2, 9], [4, 4, 4], [0, 0, 12]]
    received = [row[rank] for row in splits]
    rows = torch.ones(SIZE, 5, dtype=torch.uint8)
    assert group is not None
    calls = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, x),
        "all-gather list": lambda: dist.all_gather([torch.empty(SIZE) for _ in range(ranks)], x),
        "all-gather functional": lambda: functional.all_gather_tensor(x, 0, group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(x, whole.zero_()),
        "reduce-scatter functional": lambda: functional.reduce_scatter_tensor(whole, "sum", 0, group),
        "all-reduce": lambda: dist.all_reduce(x.bfloat16()),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty(SIZE), x),
        "all-to-all uneven": lambda: dist.all_to_all_single(
            torch.empty(sum(received), 5, dtype=torch.uint8), rows, received, splits[rank]
        ),
        "two alone": lambda: dist.all_reduce(torch.ones(4), group=pair) if rank < 2 else None,
    }
    pair = dist.new_group([0, 1])
    found = {}
    for name, call in calls.items():
        with Traffic() as traffic:
            call()
        found[name] = traffic.to_dict()
    return found


@pytest.mark.slow
def test_bytes_are_a_rings():
    found = run(work, RANKS)
    per_rank = 4 * SIZE
    for rank, mine in enumerate(found):
        for kind in ("all-gather", "all-gather list", "all-gather functional"):
            assert mine[kind] == {"all-gather float32": {"bytes": (RANKS - 1) * per_rank, "calls": 1}}, kind
        for kind in ("reduce-scatter", "reduce-scatter functional"):  # 2/3 of three ranks' numbers
            assert mine[kind] == {"reduce-scatter float32": {"bytes": 2 * per_rank, "calls": 1}}, kind
        assert mine["all-reduce"] == {"all-reduce bfloat16": {"bytes": 2 * 2 * (2 * SIZE) // 3, "calls": 1}}
        assert mine["all-to-all"] == {"all-to-all float32": {"bytes": 2 * per_rank // 3, "calls": 1}}
        # 5 bytes a row, less the rows that stay: 1 of 12, 4 of 12, 12 of 12
        assert mine["all-to-all uneven"]["all-to-all uint8"]["bytes"] == 5 * (SIZE - [1, 4, 12][rank])
        assert mine["two alone"] == ({"all-reduce float32": {"bytes": 16, "calls": 1}} if rank < 2 else {})
