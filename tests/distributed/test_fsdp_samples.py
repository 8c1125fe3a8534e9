"""Steps that `auto` samples under fe.distributed.fsdp: all ranks' rows describe a weight, and no gradient is lost."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from ranks import holds_on_every_rank, named, outcomes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.scaling.table import ScalingState

ODD = (129, 333)  # 43k elements, of which 16k are looked at; 65 and 64 rows, and a block of 128 lies on both ranks
STEPS, MICROBATCHES = 64, 4
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
CHANGES = {"as made": 1.0, "outlier": 1e4, "NaN": float("nan"), "Inf": float("inf")}


class Net(nn.Module):
    """A layer of each kind: the first has its weight as [K, N]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Conv1D(ODD[0], ODD[1]), nn.Linear(*ODD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def net(change: float = 1.0) -> Any:
    torch.manual_seed(0)
    model: Any = fe.convert(Net(), "auto", skip=lambda name, module: False)
    with torch.no_grad():
        for parameter in (model.first.weight, model.second.weight):
            parameter[-2, 7] *= change  # of the last rank
    return model


def sharded(model: Any, ours: bool, policy: str) -> Any:
    warnings.simplefilter("ignore")
    if ours:
        return fe.distributed.fsdp(model, mp_policy=POLICIES[policy])
    fully_shard(model, mp_policy=POLICIES[policy])
    fe.distributed.reduce_amax(model)
    return model


def entered(policy: str, change: str, ours: bool) -> list[torch.Tensor]:
    """What a sampled step has entered of both weights: slots and parts of the first, and of the second."""
    model = sharded(net(CHANGES[change]), ours, policy)
    model(torch.ones(4, ODD[1])).float().square().mean().backward()
    state: ScalingState = model.first.numerics.state
    samples: Any = state.samples
    rows = [state.row(layer, "weight") for layer in range(2)]
    return [table[row].clone() for row in rows for table in (samples.slots_SL, samples.parts)]


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
        model, norms = sharded(net(), True, policy), []
        for _ in range(STEPS):
            for i in range(MICROBATCHES):
                model.set_requires_gradient_sync(i == MICROBATCHES - 1)
                (model(x).float() - 0.3).square().mean().backward()
            norms.append([p.grad.full_tensor().float().norm().item() for p in model.parameters()])
            model.zero_grad()
        assert norms == norms[:1] * STEPS, policy
        assert min(norms[0]) > 0


PARTS = named(
    statistics_are_those_of_the_whole_weight,
    a_number_that_is_not_finite_is_seen_by_every_rank,
    no_gradient_is_lost_between_microbatches,
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
