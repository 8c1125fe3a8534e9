"""A short training of a row of scenarios.py, everything that it computes by name, and what differs between two."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from scenarios import TABLE, WIDTH, Scenario
from support import EVERY_FP8_RECIPE, states
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.report.state import controllers_of

STEPS = 4
# Every recipe of the table; a window that forgets within these steps; decisions within them; and no FP8.
RECIPES: dict[str, Recipe] = {
    **{name: resolve(name) for name in EVERY_FP8_RECIPE},
    "short history": fe.delayed(history=2),
    "auto": fe.auto(interval=2),
    "bf16": resolve("bf16"),
}
# What a cast that siblings share counts once, for the first of them, and each of them for itself otherwise.
ONCE = tuple(f"count of {name}" for name in ("sampled", "underflowed", "saturated", "recasts"))
COUNTS = tuple(f"count of {name}" for name in COUNTERS)

Found = dict[str, Any]


def batch(step: int, rows: int = 2) -> torch.Tensor:
    """The input of a step, a leaf; larger from step to step, so that a predicted scale has something to get wrong."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(rows, 12, WIDTH, generator=generator) * 1.7**step).requires_grad_()


def tables(model: nn.Module) -> Found:
    """History, amaxes and scales, and each counter, of every state of a model."""
    found: Found = {}
    for i, state in enumerate(states(model)):
        found[f"history of {i}"] = state.history_HS.clone()
        found[f"amax and scale of {i}"] = state.live_2S.clone()
        found |= {f"count of {name} of {i}": row.clone() for name, row in zip(COUNTERS, state.counts_CS, strict=True)}
    return found


def trained(
    model: Any, steps: Iterable[int] = range(STEPS), call: Callable | None = None, rows: Iterable[int] = ()
) -> Found:
    """Losses and gradients of each of the steps, and the weights, tables and decisions after them.

    call: what computes in the model's place.  rows: of each step's batch; else always the same.
    """
    found: Found = {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step, many in zip(steps, rows or [2] * STEPS, strict=False):
        torch.manual_seed(step)  # dropout draws the same for all
        x = batch(step, many)
        loss = (model if call is None else call)(x).float().square().mean()
        loss.backward()
        found[f"loss of step {step}"] = loss.detach()
        found[f"gradient of x in step {step}"] = x.grad
        for name, p in model.named_parameters():
            found[f"gradient of {name} in step {step}"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}
    found |= tables(model)
    found["decisions"] = [str(line) for controller in controllers_of(model) for line in controller.log]
    return found


def differences(found: Found, wanted: Found, but: tuple[str, ...] = ()) -> list[str]:
    """Names of what is not the same bit for bit.  but: beginnings of names that are not compared."""
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not name.startswith(but) and not _equal(found[name], wanted[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


@functools.cache
def straight(row: Scenario, recipe: str) -> Found:
    """What every law compares with: the row's model as it is, trained without a stop.  Computed once a process."""
    return trained(row.build(RECIPES[recipe]))


def under(law: str, recipe: str) -> Iterator[Scenario]:
    """The rows for which the law holds, of those that have the recipe."""
    return (row for row in TABLE if not {law, f"recipe {recipe}"} & set(row.excludes))
