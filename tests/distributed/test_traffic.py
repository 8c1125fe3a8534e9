"""Bytes counted in each collective, eager or functional, are those of a ring; errors of ranks and silence are told."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from benchmarks.distributed.processes import run
from fp8engine.distributed.traffic import Traffic


def fails_on_one(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    time.sleep(600)


def hangs(rank: int, ranks: int, folder: str) -> None:
    """No collective: the group's own time limit does not end it."""
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_ranks_traceback_arrives_and_the_other_rank_ends():
    start = time.monotonic()
    raised = torch.multiprocessing.ProcessRaisedException
    with pytest.raises(raised, match=r"in fails_on_one[\s\S]*ValueError: the reason"):
        run(fails_on_one, 2)
    assert time.monotonic() - start < 300, "rank 0 sleeps for 600"


@pytest.mark.slow
def test_ranks_that_hang_are_killed(tmp_path):
    with pytest.raises(TimeoutError, match=r"test_traffic\.hangs: 2 ranks were not done after 5 s"):
        run(hangs, 2, str(tmp_path), limit=5)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)  # an enquiry


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
