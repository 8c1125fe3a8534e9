"""Steps that `auto` samples under fe.distributed.fsdp: all ranks' rows describe a weight, and no gradient is lost."""

import warnings
from typing import Any

import pytest
import torch
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


def described(rank: int, ranks: int) -> dict[tuple[str, str], list[list[torch.Tensor]]]:
    """For both gathers, what a sampled step has entered of each weight."""
    found: dict[tuple[str, str], list[list[torch.Tensor]]] = {}
    for policy in ("fp32", "bf16"):
        for what, change in CHANGES.items():
            for ours in (False, True):
                model = sharded(net(change), ours, policy)
                model(torch.ones(4, ODD[1])).float().square().mean().backward()
                state: ScalingState = model.first.numerics.state
                samples: Any = state.samples
                rows = [state.row(layer, "weight") for layer in range(2)]
                entered = [table[row].clone() for row in rows for table in (samples.slots_SL, samples.parts)]
                found.setdefault((policy, what), []).append(entered)
    return found


def gradients(rank: int, ranks: int) -> dict[str, list[list[float]]]:
    """Norms of a weight's gradient, of equal microbatches of which only the last reduces, step after step."""
    found: dict[str, list[list[float]]] = {}
    x = torch.randn(16, ODD[1], generator=torch.Generator().manual_seed(rank))
    for policy in POLICIES:
        model = sharded(net(), True, policy)
        norms = found.setdefault(policy, [])
        for _ in range(STEPS):
            for i in range(MICROBATCHES):
                model.set_requires_gradient_sync(i == MICROBATCHES - 1)
                (model(x).float() - 0.3).square().mean().backward()
            norms.append([p.grad.full_tensor().float().norm().item() for p in model.parameters()])
            model.zero_grad()
    return found


@pytest.fixture(scope="module")
def entered() -> list[dict]:
    return run(described, 2)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["as made", "outlier"])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_statistics_are_those_of_the_whole_weight(policy: str, change: str, entered: list[dict]):
    """Bit for bit, but for the energies of the 129 rows of the transposed weight, each of which lies on both ranks:
    sums of 333 squares in FP32, in another order, by 333 ulps (2^-24) at most.
    """
    for rank in entered:
        whole, joined = rank[policy, change]
        first = whole[1], joined[1]
        assert torch.equal(first[0][: -ODD[0]], first[1][: -ODD[0]])
        torch.testing.assert_close(*first, rtol=333 * 2.0**-24, atol=0.0)
        for mine, theirs in zip((whole[0], *whole[2:]), (joined[0], *joined[2:]), strict=True):
            assert mine.abs().sum() > 0
            assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["NaN", "Inf"])
def test_a_number_that_is_not_finite_is_seen_by_every_rank(change: str, entered: list[dict]):
    """`nonfinite` is the sixth number of a row of the table: auto decides on none of that layer."""
    for rank in entered:
        _, joined = rank["fp32", change]
        assert min(joined[0][5], joined[2][5]) >= 1


@pytest.fixture(scope="module")
def norms() -> list[dict]:
    return run(gradients, 2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_gradient_is_lost_between_microbatches(policy: str, norms: list[dict]):
    """Without a step of an optimizer nothing changes, so every step has the gradients of the first, bit for bit."""
    for rank in norms:
        assert rank[policy][1:] == rank[policy][:-1]
        assert min(rank[policy][0]) > 0
