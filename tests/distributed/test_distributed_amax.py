"""Two real processes: delayed scaling predicts the same scales on every rank, from one all-reduce a step."""

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

RANKS = 2
STEPS = 3
# Amax of the input on each rank in each step: the larger is on another rank each time.
AMAX = [[1.0, 8.0], [32.0, 2.0], [4.0, 4.5]]


def inputs(rank: int, step: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 6 * 16).reshape(6, 16)
    return x * AMAX[step][rank]


def train(how: str, recipe: str, rank: int) -> dict:
    """Scales after each forward, and how often ranks were joined.  how: ddp, compiled, asked, alone, join."""
    torch.manual_seed(0)
    model = inner = converted(nn.Sequential(nn.Linear(16, 16, bias=False)), recipe)
    if how != "alone" and how != "asked":
        model = DistributedDataParallel(model)
    if how == "compiled":
        model = torch.compile(model, backend="aot_eager")
    if how == "asked":
        fe.distributed.reduce_amax(inner)
    joined, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **named: joined.append((*args[1:], "none")[0]) or real(*args, **named)
    scales = []
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(STEPS):
                with model.join() if how == "join" else contextlib.nullcontext():
                    y = model(inputs(rank, step))
                    state = fe.scaling_state(inner)
                    scales.append([state[f"0.{role}"].scale.item() for role in ("input", "grad_output")])
                    y.backward(torch.full_like(y, 2.0 ** (step + rank)))
    finally:
        dist.all_reduce = real
    return {
        "scales": scales,
        "joined": sum(op == dist.ReduceOp.MAX for op in joined),
        "said": [str(w.message) for w in said if "join" in str(w.message)],
    }


def work(rank: int, ranks: int) -> dict:
    """One rank."""
    runs = [("ddp", "delayed"), ("compiled", "delayed"), ("asked", "delayed"), ("alone", "delayed"), ("ddp", "current")]
    return {case: train(*case, rank) for case in [*runs, ("join", "delayed")]}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    """What each rank saw."""
    return run(work, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "compiled", "asked"])
def test_every_rank_predicts_from_the_largest_amax_of_all(how: str, found: list[dict]):
    first, second = (rank[how, "delayed"] for rank in found)
    assert first["scales"][1:] == second["scales"][1:]  # the first step of all takes each rank's own amax
    for step in range(1, STEPS):
        seen = max(max(row) for row in AMAX[:step])
        grad = max(2.0 ** (earlier + 1) for earlier in range(step))
        # scale = 1 / RN(MAX / amax), of powers of two times 448 and 57344: within two roundings of amax / MAX
        assert first["scales"][step] == pytest.approx([seen / 448, grad / 57344], rel=2.0**-22)
    assert first["joined"] == STEPS, "one all-reduce a step"


@pytest.mark.slow
def test_ranks_on_their_own_stay_on_their_own(found: list[dict]):
    for rank in range(RANKS):
        alone = found[rank]["alone", "delayed"]
        assert alone["scales"][1][0] == pytest.approx(AMAX[0][rank] / 448, rel=2.0**-22)
        assert alone["joined"] == 0


@pytest.mark.slow
def test_scales_from_the_tensor_itself_need_nothing_from_other_ranks(found: list[dict]):
    assert [rank["ddp", "current"]["joined"] for rank in found] == [0, 0]


@pytest.mark.slow
def test_uneven_inputs_are_not_waited_for_and_that_is_said(found: list[dict]):
    for rank in found:
        assert rank["join", "delayed"]["joined"] == 0
        assert "each rank predicts its own scales" in rank["join", "delayed"]["said"][0]


def test_what_cannot_be_joined_says_why():
    layer = fe.Linear(8, 8, recipe="delayed")
    with pytest.raises(fe.errors.ParallelError, match="not initialised; call init_process_group"):
        fe.distributed.reduce_amax(layer)
    layer.numerics.state.ranks = "7"
    layer(torch.randn(2, 8)).sum().backward()
    with pytest.raises(fe.errors.ParallelError, match="process group '7', which was destroyed"):
        layer(torch.randn(2, 8))


def test_a_model_that_is_not_converted_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(fe.errors.ParallelError, match=r"no converted layers; call fe\.convert"):
            fe.distributed.reduce_amax(nn.Linear(2, 2))
        layer = fe.Linear(8, 8, recipe="delayed")
        fe.distributed.reduce_amax(layer)
        layer(torch.randn(2, 8)).sum().backward()
        layer.numerics.state.ranks = "no such group"
        with pytest.raises(fe.errors.ParallelError, match="'no such group', which is not there"):
            layer(torch.randn(2, 8))
    finally:
        dist.destroy_process_group()
