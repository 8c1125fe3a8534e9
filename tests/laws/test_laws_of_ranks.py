"""Law of ranks: two processes that each see half of a batch compute what one process computes of the whole.

Each rank trains both, and takes one process's weights after each step of the optimizer, so that every step begins with
equal weights.  Results, gradients of inputs and histories are equal bit for bit where scales are of rows or blocks, or
predicted from amaxes that ranks have joined.  Gradients of weights are sums over ranks: in another order.

The first step has the same half on both ranks, because it takes each rank's own amax.  Then the halves differ, and the
second one is twice as large: a scale that did not follow all ranks would show.  A margin of 2^4 keeps predicted scales
from being replaced by measured ones, which are each rank's own.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scenarios import WIDTH, Scenario
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from trials import RECIPES, states, under

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.nn.linear import float8_modules

RANKS, STEPS = 2, 3
KINDS = ("ddp", "fsdp")
CHOSEN = {name: RECIPES[name] for name in ("current", "rowwise", "rowwise_gw_hp", "blockwise", "bf16")}
CHOSEN["delayed"] = fe.delayed(history=2, margin=4)

# Where scales are measured, a value of E4M3 is rounded otherwise, by 2^-4 at most.  Of x and w, and of many products.
MEASURED = 2.0**-3
# Sums over 48 tokens in FP32, each rounded by 2^-24.  An element that is subnormal under one power of two and not under
# another is off by 4e-6 of its group's amax (tests/distributed/test_fsdp_equal.py).
SUMMED = 2.0**-17
SUMMED_IN_16_BITS = 2.0**-7  # of each part and of the sum: 2^-9 each


def halves(step: int) -> list[torch.Tensor]:
    first, second = torch.randn(RANKS, 2, 12, WIDTH, generator=torch.Generator().manual_seed(step))
    return [first, first if step == 0 else 2 * second]


def ran(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(result, gradient of x) of a forward and a backward; the loss is a sum, of which each half has its own part."""
    x = x.clone().requires_grad_()
    y = model(x).float()
    (y.square().sum() / 2**9).backward()
    return y.detach(), x.grad


def in_fp32(layer: Any) -> bool:
    """Whether the gradient of a layer's weight is summed in FP32: its casts are to FP8, and so is no weight of BF16."""
    return all(cast.is_fp8 for cast in layer.numerics.recipe.wgrad) and layer.weight.dtype == torch.float32


def far(found: Any, wanted: Any) -> float:
    """The distance in norms of what is wanted; 0.0 for equal bits alone."""
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return 0.0 if torch.equal(found, wanted) else float((found - wanted).norm() / wanted.norm().clamp_min(2.0**-126))


def parts(one: Any, mine: Any, model: Any, rank: int) -> Iterator[tuple[str, Any, Any]]:
    """(name, of this rank, of one process) of what three steps compute."""
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.05) for each in (one, mine)]
    for step in range(STEPS):
        found, wanted = ran(model, halves(step)[rank]), ran(one, torch.cat(halves(step)))
        for what, got, both in zip(("y", "gradient of x"), found, wanted, strict=True):
            yield what, got, None if both is None else both.chunk(RANKS)[rank]
        for p, q in zip(mine.parameters(), one.parameters(), strict=True):
            yield "gradient", RANKS * p.grad, q.grad
        for got, both in zip(states(mine), states(one), strict=True):
            yield "history", got.history_HS, both.history_HS
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(mine.parameters(), one.parameters(), strict=True):
                p.copy_(distribute_tensor(q.detach(), p.device_mesh, p.placements) if isinstance(p, DTensor) else q)


def apart(row: Scenario, recipe: str, kind: str, rank: int) -> dict[str, float]:
    """How far this rank's training is from that of one process, and how far its gradients may be."""
    one, mine = (row.build(CHOSEN[recipe]) for _ in range(2))
    model = DistributedDataParallel(mine) if kind == "ddp" else fe.distributed.fsdp(mine, blocks=[])
    most = SUMMED if all(map(in_fp32, float8_modules(one))) else SUMMED_IN_16_BITS
    found = {"may be": most, "y": 0.0, "gradient of x": 0.0, "gradient": 0.0, "history": 0.0}
    for what, got, wanted in parts(one, mine, model, rank):
        found[what] = max(found[what], far(got, wanted))
    return found


def work(rank: int, ranks: int) -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """For each recipe and kind every row that has the law."""
    warnings.simplefilter("ignore")  # that a model without repeated blocks is gathered as one
    cases = [(recipe, kind) for recipe in CHOSEN for kind in KINDS]
    return {case: {row.name: apart(row, *case, rank) for row in under("ranks", case[0])} for case in cases}


@pytest.fixture(scope="module")
def every_rank() -> list[dict]:
    return run(work, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", CHOSEN)
def test_ranks_are_one_process(recipe: str, kind: str, every_rank: list[dict], subtests: pytest.Subtests):
    for name in every_rank[0][recipe, kind]:
        for each in (rank[recipe, kind][name] for rank in every_rank):
            with subtests.test(name):
                if recipe == "current":
                    assert each["y"] < MEASURED
                else:
                    assert (each["y"], each["gradient of x"], each["history"]) == (0, 0, 0)
                    assert each["gradient"] < each["may be"]
