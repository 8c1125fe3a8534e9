"""The processes of the other tests here: separate ones, whose errors and whose silence reach the test."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.distributed.processes import run

NAME = "FP8ENGINE_TEST_OF_PROCESSES"


def facts(rank: int, ranks: int) -> dict:
    """Of one rank, which first changes what another would see if they shared it."""
    torch.manual_seed(rank)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    own = {"process": os.getpid(), "random": torch.rand(1).item(), "hash": hash("a name")}
    return own | {"total": total.item(), "environment": os.environ.get(NAME)}


def fails_on_one(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    time.sleep(600)


def hangs(rank: int, ranks: int, folder: str) -> None:
    """No collective: the group's own time limit does not end it."""
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def test_ranks_are_processes_in_one_group_with_the_environment_of_now(monkeypatch):
    found = []
    for value in ("one", "two"):  # the server that ranks are forked from is older than the second
        monkeypatch.setenv(NAME, value)
        found.append(run(facts, 2))
        assert [rank["environment"] for rank in found[-1]] == [value] * 2
        assert [rank["total"] for rank in found[-1]] == [3, 3]
    every = [rank for pair in found for rank in pair]
    assert len({rank["process"] for rank in every} | {os.getpid()}) == 5
    assert found[0][0]["random"] == found[1][0]["random"] != found[0][1]["random"]


@pytest.mark.slow
def test_fresh_ranks_hash_names_each_in_its_own_way(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, second = run(facts, 2, fresh=True)
    assert first["hash"] != second["hash"]


def test_a_ranks_traceback_arrives_and_the_other_rank_ends():
    start = time.monotonic()
    raised = torch.multiprocessing.ProcessRaisedException
    with pytest.raises(raised, match=r"in fails_on_one[\s\S]*ValueError: the reason"):
        run(fails_on_one, 2)
    assert time.monotonic() - start < 300, "rank 0 sleeps for 600"


@pytest.mark.slow
def test_ranks_that_hang_are_killed(tmp_path):
    with pytest.raises(TimeoutError, match=r"test_processes\.hangs: 2 ranks were not done after 5 s"):
        run(hangs, 2, str(tmp_path), limit=5)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)  # an enquiry
