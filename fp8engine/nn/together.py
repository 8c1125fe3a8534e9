"""Numerics of layers that are converted together: on each device they share one scaling state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8engine.autograd import Numerics
from fp8engine.numerics.recipe import Recipe
from fp8engine.scaling.table import ScalingState


def numerics_together(layers: Sequence[tuple[str, Recipe, torch.device]]) -> tuple[list[Numerics], list[ScalingState]]:
    """(the numerics of each layer, in their order; the scaling states).  layers: name, recipe and device of each.

    >>> from fp8engine.numerics.recipe import current
    >>> made, (state,) = numerics_together([(name, current(), torch.device("cpu")) for name in ("up", "down")])
    >>> [(numerics.name, numerics.layer, numerics.state is state) for numerics in made]
    [('up', 0, True), ('down', 1, True)]
    """
    by_device: dict[torch.device, list[tuple[str, Recipe]]] = {}
    for name, recipe, where in layers:
        by_device.setdefault(where, []).append((name, recipe))
    states = {where: ScalingState(group, where) for where, group in by_device.items()}
    places = {where: iter(range(len(group))) for where, group in by_device.items()}
    made = [Numerics(name or "Linear", recipe, states[where], next(places[where])) for name, recipe, where in layers]
    return made, list(states.values())
