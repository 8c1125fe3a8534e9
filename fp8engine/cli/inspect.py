"""`fp8engine inspect`: the layers that `fe.convert` would convert and those it would not, without reading weights."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import TYPE_CHECKING, Annotated

from fp8engine.cli.options import All, Model, Override, Skip, recipe_option
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
    override: Override = None,
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

    run, layers = experts_run(model), []
    for decision in decisions:
        recipe, passed, chosen, note = decision.recipe, 1, None, ""
        if len(decision.shape) == 3:  # of a stack that is not in `run`, a row is sent to one matrix
            passed = run.get(id(decision.module), 1)
            chosen, note = [passed, decision.shape[0]], f"; {passed} of {decision.shape[0]} a token"
        layers.append(
            {
                "name": decision.name,
                "kind": type(decision.module).__name__,
                "shape": list(decision.shape),
                "recipe": recipe.name if recipe else None,
                "reason": decision.reason + note,
                "flops_share": passed * math.prod(decision.shape[-2:]),
                "experts": chosen,
            }
        )
    total = sum(layer["flops_share"] for layer in layers) or 1
    converted = [(each.recipe, layer) for each, layer in zip(decisions, layers, strict=True) if each.recipe]
    totals = {
        "layers": len(layers),
        "converted": len(converted),
        "in_fp8": sum(recipe.is_fp8 for recipe, _ in converted),
        "left_alone": len(layers) - len(converted),
        "fp8_flops_share": sum(recipe.fp8_share * layer["flops_share"] for recipe, layer in converted) / total,
    }
    for layer in layers:
        layer["flops_share"] /= total
    return {"layers": layers, "totals": totals}


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
