"""Two real processes with data of their own: what rank 0 saves alone resumes on all ranks, bit for bit."""

import io

import pytest
import torch
import torch.distributed as dist
from support import converted, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from benchmarks.distributed.processes import run

RANKS, SAVED, STEPS = 2, 3, 6
RUNS = ["delayed", "speed", "compiled", "asked", "everybody", "sharded"]


class Net(nn.Module):
    """The second rank alone runs `rare`, and first just before the save, which then holds nothing of it."""

    def __init__(self, rare: bool):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 16)
        self.rare = nn.Linear(48, 48) if rare else None

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        h = torch.relu(self.up(x))
        return self.down(h if self.rare is None or not rare else self.rare(h))


def recipe_of(how: str):
    """Under auto, `speed` predicts scales; a look at every second step keeps one waiting when the state is saved."""
    return fe.auto(objective="speed", interval=2) if how == "speed" else "delayed"


def wrapped(how: str, saved: dict | None = None):
    """(the converted model, what trains it); saved: what it goes on from."""
    torch.manual_seed(0)
    inner = converted(Net(rare=how != "compiled"), recipe_of(how))
    if saved is not None:
        inner.load_state_dict(saved["model"])
        fe.load_scaling_state_dict(inner, saved["scaling"])
    outer = DistributedDataParallel(inner, find_unused_parameters=how != "compiled")
    if how == "asked":
        outer = inner
        fe.distributed.reduce_amax(inner)
    return inner, torch.compile(outer, backend="aot_eager") if how == "compiled" else outer


def batch(step: int, rank: int) -> torch.Tensor:
    """Each rank's is the larger one in every other step."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    return x * (1 + 3 * ((step + rank) % 2))


def train(how: str, inner, outer, first: int, last: int, rank: int) -> list[torch.Tensor]:
    """Parameters and tables after every step."""
    found = []
    for step in range(first, last):
        rare = rank == 1 and step in (SAVED - 1, SAVED)
        outer(batch(step, rank), rare).square().mean().backward()
        with torch.no_grad():
            for p in inner.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                if how == "asked":
                    dist.all_reduce(p.grad)
                p -= 0.01 * p.grad
                p.grad = None
        state = state_of(inner)
        found += [p.detach().clone() for p in inner.parameters()]
        found += [state.history_HS.clone(), state.live_2S.clone()]
    return found


def resume(how: str, rank: int) -> dict:
    """Whether the resumed run repeats the one that went on, and how often ranks were joined.

    how: everybody: both ranks save, each goes on from its own.  sharded: both save, both go on from the first's, as
    torch.distributed.checkpoint does it.
    """
    joined, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **named: joined.append((*args[1:], "none")[0]) or real(*args, **named)
    try:
        inner, outer = wrapped(how)
        train(how, inner, outer, 0, SAVED, rank)
        file, box = io.BytesIO(), [b""]
        if rank == 0 or how in ("everybody", "sharded"):
            torch.save({"model": inner.state_dict(), "scaling": fe.scaling_state_dict(inner)}, file)
            box = [file.getvalue()]
        went_on = train(how, inner, outer, SAVED, STEPS, rank)
    finally:
        dist.all_reduce = real
    dist.broadcast_object_list(box, 0)
    content = file.getvalue() if how == "everybody" else box[0]
    resumed = train(how, *wrapped(how, torch.load(io.BytesIO(content), weights_only=True)), SAVED, STEPS, rank)
    return {
        "equal": [torch.equal(a, b) for a, b in zip(went_on, resumed, strict=True)],
        "joined": sum(op == dist.ReduceOp.MAX for op in joined),
        "history": state_of(inner).history_HS.clone(),
        "predicts": state_of(inner).delayed,
    }


def work(rank: int, ranks: int) -> dict:
    """One rank."""
    return {how: resume(how, rank) for how in RUNS}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    """What each rank saw."""
    return run(work, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("how", RUNS)
def test_a_run_resumed_from_one_ranks_state_repeats_the_run_that_went_on(how: str, found: list[dict]):
    for rank in found:
        assert rank[how]["predicts"]
        assert rank[how]["equal"] == [True] * len(rank[how]["equal"])


@pytest.mark.slow
@pytest.mark.parametrize("how", RUNS)
def test_a_save_costs_no_collective_and_decides_one_join(how: str, found: list[dict]):
    first, second = (rank[how] for rank in found)
    assert first["joined"] == second["joined"] == STEPS
    assert torch.equal(first["history"], second["history"])
    largest = [[float(batch(step, rank).abs().max()) for rank in range(RANKS)] for step in range(STEPS - 1)]
    wanted = [amaxes[0] if step == SAVED - 1 else max(amaxes) for step, amaxes in enumerate(largest)]
    assert wanted[SAVED - 1] < largest[SAVED - 1][1]  # the other rank's is larger there
    assert first["history"][: STEPS - 1, 0].tolist() == wanted[::-1]  # of the first layer's input
