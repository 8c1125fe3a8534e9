"""When a step ends under fe.distributed.fsdp, what is gathered before, and what `auto` samples of all ranks' rows.

Schedules of microbatches in one process group are compared in test_fsdp_equal.py.
"""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import holds_on_every_rank, named, work
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from benchmarks.distributed import fsdp
from benchmarks.distributed.processes import run
from fp8engine.report.state import controllers_of

SIZE = (64, 128)
SAMPLED = 4  # forwards from sample to sample
ODD = (129, 333)  # 43k elements, of which 16k are looked at; 65 and 64 rows, and a block of 128 lies on both ranks
SAMPLED_STEPS = 64
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
CHANGES = {"as made": 1.0, "outlier": 1e4, "NaN": float("nan"), "Inf": float("inf")}
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


def steps_of_any_optimizer_are_seen_under_torchs_own_sharding(rank: int) -> None:
    """foreach and fused ones move no version counter of a DTensor.  Microbatches that do not reduce leave no gradient
    on it, and adopt nothing.
    """
    logs, kinds = [], ("foreach", "foreach", "fused")
    for kind, on in zip(kinds, (False, True, True), strict=True):
        options: Any = {kind: on}
        model = made(fe.auto(interval=2))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        fe.distributed.reduce_amax(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, **options)
        for step in range(6):
            before = []
            for i in range(2):
                model.set_requires_gradient_sync(i == 1)
                loss = model(batch(rank, 2 * step + i)).square().mean()
                before.append(changes(model))
                loss.backward()
            assert before[0] == before[1]
            optimizer.step()
            optimizer.zero_grad()
        logs.append([(change.step, change.layer, change.recipe) for change in controllers_of(model)[0].log])
    assert logs[0]
    assert logs == logs[:1] * 3


class Recomputed(nn.Module):
    """A reentrant checkpoint around a whole model, whose first forward has no gradients, as an evaluation's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=True)


def one_replica_may_evaluate(rank: int) -> None:
    """As a trainer's first rank does, before training and in it: the run is that of ranks that do not."""
    speed = fe.auto(interval=2, objective="speed")
    for recipe, around in itertools.product([fe.auto(interval=2), speed, "delayed"], [nn.Sequential, Recomputed]):
        found = []
        for evaluates in (False, True):
            inner = made(recipe)
            model = nn.parallel.DistributedDataParallel(around(inner))
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            losses = []
            for step in range(4):
                if evaluates and rank == 0:
                    with torch.no_grad():
                        model(batch(rank, 50 + step))
                        model(batch(rank, 60 + step))
                loss = model(batch(rank, step).requires_grad_()).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            logs = [controller.log for controller in controllers_of(inner)]
            found.append((losses, [(change.step, change.layer, change.recipe) for log in logs for change in log]))
        assert recipe == "delayed" or found[0][1]
        assert found[0] == found[1], (recipe, around)


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


def sharded(ours: bool, policy: str, change: float = 1.0) -> Any:
    """A layer of each kind, the first of which has its weight as [K, N]."""
    torch.manual_seed(0)
    model: Any = fe.convert(nn.Sequential(Conv1D(ODD[0], ODD[1]), nn.Linear(*ODD)), "auto", skip=lambda *_: False)
    with torch.no_grad():
        for layer in model:
            layer.weight[-2, 7] *= change  # of the last rank
    if ours:
        return fe.distributed.fsdp(model, mp_policy=POLICIES[policy])
    fully_shard(model, mp_policy=POLICIES[policy])
    fe.distributed.reduce_amax(model)
    return model


def entered(policy: str, change: str, ours: bool) -> list[torch.Tensor]:
    """What a sampled step has entered of both weights: slots and parts of the first, and of the second."""
    model = sharded(ours, policy, CHANGES[change])
    model(torch.ones(4, ODD[1])).float().square().mean().backward()
    state: Any = model[0].numerics.state
    rows = [state.column(layer, "weight") for layer in range(2)]
    return [table[row].clone() for row in rows for table in (state.samples.slots_SL, state.samples.parts)]


def statistics_are_those_of_the_whole_weight(rank: int) -> None:
    """Bit for bit, but for the energies of the 129 rows of the transposed weight, each of which lies on both ranks:
    sums of 333 squares in FP32, in another order, by 333 ulps (2^-24) at most.
    """
    for policy, change in itertools.product(("fp32", "bf16"), ("as made", "outlier")):
        whole, joined = (entered(policy, change, ours) for ours in (False, True))
        assert torch.equal(whole[1][: -ODD[0]], joined[1][: -ODD[0]])
        torch.testing.assert_close(whole[1], joined[1], rtol=333 * 2.0**-24, atol=0.0)
        for mine, theirs in zip((whole[0], *whole[2:]), (joined[0], *joined[2:]), strict=True):
            assert mine.abs().sum() > 0
            assert torch.equal(mine, theirs)


def a_number_that_is_not_finite_is_seen_by_every_rank(rank: int) -> None:
    """`nonfinite` is the sixth number of a row of the table: auto decides on none of that layer."""
    for change in ("NaN", "Inf"):
        joined = entered("fp32", change, True)
        assert min(joined[0][5], joined[2][5]) >= 1


def no_gradient_is_lost_between_microbatches(rank: int) -> None:
    """Of equal microbatches of which only the last reduces.  Without a step of an optimizer nothing changes, so every
    step has the gradients of the first, bit for bit.
    """
    x = torch.randn(16, ODD[1], generator=torch.Generator().manual_seed(rank))
    for policy in POLICIES:
        model, norms = sharded(True, policy), []
        for _ in range(SAMPLED_STEPS):
            for i in range(MICROBATCHES):
                model.set_requires_gradient_sync(i == MICROBATCHES - 1)
                (model(x).float() - 0.3).square().mean().backward()
            norms.append([p.grad.full_tensor().float().norm().item() for p in model.parameters()])
            model.zero_grad()
        assert norms == norms[:1] * SAMPLED_STEPS, policy
        assert min(norms[0]) > 0


def an_overflow_of_another_rank_is_told_as_one(rank: int) -> None:
    """The second rank's data hold an Inf: there it is named, elsewhere the gradients are said to be a sum."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in (*model, model):
        fully_shard(part)
    with fe.amp.find_overflow(model, torch.amp.GradScaler("cpu")) as watch:
        model(torch.full((4, 8), float("inf") if rank else 1.0)).sum().backward()
    (finding,) = watch.report().findings
    assert finding.operand == ("input" if rank else "grad_weight")
    assert ("sum over 2 ranks: if another made it, that one's report says where" in str(finding)) == (rank == 0)


PARTS = named(
    an_overflow_of_another_rank_is_told_as_one,
    blocks_unsharded_before_the_roots_forward,
    a_loop_of_ones_own_says_when_a_step_has_ended,
    steps_of_any_optimizer_are_seen_under_torchs_own_sharding,
    one_replica_may_evaluate,
    weights_that_others_have_written_are_measured_again,
    statistics_are_those_of_the_whole_weight,
    a_number_that_is_not_finite_is_seen_by_every_rank,
    no_gradient_is_lost_between_microbatches,
)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run(work, 2, PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_on_every_rank(part: str, found: list[dict[str, str]]):
    holds_on_every_rank(part, found)


def pipelined(rank: int, ranks: int) -> list[dict]:
    """Losses and weights of torch's own pipeline of sharded stages; by fully_shard's gather, and by ours."""
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh("cpu", (STAGES, ranks // STAGES), mesh_dim_names=("pp", "dp"))
    place, found = mesh["pp"].get_local_rank(), []
    for ours in (False, True):
        torch.manual_seed(place)
        blocks = nn.Sequential(fsdp.Block(*SIZE), fsdp.Block(*SIZE))
        stage: Any = fe.convert(blocks, "auto", skip=lambda name, module: False)
        if ours:
            fe.distributed.fsdp(stage, mesh=mesh["dp"], blocks=list(stage))
        else:
            for block in stage:
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
            generator = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
            x = torch.randn(16, SIZE[0], generator=generator)
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
