"""fe.keep_budget, which measures what the casts cost the loss, and brings that within the budget of `auto`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fp8engine.auto import measured
from fp8engine.auto.budget import Spent
from fp8engine.auto.controller import Controller
from fp8engine.errors import BudgetWarning, StateError
from fp8engine.report.state import StateView


def keep_budget(
    model: nn.Module, batches: Iterable, loss: Callable[[nn.Module, Any], torch.Tensor | float] | None = None
) -> Spent:
    """Measure what FP8 costs the loss, and decide so that it stays within `fe.auto(budget=...)`; returns what it found.

    model: converted under `fe.auto` with a budget, and calibrated (`example_inputs`) or trained for some steps.
    batches: at least 4, text like that which the model will see; a list, or a DataLoader, whose batches are all held.
    Every second one decides, the others check: the standard error of what is promised falls with the square root of
    their number, and a budget that is smaller than that leaves hardly anything in FP8.  loss(model, batch): a mean in
    nats; without it a batch is the model's arguments, a tuple or a dict, and the model returns `.loss`.

    It runs 2 to 9 evaluation forwards a batch, without gradients.  The model, its scales and its mode stay as they
    were; its forward casts change at once, so call it between two steps of the optimizer.  The log has each change.
    A BudgetWarning says where the budget is not kept.
    In later samples predicted costs are multiplied by what was measured.  On several ranks all call it, with as many
    batches each; the first rank's losses decide.
    Raises StateError: no budget, no predicted costs, too few batches, no loss, a loss that is not finite, a plan.

    >>> import warnings, fp8engine as fe
    >>> net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> loss = lambda model, x: (model(x) - x).square().mean()
    >>> batches = [torch.randn(32, 64) for _ in range(8)]
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     _ = fe.convert(net, fe.auto(budget=0.01))
    >>> for x in batches[:3]:
    ...     now = loss(net, x)
    ...     fe.scaling_state(net).see_loss(now)
    ...     now.backward()
    ...     net.zero_grad()
    >>> spent = keep_budget(net, batches, loss)
    >>> spent.kept, spent.batches, spent.tokens
    (True, 4, 128)
    """
    controllers = _controllers(model, "keep_budget")
    if any(each.state.must_wait for each in controllers):
        raise StateError("keep_budget: weights are gathered as FP8 codes of this step; call it after optimizer.step()")
    spent = measured.keep(controllers, model, batches, loss)
    if not spent.kept:
        why = "layers whose costs are not known stay as they were: train or calibrate on more"
        warnings.warn(f"keep_budget: {spent}; {why}", BudgetWarning, stacklevel=2)
    return spent


def keep_budget_in_training(model: nn.Module, batches: int = 8) -> RemovableHandle:
    """Keep `fe.auto(budget=...)` in a training by measuring it on the training's own batches; returns a hook's handle.

    model: converted under `fe.auto` with a budget; the module that the training calls, which returns its `.loss`, a
    mean in nats.  batches: as many of the latest are kept, as copies on their device, and measured: at least 4.

    As `keep_budget` on these batches: half of them decide, half check.  It is done between two optimizer steps, first
    when `batches` have been trained on, then whenever the training is four times as long: before steps 9, 36, 144, ...
    for 8 batches.  Each time it takes 2 to 9 evaluation forwards a batch; the log (`logging`) says how many seconds it
    took, and what was found.  A BudgetWarning says where the budget is not kept, or could not be measured.
    A run that is resumed calls it again, and begins to count anew.  `handle.remove()` ends it.  Of a model that
    torch.compile compiles as a whole nothing is measured, as nothing of it is sampled.
    Raises StateError: no budget, a plan, a number of batches that is no whole one of 4 or more.
    """
    controllers = _controllers(model, "keep_budget_in_training")
    if not isinstance(batches, int) or batches < measured.LEAST:
        raise StateError(f"keep_budget_in_training: batches={batches!r}; want a whole number from {measured.LEAST} on")
    if all(each.recipe.budget is None for each in controllers):
        raise StateError("keep_budget_in_training: no layer has a budget; fe.convert(model, fe.auto(budget=0.005))")
    return model.register_forward_pre_hook(measured.InTraining(controllers, batches), prepend=True, with_kwargs=True)


def _controllers(model: nn.Module, caller: str) -> list[Controller]:
    """Those of a model under `auto`.  Raises StateError where there is none, or one that repeats a plan."""
    controllers = StateView(model, caller).controllers
    if not controllers or any(each.plan is not None for each in controllers):
        what = "the model repeats a plan" if controllers else "no layer is under `auto`"
        raise StateError(f"{caller}: {what}; fe.convert(model, fe.auto(budget=0.005))")
    return controllers
