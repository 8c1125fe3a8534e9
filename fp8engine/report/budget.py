"""fe.keep_budget, which measures what the casts cost the loss, and brings that within the budget of `auto`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8engine.auto import measured
from fp8engine.auto.budget import Spent
from fp8engine.errors import BudgetWarning, StateError
from fp8engine.report.state import controllers_of, float8_layers


def keep_budget(
    model: nn.Module, batches: Sequence, loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
) -> Spent:
    """Measure what FP8 costs the loss, and decide so that it stays within `fe.auto(budget=...)`; returns what it found.

    model: converted under `fe.auto` with a budget, and calibrated (`example_inputs`) or trained for some steps.
    batches: at least 4, text like that which the model will see.  Every second one decides, the others check: the
    standard error of what is promised falls with the square root of their number, and a budget that is smaller than
    that leaves hardly anything in FP8.  loss(model, batch): a mean in nats; without it a batch is the model's
    arguments, a tuple or a dict, and the model returns `.loss`.

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
    float8_layers(model, "keep_budget")
    controllers = controllers_of(model)
    if not controllers or any(each.plan is not None for each in controllers):
        what = "the model repeats a plan" if controllers else "no layer is under `auto`"
        raise StateError(f"keep_budget: {what}; fe.convert(model, fe.auto(budget=0.005))")
    if any(each.state.must_wait for each in controllers):
        raise StateError("keep_budget: weights are gathered as FP8 codes of this step; call it after optimizer.step()")
    spent = measured.keep(controllers, model, batches, loss)
    if not spent.kept:
        message = (
            f"keep_budget: {spent}; layers whose costs are not known stay as they were: train or calibrate on more"
        )
        warnings.warn(message, BudgetWarning, stacklevel=2)
    return spent
