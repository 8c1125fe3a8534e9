"""Budget of loss that is measured: predicted costs say which casts give way first, paired losses say how many have to.

    cost of a batch = loss as the layers are now - loss with every forward of theirs in 16 bits

`keep` looks for the largest sum of predicted costs under which the measured cost is within the budget, on every second
batch, and checks the result on the batches between, lowering the sum where it fails.  Within: the mean over batches
and T90 standard errors of it, which a true cost exceeds in one of ten cases; a little more often after a check that
failed, as the same batches check again.  Gradients' casts stay as they are: they change no loss of one forward.

`InTraining` does so in a training that has no text to calibrate on, with its own latest batches.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine._torch import tree_map
from fp8engine.auto import budget
from fp8engine.auto.between import Between
from fp8engine.auto.budget import Spent
from fp8engine.auto.calibration import loss_of, number
from fp8engine.auto.controller import Controller
from fp8engine.auto.untouched import arguments, untouched
from fp8engine.errors import BudgetWarning, StateError
from fp8engine.ops import ranks
from fp8engine.scaling.choice import Choice

LossOf = Callable[[nn.Module, Any], torch.Tensor | float]
LEAST = 4  # batches: two that decide and two that check
TRIES, CHECKS = 8, 4  # sums of predicted costs that are measured; that are checked
NEAR = 1.2  # a sum that fits and one that does not, so close that no other is worth a try between them
STEP = 8.0  # by which a try differs from the one before, at most
BELOW = 0.9  # of what measured costs would allow is tried next
AGAIN = 4  # times as long a training is measured again
log = logging.getLogger(__name__)


class Cost(NamedTuple):
    """A measured cost in nats: its mean over batches, and the standard error of that."""

    nats: float
    error: float
    batches: int

    @property
    def bound(self) -> float:
        """What the true cost is below in nine of ten cases: Student's t, whose quantile T90 has a closed form for two
        batches and is expanded about the normal one for more (Abramowitz and Stegun, 26.7.5; 2 % off for three).

        >>> round(Cost(0.0, 1.0, 2).bound, 3), round(Cost(0.0, 1.0, 9).bound, 3)
        (3.078, 1.396)
        """
        z, n = statistics.NormalDist().inv_cdf(0.9), self.batches - 1
        t90 = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        return self.nats + (math.tan(0.4 * math.pi) if n == 1 else t90) * self.error


def keep(controllers: Sequence[Controller], model: nn.Module, batches: Iterable, loss: LossOf | None) -> Spent:
    """Bring the measured cost of all forward casts within the budget; everything but the recipes stays as it was.

    loss(model, batch): one number, a mean in nats; None: the batch is the model's arguments, whose result has `.loss`.
    Raises StateError for what cannot be measured.
    """
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise StateError(f"keep_budget: batches={type(batches).__name__}; want a list of batches, or a DataLoader")
    if len(batches := list(batches)) < LEAST:
        raise StateError(f"keep_budget: {len(batches)} batches; want at least {LEAST}: half of them decide, half check")
    trial = _Trial(controllers, model, loss or (lambda model, batch: own_loss(model, *arguments(batch))))
    with untouched(model), trial.alone():
        base = trial.losses(None, batches)
        mean = statistics.fmean(base)
        nats = trial.share * mean
        if not nats > 0:
            raise StateError(f"keep_budget: the loss is {mean:g} nats; a budget is a share of a loss above 0")
        allowed = search(lambda each: trial.cost(each, batches[::2], base[::2]).bound, trial.whole, nats)
        for left in reversed(range(CHECKS)):
            cost = trial.cost(allowed, batches[1::2], base[1::2])
            if cost.bound <= nats or not allowed:
                break
            allowed = lower(allowed, cost.bound, nats) if left > 1 else 0.0
    predicted = trial.settle(allowed, cost, nats)
    if allowed == trial.whole:  # nothing is paid for, and may be until predictions have grown
        allowed *= max(1.0, min(BELOW * nats / max(cost.bound, nats / STEP), STEP))
    spent = Spent(0.0, trial.share, mean, predicted, cost.nats, cost.error, cost.bound, cost.batches, trial.rows)
    for controller, part in zip(controllers, trial.costs, strict=True):
        controller.spent = spent._replace(rate=allowed / mean * part / trial.whole)
    return spent._replace(rate=allowed / mean)


def search(bound: Callable[[float], float], whole: float, nats: float) -> float:
    """The largest sum of predicted costs, of at most `whole`, whose measured `bound` is within `nats`; 0 if none is.

    >>> tried = []
    >>> found = search(lambda sum: tried.append(sum) or 0.4 * sum, whole=10.0, nats=1.0)
    >>> 2.0 < found <= 2.5, len(tried) <= TRIES
    (True, True)
    """
    fits, fails, allowed = 0.0, math.inf, whole
    for _ in range(TRIES):
        measured = bound(allowed)
        if measured <= nats:
            fits = allowed
        else:
            fails = allowed
        if fits == whole or fails <= NEAR * fits:
            break
        allowed = math.sqrt(fits * fails) if fits else lower(allowed, measured, nats)
    return fits


def lower(allowed: float, measured: float, nats: float) -> float:
    """The next smaller sum to try, where one of `allowed` was measured to cost more than `nats`."""
    return allowed * max(BELOW * nats / measured, 1 / STEP)


class _Trial:
    """The layers of all controllers under sums of predicted costs, and the losses there.

    share: the budget.  whole: the predicted cost where it pays for nothing.  rows: of the largest inputs of a pass.
    """

    def __init__(self, controllers: Sequence[Controller], model: nn.Module, loss: LossOf):
        self.controllers, self.model, self.loss = controllers, model, loss
        self.share = next((each.recipe.budget for each in controllers if each.recipe.budget is not None), 0.0)
        self.bare = [[replace(choice, paid={}) for choice in each.groups()] for each in controllers]
        self.costs = [budget.all_costs(bare, each.reads) for each, bare in zip(controllers, self.bare, strict=True)]
        self.whole, self.rows = sum(self.costs), 0
        if not self.share or not self.whole:
            raise StateError(
                "keep_budget: "
                + ("no predicted cost is known: " if self.share else "no layer has a budget: ")
                + "fe.convert(model, fe.auto(budget=...), example_inputs=...) of a model that returns its loss gives "
                "both, or some training steps with fe.scaling_state(model).see_loss(loss)"
            )

    def choices(self, allowed: float | None) -> Iterator[tuple[Controller, list[Choice]]]:
        """Each controller with its choices under a sum of predicted costs; None: every forward in 16 bits."""
        for controller, bare, cost in zip(self.controllers, self.bare, self.costs, strict=True):
            if allowed is None:
                yield controller, [replace(each, paid=dict.fromkeys(budget.forwards_in_fp8(each))) for each in bare]
            else:
                nats = allowed * cost / self.whole
                yield controller, budget.spend(bare, controller.reads, controller.flops, nats)

    def losses(self, allowed: float | None, batches: Sequence) -> list[float]:
        """The loss of each batch; of several ranks, the first rank's."""
        for controller, choices in self.choices(allowed):
            for choice in choices:
                for i in choice.layers:
                    controller.layers[i].adopt(controller.recipe_under(choice, i))
        found, self.rows = [], 0
        for batch in batches:
            loss = number(self.loss(self.model, batch), "keep_budget", StateError)
            # As a copy: the next batch's loss may be written to the same memory.
            found.append(loss.to(self.controllers[0].state.device, torch.float64, copy=True).reshape(()))
            self.rows += max((n.sizes[0] for each in self.controllers for n in each.layers if n.sizes), default=0)
        losses = torch.stack(found)
        ranks.as_first(losses)
        if not losses.isfinite().all():
            raise StateError(f"keep_budget: the losses of the batches are {losses.tolist()}; they have to be finite")
        return losses.tolist()

    def cost(self, allowed: float, batches: Sequence, base: Sequence[float]) -> Cost:
        """What the casts cost on batches whose losses in 16 bits are `base`."""
        apart = [a - b for a, b in zip(self.losses(allowed, batches), base, strict=True)]
        return Cost(statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart)), len(apart))

    def settle(self, allowed: float, cost: Cost, nats: float) -> float:
        """Adopt the choices under a sum of predicted costs, and log the changes; returns what is predicted of them."""
        why = f"measured: the casts cost {1e3 * cost.nats:.2g} +- {1e3 * cost.error:.2g} millinats of {1e3 * nats:.3g}"
        predicted = 0.0
        for controller, choices in self.choices(allowed):
            controller.settle(choices, why)
            predicted += budget.all_costs(choices, controller.reads)
        return predicted

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it nothing is sampled; then each layer has the recipe that it had."""
        recipes = [(numerics, numerics.recipe) for each in self.controllers for numerics in each.layers]
        samples = [(each.state, each.state.samples) for each in self.controllers]
        for state, _ in samples:
            state.sample(None)
        try:
            yield
        finally:
            for numerics, recipe in recipes:
                numerics.adopt(recipe)
            for state, sampled in samples:
                state.sample(sampled)


class InTraining:
    """A forward pre-hook of the model that keeps its training batches and, when it is due, measures on them.

    Between two optimizer steps the latest batches run as `keep` says: first when as many as wanted are kept, then
    whenever the training is AGAIN times as long, so that its share of the training's time falls.

    kept: of the last steps before `due`, (args, kwargs) of the first forward after an optimizer step.  steps: of the
    optimizer.  due: the step before which is measured next.  seconds: what measuring has taken so far.
    """

    def __init__(self, controllers: Sequence[Controller], batches: int):
        self.controllers, self.between = controllers, Between()
        self.kept: deque[tuple[tuple, dict[str, Any]]] = deque(maxlen=batches)
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
            spent = keep(self.controllers, model, list(self.kept), lambda model, batch: own_loss(model, *batch))
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


def own_loss(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The loss that a model returns.  Raises StateError where it returns none."""
    found = loss_of(model(*args, **kwargs))
    if found is None:
        raise StateError(
            "keep_budget: the model returns no loss of one number (.loss); give loss=lambda model, batch: ..."
        )
    return found
