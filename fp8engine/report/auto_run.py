"""The samples and decisions of `auto` in one run, as plain data copied from its controllers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8engine.auto import Controller
from fp8engine.auto.budget import Spent
from fp8engine.auto.history import Samples, Spread
from fp8engine.auto.log import Plan


@dataclass(frozen=True)
class AutoRun:
    """The samples and decisions up to now; empty where no layer is under `auto`.

    plans: the decisions, a plan for each scaling state.  samples, spreads: by slot.  repeats: the run repeats a plan,
    so nothing is sampled.  lacks_loss: decisions were made under a budget of loss, and no loss was seen.
    failed: what could not be sampled or decided, and why.  spent: what measuring the budget has found.
    """

    plans: tuple[Plan, ...] = ()
    samples: dict[str, Samples] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    repeats: bool = False
    lacks_loss: bool = False
    failed: tuple[str, ...] = ()
    spent: Spent | None = None

    @staticmethod
    def of(controllers: Sequence[Controller]) -> AutoRun:
        """What they hold now: later samples and decisions do not enter it."""
        return AutoRun(
            tuple(each.as_plan() for each in controllers),
            {slot: copy.deepcopy(seen) for each in controllers for slot, seen in each.history.samples.items() if seen},
            {slot: spread for each in controllers for slot, spread in each.history.spreads.items()},
            any(each.plan is not None for each in controllers),
            any(each.recipe.budget is not None and each.loss is None and each.log for each in controllers),
            tuple(told for each in controllers for told in each.failures.told.values()),
            next((each.spent for each in controllers if each.spent is not None), None),
        )
