"""When a step ends under fe.distributed.fsdp, and what is gathered before: loops of one's own, writes, a pipeline.

Schedules of microbatches in one process group are compared in test_fsdp_equal.py.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import holds_on_every_rank, named, outcomes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fp8engine as fe
from benchmarks.distributed import fsdp
from benchmarks.distributed.processes import run
from fp8engine.report.state import controllers_of

SIZE = (64, 128)
SAMPLED = 4  # forwards from sample to sample
STAGES, MICROBATCHES = 2, 4


def made(recipe: Any) -> Any:
    torch.manual_seed(0)
    return fe.convert(fsdp.Net(*SIZE), recipe, skip=lambda name, module: False)


def net(recipe: Any, **options) -> Any:
    return fe.distributed.fsdp(made(recipe), **options)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, SIZE[0], generator=torch.Generator().manual_seed(10 * step + rank))


def changes(model: nn.Module) -> int:
    """How often auto has changed a recipe."""
    return len(controllers_of(model)[0].log)


def blocks_unsharded_before_the_roots_forward(rank: int) -> None:
    """Gathered by hand before the forward in which formats change: equal to a run without."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    for by_hand in losses:
        model = net(fe.auto(interval=SAMPLED))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(6):
            if by_hand:
                model.blocks[0].unshard()
                model.blocks[1].unshard(async_op=True)
            loss = model(batch(rank, step)).square().mean()
            loss.backward()
            losses[by_hand].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert changes(model) > 0
    assert losses[False] == losses[True]


def a_loop_of_ones_own_says_when_a_step_has_ended(rank: int) -> None:
    """Recipes wait until `weights_changed` says so, which is told once.

    70 joins: without an optimizer of torch in every forward, else after each update.
    """
    for says in (False, True):
        model = net(fe.auto(interval=SAMPLED))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(70):
                model(batch(rank, step)).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.to_local().data.sub_(parameter.grad.to_local(), alpha=1e-2)
                        parameter.grad = None
                if says:
                    fe.weights_changed(model)
        assert (changes(model) > 0) == says
        assert len([warning for warning in told if "weights_changed" in str(warning.message)]) == (not says)
        assert vars(model)[fsdp.GATHER].scales.joins == 70


def weights_that_others_have_written_are_measured_again(rank: int) -> None:
    """Inside a step, by other code than the optimizer: no old scale."""
    for what in ("in place", "loaded", "in an evaluation"):
        model = net("current", reshard_after_forward=True)
        sharded = list(model.parameters())
        optimizer = torch.optim.AdamW(sharded, 1e-3)
        for step in range(2):
            model(batch(rank, step)).square().mean().backward()
            if not step:
                optimizer.step()
                optimizer.zero_grad()
        state = {name: value.detach() * 64.0 for name, value in model.state_dict().items()}
        with torch.no_grad():
            if what == "loaded":
                model.load_state_dict(state)
            elif what == "in place":
                for parameter in sharded:
                    parameter.mul_(64.0)
            else:
                model(batch(rank, 5))
                for parameter in sharded:
                    parameter.to_local().data.mul_(64.0)
        y = model(batch(rank, 6))
        plain = made("current")
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        assert torch.equal(y, plain(batch(rank, 6))), what


PARTS = named(
    blocks_unsharded_before_the_roots_forward,
    a_loop_of_ones_own_says_when_a_step_has_ended,
    weights_that_others_have_written_are_measured_again,
)


def work(rank: int, ranks: int) -> dict[str, str]:
    return outcomes(PARTS, rank)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run(work, 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_on_every_rank(part: str, found: list[dict[str, str]]):
    holds_on_every_rank(part, found)


class Stage(nn.Module):
    """One stage of a pipeline."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(fsdp.Block(*SIZE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pipelined(rank: int, ranks: int) -> list[dict]:
    """Losses and weights of torch's own pipeline of sharded stages; by fully_shard's gather, and by ours."""
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh("cpu", (STAGES, ranks // STAGES), mesh_dim_names=("pp", "dp"))
    place, found = mesh["pp"].get_local_rank(), []
    for ours in (False, True):
        torch.manual_seed(place)
        stage: Any = fe.convert(Stage(), "auto", skip=lambda name, module: False)
        if ours:
            fe.distributed.fsdp(stage, mesh=mesh["dp"])
        else:
            for block in stage.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(stage, mesh=mesh["dp"])
            fe.distributed.reduce_amax(stage, mesh["dp"].get_group())
            fsdp.decide_between_steps(stage)
        optimizer = torch.optim.AdamW(stage.parameters(), 1e-2)
        # Without example tensors torch first trains on uninitialised memory, to see sizes: auto would sample that.
        sent = [torch.zeros(16 // MICROBATCHES, SIZE[0], requires_grad=needs) for needs in (place > 0, True)]
        part = PipelineStage(stage, place, STAGES, torch.device("cpu"), *sent, group=mesh["pp"].get_group())
        schedule = Schedule1F1B(part, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        for step in range(4):
            x = torch.randn(
                16, SIZE[0], generator=torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
            )
            if place == 0:
                schedule.step(x)
            else:
                schedule.step(target=x, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            if not ours:
                fe.weights_changed(stage)
        weights = [parameter.full_tensor() for parameter in stage.parameters()]
        found.append({"losses": losses, "weights": weights, "changes": changes(stage)})
    return found


@pytest.mark.slow
def test_torchs_pipeline():
    for plain, ours in run(pipelined, 4):
        assert all(map(torch.equal, plain["weights"], ours["weights"]))
        assert plain["losses"] == ours["losses"]
        assert plain["changes"] == ours["changes"] > 0
