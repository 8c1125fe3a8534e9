"""fe.distributed.fsdp beside fully_shard with its gather in high precision: equal bit for bit? how many bytes?

Every case trains the same model twice on the same data, and compares all losses and all weights of the last step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.distributed.fsdp import GATHER
from fp8engine.distributed.traffic import Traffic
from fp8engine.nn.linear import float8_modules
from fp8engine.report.state import controllers_of

RECIPES = ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "auto")
EVEN, ODD = (128, 512), (129, 333)
STEPS, ROWS = 4, 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """One comparison.  size: features outside and inside a block.  prepare: what is done to each block before.

    schedule: of the microbatches of an optimizer step: "each" reduces its own gradients, "no sync" the last one those
    of all, "pipeline" too, with all forwards before the first backward, and "one loss" has one backward for all.
    """

    recipe: str | fe.Recipe
    option: str = "plain"
    size: tuple[int, int] = EVEN
    sharding: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], nn.Module] | None = None
    compiled: bool = False
    microbatches: int = 1
    schedule: str = "each"
    replicas: int = 1
    dtype: torch.dtype = torch.float32


class Block(nn.Module):
    """Norm and MLP beside a residual."""

    def __init__(self, outside: int, inside: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(outside), nn.Linear(outside, inside), nn.Linear(inside, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks, and a converted layer that the root owns."""

    def __init__(self, outside: int, inside: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(outside, inside) for _ in range(3))
        self.last = nn.Linear(outside, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "odd sizes": {"size": ODD},
    "checkpointed": {"prepare": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)},
    "checkpointed, reentrant": {
        "prepare": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    },
    "3 microbatches": {"microbatches": 3},
    "no sync": {"microbatches": 3, "schedule": "no sync"},
    "two forwards": {"microbatches": 2, "schedule": "one loss"},
    "pipeline": {"microbatches": 3, "schedule": "pipeline"},
    "bf16 policy": {"sharding": {"mp_policy": BF16}, "size": ODD},
    "bf16 parameters": {"dtype": torch.bfloat16},
    "CPU offload": {"sharding": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "no reshard": {"sharding": {"reshard_after_forward": False}},
    "HSDP": {"replicas": 2},
    "compiled": {"compiled": True},
    "compiled, checkpointed": {"compiled": True, "prepare": functools.partial(checkpoint_wrapper)},
}


def train(case: Case, fp8: bool, rank: int, ranks: int) -> dict:
    """Losses of this rank, the bytes that its last step sends, and the whole weights after it.

    The last, because Dynamo leaves a block in eager code for good that was called under a mode such as Traffic, and
    then compiles 100 pieces of what the block calls.  graphs: how many it made of the blocks.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = Net(*case.size).to(case.dtype)
    fe.convert(model, case.recipe, skip=lambda name, module: False)
    blocks = [case.prepare(block) if case.prepare else block for block in model.blocks]
    model.blocks = nn.ModuleList(blocks)
    if case.compiled:
        for block in blocks:
            block.compile(backend="aot_eager")
    names = ("replicas", "shards")
    shape = (case.replicas, ranks // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = mesh if case.replicas > 1 else mesh["shards"]
    if fp8:
        fe.distributed.fsdp(model, mesh=mesh, **case.sharding)
    else:
        for block in blocks:
            fully_shard(block, mesh=mesh, **case.sharding)
        fully_shard(model, mesh=mesh, **case.sharding)
        fe.distributed.reduce_amax(model)
        decide_between_steps(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    traffic, losses = Traffic(), []
    for step in range(STEPS):
        with traffic if step == STEPS - 1 else torch.enable_grad():
            losses += _accumulate(model, case, 1000 * step + rank)
        optimizer.step()
        optimizer.zero_grad()
        if not fp8:
            fe.weights_changed(model)
    joins = vars(model)[GATHER].scales.joins if fp8 else 0
    weights = [cast(DTensor, parameter).full_tensor() for parameter in model.parameters()]
    found = {"losses": losses, "traffic": traffic, "weights": weights, "joins": joins}
    changes = sum(len(controller.log) for controller in controllers_of(model))
    return found | {"graphs": counters["stats"]["unique_graphs"], "changes": changes}


def _accumulate(model: Any, case: Case, seed: int) -> list[float]:
    """Gradients of one optimizer step; its losses."""
    losses = []

    def forward(i: int) -> torch.Tensor:
        x, y = _batch(case, seed + 100 * i)
        losses.append((model(x).float() - y.float()).square().mean())
        return losses[-1]

    def backward(i: int, loss: torch.Tensor) -> None:
        model.set_requires_gradient_sync(case.schedule == "each" or i == case.microbatches - 1)
        loss.backward()

    if case.schedule in ("pipeline", "one loss"):
        made = [forward(i) for i in range(case.microbatches)]
        if case.schedule == "one loss":
            sum(made[1:], made[0]).backward()
        else:
            for i, loss in enumerate(made):
                backward(i, loss)
    else:
        for i in range(case.microbatches):
            backward(i, forward(i))
    return [loss.item() for loss in losses]


def decide_between_steps(model: nn.Module) -> None:
    """auto decides in the same forwards under fully_shard's gather as under ours, which waits for the optimizer."""
    for state in {id(layer.numerics.state): layer.numerics.state for layer in float8_modules(model)}.values():
        model.register_forward_hook(lambda *_, state=state: setattr(state, "trained", state.optimizer_steps))


def _batch(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, case.size[0], generator=make).to(case.dtype) for _ in range(2))
    return x, y


def compare(rank: int, ranks: int, cases: list[Case]) -> list[dict]:
    """One row for each case; what `run` calls on every rank."""
    warnings.simplefilter("ignore")
    rows = []
    for case in cases:
        plain, ours = (train(case, fp8, rank, ranks) for fp8 in (False, True))
        weights = [float((a - b).abs().max()) for a, b in zip(plain["weights"], ours["weights"], strict=True)]
        gathers = plain["traffic"].total("all-gather"), ours["traffic"].total("all-gather")
        losses = [abs(a - b) for a, b in zip(plain["losses"], ours["losses"], strict=True)]
        apart = tuple(torch.tensor(each, dtype=torch.float64).max().item() for each in (losses, weights))  # NaN stays
        itemsize = 2 if case.dtype == torch.bfloat16 or "mp_policy" in case.sharding else 4
        rows.append(
            {
                "part": "fsdp",
                "recipe": case.recipe,
                "ranks": ranks,
                "option": case.option,
                "equal": not any(apart),
                "apart": apart,
                "against": "fully_shard, gather in high precision",
                "bytes_share": gathers[1] / (gathers[0] * 2 / itemsize),
                "error": f"losses {apart[0]:.1e}, weights {apart[1]:.1e} apart" if any(apart) else "",
                "note": f"{ours['joins']} amax all-reduces in {STEPS * case.microbatches} forwards",
                "losses": ours["losses"],
                "graphs": ours["graphs"],
                "changes": ours["changes"],
            }
        )
    return rows


def cases(ranks: int, recipes=RECIPES) -> list[Case]:
    """Every recipe plain; every option under two recipes, one of them with a scale per tensor."""
    sizes = {"plain": EVEN, "odd sizes": ODD}
    found = [Case(recipe, option, size) for recipe in recipes for option, size in sizes.items()]
    for option, changes in OPTIONS.items():
        if option != "odd sizes" and (option != "HSDP" or ranks == 4):
            found += [Case(recipe, option, **changes) for recipe in ("delayed", "rowwise")]
    return found


def rows() -> list[dict]:
    """The table of this part."""
    found = []
    for ranks in (2, 4):
        found += run(compare, ranks, cases(ranks))[0]
    return found


if __name__ == "__main__":
    for row in rows():
        print({key: row[key] for key in row if key not in ("losses", "graphs", "changes", "against", "part")})
