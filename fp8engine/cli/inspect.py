"""`fp8engine inspect`: the layers that `fe.convert` would convert and those it would not, without reading weights."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import TYPE_CHECKING, Annotated

import typer

from fp8engine.cli.options import All, Model, Skip, recipe_option
from fp8engine.cli.shared import Answer, command, console, match_skips, say, say_columns
from fp8engine.errors import ConversionError, InvalidRecipe

if TYPE_CHECKING:
    from torch import nn

    from fp8engine.convert.select import Decision


@command("inspect")
def run(
    target: Model,
    recipe: Annotated[str, recipe_option("For every layer that can.")] = "auto",
    skip: Skip = None,
    override: Annotated[
        list[str] | None, typer.Option(metavar="GLOB=RECIPE", help="Another recipe for some; repeatable.")
    ] = None,
    every: All = False,
) -> Answer:
    """Show what would be converted, what would be left alone, and why."""
    from fp8engine.cli.models import load_structure
    from fp8engine.convert.swap import plan

    model = load_structure(target)
    decisions = _skipping(plan(model, recipe, overrides=dict(map(_pair, override or []))), skip or [])
    if not decisions:
        raise ConversionError(f"{target}: {type(model).__name__} has no linear layers")
    content = describe(model, decisions)
    kind = type(model).__name__
    return Answer({"model": target, "class": kind, **content}, lambda: _tell(f"{kind} under {recipe}", content, every))


def _tell(title: str, content: dict, every: bool) -> None:
    from fp8engine.report.folded import groups, shape_of

    totals = content["totals"]
    say(
        console(),
        f"{title}: {totals['in_fp8']} of {totals['layers']} linear layers would be in "
        f"FP8, {totals['fp8_flops_share']:.1%} of all their FLOPs",
    )
    converted = [["layer", "kind", "shape", "FLOPs", "recipe", "why"]]
    left = [["left alone", "kind", "shape", "FLOPs", "why"]]
    for name, members in groups(content["layers"], ("kind", "shape", "recipe", "reason"), every):
        recipe, why = members[0]["recipe"], members[0]["reason"]
        row = [name, members[0]["kind"], shape_of(members[0]), f"{sum(each['flops_share'] for each in members):.1%}"]
        if recipe is None:
            left.append([*row, why])
        else:
            converted.append([*row, recipe, why.removeprefix(f"recipe: {recipe}").removeprefix("; ")])
    say_columns(converted, left)


def describe(model: nn.Module, decisions: list[Decision]) -> dict:
    """The decisions as plain values.

    flops_share: of the weights that a row passes, as if every layer saw the same rows.  experts: [chosen, all] of a
    stack of experts, of which a row passes those that its router chooses; None elsewhere.

    >>> from torch import nn
    >>> from fp8engine.convert.swap import plan
    >>> layer = nn.Linear(4, 8)
    >>> describe(layer, plan(layer, "rowwise"))["totals"]
    {'layers': 1, 'converted': 1, 'in_fp8': 1, 'left_alone': 0, 'fp8_flops_share': 1.0}
    """
    from fp8engine.convert.select import experts_run

    run = experts_run(model)
    experts = [_experts(decision, run) for decision in decisions]
    sizes = [
        math.prod(decision.shape[-2:]) * (chosen[0] if chosen else 1)
        for decision, chosen in zip(decisions, experts, strict=True)
    ]
    total = sum(sizes) or 1
    layers = [
        {
            "name": decision.name,
            "kind": type(decision.module).__name__,
            "shape": list(decision.shape),
            "recipe": decision.recipe.name if decision.recipe else None,
            "reason": decision.reason + (f"; {chosen[0]} of {chosen[1]} a token" if chosen else ""),
            "flops_share": size / total,
            "experts": chosen,
        }
        for decision, size, chosen in zip(decisions, sizes, experts, strict=True)
    ]
    recipes = [(decision.recipe, size) for decision, size in zip(decisions, sizes, strict=True) if decision.recipe]
    totals = {
        "layers": len(layers),
        "converted": len(recipes),
        "in_fp8": sum(recipe.is_fp8 for recipe, _ in recipes),
        "left_alone": len(layers) - len(recipes),
        "fp8_flops_share": sum(recipe.fp8_share * size for recipe, size in recipes) / total,
    }
    return {"layers": layers, "totals": totals}


def _experts(decision: Decision, run: dict[int, int]) -> list[int] | None:
    """[how many experts a row passes, how many there are] of a stack of them.

    A GroupedLinear is called with rows that are sent to one expert each.
    """
    from fp8engine.nn.grouped import GroupedLinear

    if len(decision.shape) != 3:
        return None
    default = 1 if isinstance(decision.module, GroupedLinear) else decision.shape[0]
    return [run.get(id(decision.module), default), decision.shape[0]]


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, recipe = text.partition("=")
    if not equals or not pattern:
        raise InvalidRecipe(f"--override {text!r}: want GLOB=RECIPE, such as '*.down=rowwise'")
    return pattern, recipe


def _skipping(decisions: list[Decision], patterns: list[str]) -> list[Decision]:
    """The decisions with these layers left alone as well."""
    match_skips(patterns, [decision.name for decision in decisions])
    for i, decision in enumerate(decisions):
        asked = [pattern for pattern in patterns if fnmatch.fnmatchcase(decision.name, pattern)]
        if decision.recipe and asked:
            decisions[i] = dataclasses.replace(decision, recipe=None, reason=f"--skip {asked[0]}")
    return decisions
