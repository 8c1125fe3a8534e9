"""torch's pipeline schedules on two ranks: what one process computes, microbatch by microbatch, bit for bit.

A stage is converted by itself, and keeps its own scaling state.  Casts of the tensor itself depend on the microbatch
alone, so every schedule gives the gradients of one process.  Predicted scales (`delayed`) depend on the order of a
stage's forwards and backwards too: a step of its history is a forward that follows a backward.  One process that takes
each stage through its schedule's order predicts the same.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import fp8engine as fe
from benchmarks.distributed.processes import run

pytestmark = pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
MICROBATCHES, ROWS, WIDTH, STEPS = 4, 32, 64, 3
STAGES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4}
MEMORYLESS = ("current", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", "bf16")
# Forwards and backwards of (stage, microbatch) in one process, each stage in the order that its schedule gives it.
ORDERS = {
    "GPipe": "f00 f10 f01 f11 f02 f12 f03 f13 b10 b00 b11 b01 b12 b02 b13 b03",
    "1F1B": "f00 f01 f10 b10 b00 f02 f11 b11 b01 f03 f12 b12 b02 f13 b13 b03",
}


def stage(place: int, recipe: str) -> Any:
    torch.manual_seed(place)
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return fe.convert(layers, recipe, skip=lambda name, module: False)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of a step; inputs grow, so that a scale that is predicted from another step shows."""
    x, target = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
    return x * 3.0**step, target


def gradients(parts: dict[int, Any]) -> dict[str, torch.Tensor]:
    return {f"{place}.{name}": p.grad for place, part in parts.items() for name, p in part.named_parameters()}


def trained(parts: dict[int, Any], step: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=1e-2)
    for number in range(STEPS):
        if number:
            optimizer.step()
        optimizer.zero_grad()
        step(*batch(number))
    return gradients(parts)


def alone(recipe: str, order: str, stages: int) -> dict[str, torch.Tensor]:
    """One process: every stage's forwards and backwards in that order."""
    parts = {place: stage(place, recipe) for place in range(stages)}

    def step(x: torch.Tensor, target: torch.Tensor) -> None:
        xs, targets, held = x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), {}
        for what, place, microbatch in ((word[0], int(word[1]), int(word[2])) for word in order.split()):
            if what == "f":
                given = held[place - 1, microbatch][1] if place else xs[microbatch]
                given = given.detach().requires_grad_(place > 0)
                held[place, microbatch] = given, parts[place](given)
            elif place == stages - 1:
                nn.functional.mse_loss(held[place, microbatch][1], targets[microbatch]).backward()
            else:
                held[place, microbatch][1].backward(held[place + 1, microbatch][0].grad)
        for part in parts.values():
            for p in part.parameters():
                p.grad /= MICROBATCHES

    return trained(parts, step)


def in_turn(stages: int) -> str:
    """Each microbatch through all stages and back."""
    there = [[f"f{place}{i}" for place in range(stages)] for i in range(MICROBATCHES)]
    return " ".join(word for words in there for word in [*words, *(f"b{word[1:]}" for word in reversed(words))])


def pipelined(rank: int, ranks: int, name: str, recipes: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    """By recipe: gradients of this rank's stages after a few steps of torch's schedule."""
    warnings.simplefilter("ignore")
    count, found = STAGES[name], {}
    places = [rank, 2 * ranks - 1 - rank] if name.startswith("ZBV") else list(range(rank, count, ranks))
    for recipe in recipes:
        parts = {place: stage(place, recipe) for place in places}
        # Example tensors: without them torch runs a first forward and backward on memory that nobody has written.
        piece, cpu = torch.zeros(ROWS // MICROBATCHES, WIDTH, requires_grad=True), torch.device("cpu")
        made = [
            PipelineStage(part, place, count, cpu, piece if place else piece.detach(), piece)
            for place, part in parts.items()
        ]
        schedule = getattr(pipelining, f"Schedule{name}")
        several = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
        running = schedule(made if several else made[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)

        def step(x, target, running=running, places=places):
            last = {"target": target} if count - 1 in places else {}
            running.step(*([x] if 0 in places else []), **last)

        found[recipe] = trained(parts, step)
        dist.barrier()
    return found


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_a_schedule_gives_the_gradients_of_one_process(name: str):
    recipes = MEMORYLESS + (("delayed", "auto") if name in ORDERS else ())
    ranks = run(pipelined, 2, name, recipes)
    for recipe in recipes:
        wanted = alone(recipe, ORDERS.get(name, in_turn(STAGES[name])), STAGES[name])
        found = ranks[0][recipe] | ranks[1][recipe]
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == [], recipe


def test_a_step_of_predicted_scales_is_a_forward_that_follows_a_backward():
    """So that the order of a schedule decides how often histories move; without predictions it decides nothing."""
    for recipe, equal in (("rowwise", True), ("delayed", False)):
        runs = [alone(recipe, order, 2) for order in ORDERS.values()]
        assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0]) == equal
