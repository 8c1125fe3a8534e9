"""The budget of loss kept in a training that has no text to calibrate on: its own latest batches are measured.

Between two optimizer steps the latest batches run as measured.py says, with the casts and with all forwards in 16 bits,
and layers are moved until the cost is within the budget.  So it is done as soon as that many batches are kept and costs
are predicted, and again whenever the training is AGAIN times as long: 2 to 9 evaluation forwards a batch each time, a
share of the training's time that falls.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8engine._torch import tree_map
from fp8engine.auto import measured
from fp8engine.auto.between import Between
from fp8engine.auto.controller import Controller
from fp8engine.errors import BudgetWarning, StateError

AGAIN = 4
log = logging.getLogger(__name__)


class InTraining:
    """A forward pre-hook of the model that keeps its training batches and, when it is due, measures.

    kept: of the last steps before `due`, (args, kwargs) of the first forward after an optimizer step.  steps: of the
    optimizer.  due: the step before which is measured next.  seconds: what measuring has taken so far.
    """

    def __init__(self, controllers: Sequence[Controller], batches: int):
        self.controllers, self.between = controllers, Between()
        self.kept: deque[tuple[Any, Any]] = deque(maxlen=batches)
        self.steps, self.due, self.seconds = 0, batches + 1, 0.0

    def __call__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        state = self.controllers[0].state
        if not self.steps or self.between.opens(state, state.backward_seen):
            self.steps += 1
            if self.steps >= self.due and not any(each.state.must_wait for each in self.controllers):
                self._measure(model)
                self.kept.clear()
            if self.due - self.steps <= (self.kept.maxlen or 0):
                # As copies: a loader may fill the same memory again.
                self.kept.append(tree_map(_copied, (args, kwargs)))
        self.between.note(state, True)

    def _measure(self, model: nn.Module) -> None:
        began, self.due = time.monotonic(), AGAIN * self.steps
        try:
            spent = measured.keep(self.controllers, model, list(self.kept), _loss)
        except StateError as error:
            warnings.warn(f"{error}; measured again at step {self.due} of this training", BudgetWarning, stacklevel=4)
            return
        took = time.monotonic() - began
        self.seconds += took
        log.warning("measured at step %d in %.1f s, %.1f s so far: %s", self.steps, took, self.seconds, spent)
        if not spent.kept:
            warnings.warn(f"keep_budget: {spent}", BudgetWarning, stacklevel=4)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _loss(model: nn.Module, batch: tuple[tuple, dict[str, Any]]) -> torch.Tensor:
    args, kwargs = batch
    return measured.returned(model(*args, **kwargs))
