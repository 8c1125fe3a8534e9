"""Attachment of a controller to layers that were made by hand, without fe.convert."""

from __future__ import annotations

from collections.abc import Sequence

from fp8engine.auto.controller import Controller
from fp8engine.auto.log import Plan
from fp8engine.autograd.numerics import Numerics
from fp8engine.numerics.recipe import Auto


def attach(layers: Sequence[Numerics], shapes: Sequence[tuple[int, ...]]) -> None:
    """Give layers made by hand, in one scaling state, a controller if their recipe is an `Auto`.

    Raises StateError for a plan that is none, or is of other layers.
    """
    recipe = layers[0].recipe
    if not isinstance(recipe, Auto):
        return
    plan = None
    if recipe.plan is not None:
        plan = Plan.load(recipe.plan)
        plan.check(
            {numerics.name: tuple(s) for numerics, s in zip(layers, shapes, strict=True)}, recipe.plan, part=True
        )
    Controller(layers, shapes, plan)
