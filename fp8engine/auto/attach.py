"""Attachment of controllers to layers under `auto`: those of fe.convert, and those that were made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from fp8engine.auto.controller import Controller
from fp8engine.auto.log import Plan
from fp8engine.autograd.numerics import Numerics
from fp8engine.errors import InvalidRecipe
from fp8engine.numerics.recipe import Auto
from fp8engine.scaling.table import ScalingState

SAME_FOR_ALL = ("interval", "freeze_after", "plan", "objective", "budget")  # what recipes of one model have to agree on


def attach(layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]], part: bool = True) -> list[Controller]:
    """Give the layers whose recipe is an `Auto` a controller for each of their scaling states; returns these.

    shapes: of the weights.  part: whether these may be some of the layers of the plan that the recipes name.
    Raises InvalidRecipe for recipes that disagree on more than needs, StateError for a plan that is none, or of others.
    """
    each = zip(layers, shapes, strict=True)
    autos = [(numerics, tuple(shape), numerics.recipe) for numerics, shape in each if isinstance(numerics.recipe, Auto)]
    for key in SAME_FOR_ALL:
        if len(found := {getattr(recipe, key) for *_, recipe in autos}) > 1:
            found = ", ".join(sorted(map(str, found)))
            raise InvalidRecipe(f"auto recipes of one model have {key} {found}: give all of them the same")
    plan, path = None, next((recipe.plan for *_, recipe in autos), None)
    if path is not None:
        plan = Plan.load(path)
        plan.check({numerics.name: shape for numerics, shape, _ in autos}, path, part)
    groups: dict[ScalingState, list[tuple[Numerics, tuple[int, ...], Auto]]] = {}
    for one in autos:
        groups.setdefault(one[0].state, []).append(one)
    return [Controller(group, plan) for group in groups.values()]
