"""Where ranks predict scales each by itself: not asked to join, nothing predicted, uneven inputs, groups that are gone.

That joined ranks predict from the largest amax of all, by one all-reduce a step, is in test_distributed_resume.py.
"""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from support import converted
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from benchmarks.distributed.processes import run

AMAX = [[1.0, 8.0], [32.0, 2.0], [4.0, 4.5]]  # of the input in each step, by rank


def train(how: str, recipe: str, rank: int) -> tuple[list[float], int, list[str]]:
    """The input's scale after each forward, how often ranks were joined, and what was said of it."""
    model = inner = converted(nn.Sequential(nn.Linear(16, 16, bias=False)), recipe)
    if how != "alone":
        model = DistributedDataParallel(model)
    joined, real, scales = [], dist.all_reduce, []
    dist.all_reduce = lambda *args, **named: joined.append((*args[1:], "none")[0]) or real(*args, **named)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for amaxes in AMAX:
                with model.join() if how == "join" else contextlib.nullcontext():
                    y = model(torch.linspace(-1, 1, 6 * 16).reshape(6, 16) * amaxes[rank])
                    scales.append(fe.scaling_state(inner)["0.input"].scale.item())
                    y.sum().backward()
    finally:
        dist.all_reduce = real
    return scales, joined.count(dist.ReduceOp.MAX), [str(w.message) for w in said if "join" in str(w.message)]


def work(rank: int, ranks: int) -> list[tuple[list[float], int, list[str]]]:
    return [train(*case, rank) for case in (("alone", "delayed"), ("join", "delayed"), ("ddp", "current"))]


@pytest.mark.slow
def test_ranks_on_their_own_stay_on_their_own():
    """Uneven inputs are not waited for, and that is said; scales of the tensor itself need nothing of other ranks."""
    for rank, (alone, uneven, current) in enumerate(run(work, 2)):
        assert [joined for _, joined, _ in (alone, uneven, current)] == [0, 0, 0]
        # scale = 1 / RN(MAX / amax): within two roundings
        assert alone[0][1] == pytest.approx(AMAX[0][rank] / 448, rel=2.0**-22)
        assert "each rank predicts its own scales" in uneven[2][0]


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
