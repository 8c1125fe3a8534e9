"""Count of the casts that `auto` chose for the slots of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fp8engine.numerics.recipe import ROLES
from fp8engine.scaling.choice import label

if TYPE_CHECKING:
    from fp8engine.auto import Controller


def chosen(controllers: Iterable[Controller]) -> dict | None:
    """Counts of what was decided; None where nothing was: a fixed recipe, a plan that is repeated.

    slots: how many have each cast, by its label as decisions print it, the most frequent first.
    forward_in_16_bits: layers whose forward is.  not_sampled: layers that have run in no training step.
    """
    slots: Counter[str] = Counter()
    layers = sampled = wide = 0
    for controller in controllers:
        layers += len(controller.layers)
        sampled += len(controller.choices)
        for i, choice in controller.choices.items():
            slots.update(label((i, role), choice) for role in ROLES)
            wide += (i, "forward") not in choice.used
    if not sampled:
        return None
    return {"slots": dict(slots.most_common()), "forward_in_16_bits": wide, "not_sampled": layers - sampled}
