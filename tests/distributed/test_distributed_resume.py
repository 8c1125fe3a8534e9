"""Predicted scales on two real processes with data of their own: joined over ranks, and resumed bit for bit.

What rank 0 saves alone resumes on all ranks.  Each step predicts from the largest amax of all ranks, by one all-reduce;
ranks that are not asked to join, or cannot, predict each by itself.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import converted, state_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from benchmarks.distributed.processes import run

RANKS, SAVED, STEPS = 2, 3, 6
RUNS = ["delayed", "speed", "compiled", "asked", "everybody"]


@contextlib.contextmanager
def joins() -> Iterator[list[Any]]:
    """The operations of the all-reduces inside."""
    joined, real = [], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda *args, **named: joined.append((*args[1:], "none")[0]) or real(*args, **named)
        )
        yield joined


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

    how: everybody: both ranks save, each goes on from its own.
    """
    with joins() as joined:
        inner, outer = wrapped(how)
        train(how, inner, outer, 0, SAVED, rank)
        file, box = io.BytesIO(), [b""]
        if rank == 0 or how == "everybody":
            torch.save({"model": inner.state_dict(), "scaling": fe.scaling_state_dict(inner)}, file)
            box = [file.getvalue()]
        went_on = train(how, inner, outer, SAVED, STEPS, rank)
    dist.broadcast_object_list(box, 0)
    content = file.getvalue() if how == "everybody" else box[0]
    resumed = train(how, *wrapped(how, torch.load(io.BytesIO(content), weights_only=True)), SAVED, STEPS, rank)
    return {
        "equal": [torch.equal(a, b) for a, b in zip(went_on, resumed, strict=True)],
        "joined": joined.count(dist.ReduceOp.MAX),
        "history": state_of(inner).history_HS.clone(),
        "predicts": state_of(inner).delayed,
    }


def work(rank: int, ranks: int) -> dict:
    return {how: resume(how, rank) for how in RUNS}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run(work, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("how", RUNS)
def test_a_run_resumed_from_one_ranks_state_repeats_the_run_that_went_on(how: str, found: list[dict]):
    """A save costs no collective, and decides one join: each step has the largest amax of all ranks but that one."""
    first, second = (rank[how] for rank in found)
    for rank in (first, second):
        assert rank["predicts"]
        assert all(rank["equal"])
    assert first["joined"] == second["joined"] == STEPS
    assert torch.equal(first["history"], second["history"])
    largest = [[float(batch(step, rank).abs().max()) for rank in range(RANKS)] for step in range(STEPS - 1)]
    wanted = [amaxes[0] if step == SAVED - 1 else max(amaxes) for step, amaxes in enumerate(largest)]
    assert wanted[SAVED - 1] < largest[SAVED - 1][1]  # the other rank's is larger there
    assert first["history"][: STEPS - 1, 0].tolist() == wanted[::-1]  # of the first layer's input


AMAX = [[1.0, 8.0], [32.0, 2.0], [4.0, 4.5]]  # of the input in each step, by rank


def apart(how: str, recipe: str, rank: int) -> tuple[list[float], int, list[str]]:
    """The input's scale after each forward, how often ranks were joined, and what was said of it."""
    model = inner = converted(nn.Sequential(nn.Linear(16, 16, bias=False)), recipe)
    if how != "alone":
        model = DistributedDataParallel(model)
    scales = []
    with warnings.catch_warnings(record=True) as said, joins() as joined:
        warnings.simplefilter("always")
        for step, amaxes in enumerate(AMAX):
            uneven = how == "join" or step == 0
            with model.join(enable=uneven) if "join" in how else contextlib.nullcontext():
                y = model(torch.linspace(-1, 1, 6 * 16).reshape(6, 16) * amaxes[rank])
                scales.append(fe.scaling_state(inner)["0.input"].scale.item())
                y.sum().backward()
    return scales, joined.count(dist.ReduceOp.MAX), [str(w.message) for w in said if "join" in str(w.message)]


CASES = (("alone", "delayed"), ("join", "delayed"), ("ddp", "current"), ("join at first", "delayed"))


def on_their_own(rank: int, ranks: int) -> list[tuple[list[float], int, list[str]]]:
    return [apart(*case, rank) for case in CASES]


@pytest.mark.slow
def test_ranks_on_their_own_stay_on_their_own():
    """Uneven inputs are not waited for, and that is said; scales of the tensor itself need nothing of other ranks."""
    for rank, (alone, uneven, current, at_first) in enumerate(run(on_their_own, 2)):
        assert [joined for _, joined, _ in (alone, uneven, current, at_first)] == [0, 0, 0, len(AMAX) - 1]
        # scale = 1 / RN(MAX / amax): within two roundings
        assert alone[0][1] == pytest.approx(AMAX[0][rank] / 448, rel=2.0**-22)
        assert "each rank predicts its own scales" in uneven[2][0]
        assert "after it, call model.join(enable=False) on every rank" in uneven[2][0]


def stepped(ranks: str) -> nn.Module:
    """A layer after a step, told that its group is another."""
    layer = fe.Linear(8, 8, recipe="delayed")
    layer.numerics.state.ranks = ranks
    layer(torch.randn(2, 8)).sum().backward()
    return layer


def test_without_a_group_the_error_says_why():
    with pytest.raises(fe.errors.ParallelError, match="not initialised; call init_process_group"):
        fe.distributed.reduce_amax(fe.Linear(8, 8, recipe="delayed"))
    with pytest.raises(fe.errors.ParallelError, match="process group '7', which was destroyed"):
        stepped("7")(torch.randn(2, 8))


@pytest.mark.usefixtures("group")
def test_what_cannot_be_joined_is_refused():
    with pytest.raises(fe.errors.ParallelError, match=r"no converted layers; call fe\.convert"):
        fe.distributed.reduce_amax(nn.Linear(2, 2))
    with pytest.raises(fe.errors.ParallelError, match="'no such group', which is not there"):
        stepped("no such group")(torch.randn(2, 8))
