"""Calibration at conversion: `auto` decides on one pass of the example inputs, before the first step or answer.

The pass runs in evaluation mode and leaves everything as it was (untouched.py) but the recipes of the layers.  A
model that returns a loss (`.loss`, or "loss" in a dict) runs its backward too, so that gradients are sampled, and the
costs in nats are known; no gradient is accumulated, so that hooks on accumulation (an optimizer's) do not run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fp8engine.auto.controller import Controller
from fp8engine.auto.untouched import arguments, untouched
from fp8engine.errors import Fp8EngineError


def calibrate(model: nn.Module, controllers: Sequence[Controller], example_inputs: object) -> None:
    """Decide on `example_inputs`, as fe.convert takes them, for layers under `auto` that repeat no plan.

    Every rank has to get the same inputs: ranks decide together from then on.
    """
    active = [each for each in controllers if each.plan is None and each.state.device.type != "meta"]
    if not active:
        return
    args, kwargs = arguments(example_inputs)
    wanted = [p for p in model.parameters() if p.requires_grad]
    with untouched(model):
        for controller in active:
            controller.begin_sampling()
            controller.state.decides_next = True  # forwards without gradients are sampled too
        with torch.enable_grad():
            loss = loss_of(model(*args, **kwargs))
            loss = loss if loss is not None and loss.requires_grad else None
            if loss is not None and not _run_backward(loss, wanted):
                loss = None
                warnings.warn(
                    "example_inputs calibrate the forward alone: a reentrant checkpoint of the model allows no "
                    "gradient here; use_reentrant=False does",
                    stacklevel=3,
                )
    for controller in active:
        controller.calibrate(loss)


def _run_backward(loss: torch.Tensor, wanted: Sequence[torch.Tensor]) -> bool:
    """Whether the gradients of a loss could be computed: a reentrant checkpoint refuses, or hides the parameters."""
    try:
        return any(found is not None for found in torch.autograd.grad(loss, wanted, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        return False


def loss_of(result: object) -> torch.Tensor | None:
    """The loss that a model returned, one number; None for none.

    >>> loss_of({"loss": torch.tensor(2.0)})
    tensor(2.)
    """
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def number(loss: object, caller: str, error: type[Fp8EngineError]) -> torch.Tensor:
    """A loss that a caller was given, as a tensor without its graph.  Raises `error` for what is not one number.

    >>> number(2.0, "see_loss", Fp8EngineError)
    tensor(2., dtype=torch.float64)
    """
    if not isinstance(loss, torch.Tensor):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            loss = torch.as_tensor(loss, dtype=torch.float64)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach()
    what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
    raise error(f"{caller}: a loss of {what}; want one number, the mean over tokens")
