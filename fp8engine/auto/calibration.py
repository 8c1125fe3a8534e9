"""Calibration at conversion: `auto` decides on one pass of the example inputs, before the first step or answer.

The pass runs in evaluation mode and leaves everything as it was (flow/untouched.py) but the recipes of the layers.  A
model that returns a loss (`.loss`, or "loss" in a dict) runs its backward too, so that gradients are sampled, and the
costs in nats are known; its parameters' gradients are put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fp8engine.auto.controller import Controller
from fp8engine.auto.flow.record import arguments
from fp8engine.auto.flow.untouched import untouched


def calibrate(model: nn.Module, controllers: Sequence[Controller], example_inputs: object) -> None:
    """Decide on `example_inputs`, as fe.convert takes them, for layers under `auto` that repeat no plan."""
    active = [each for each in controllers if each.plan is None and each.state.device.type != "meta"]
    if not active:
        return
    args, kwargs = arguments(example_inputs)
    gradients = [(p, p.grad) for p in model.parameters()]
    loss = None
    with untouched(model):
        for controller in active:
            controller.state.on_step = None
            controller.begin_sampling()
            controller.state.decides_next = True  # forwards without gradients are sampled too
        try:
            with torch.enable_grad():
                loss = loss_of(model(*args, **kwargs))
                if loss is not None:
                    for p, _ in gradients:
                        p.grad = None
                    loss.backward()
        finally:
            for controller in active:
                controller.state.on_step, controller.state.decides_next = controller.begin_step, False
            for p, gradient in gradients:
                p.grad = gradient
    for controller in active:
        controller.calibrate(loss)


def loss_of(result: object) -> torch.Tensor | None:
    """The loss that a model returned, one number that takes a gradient; None for none.

    >>> loss_of({"loss": torch.tensor(2.0, requires_grad=True)})
    tensor(2., requires_grad=True)
    """
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
        return found
    return None
