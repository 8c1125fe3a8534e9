"""`fp8engine inspect`: what `fe.convert` would do to a model, before anything is downloaded, allocated or changed.

The model is a folder with a Hugging Face config.json (built on the meta device: no weights are read), or
module:function, a Python function without arguments that returns one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from fp8engine.cli.shared import AsJson, Debug, app, console, match_skips, print_json
from fp8engine.convert.select import Decision, experts_run
from fp8engine.convert.swap import plan
from fp8engine.errors import ConversionError, InvalidRecipe
from fp8engine.nn.grouped import GroupedLinear


@app.command("inspect")
def command(
    target: Annotated[str, typer.Argument(metavar="MODEL_DIR|MODULE:FUNCTION", help="The model.", show_default=False)],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="For every layer that can.")] = "current",
    skip: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Layers to leave alone; repeatable.")] = None,
    override: Annotated[
        list[str] | None, typer.Option(metavar="GLOB=RECIPE", help="Another recipe for some; repeatable.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what would be converted, what would be left alone, and why."""
    model = load(target)
    decisions = _skipping(plan(model, recipe, overrides=dict(map(_pair, override or []))), skip or [])
    if not decisions:
        raise ConversionError(f"{target}: {type(model).__name__} has no linear layers")
    content = describe(model, decisions)
    if as_json:
        print_json({"model": target, "class": type(model).__name__, **content})
        return
    screen = console()
    screen.print(_table(f"{type(model).__name__} under {recipe}", content["layers"]))
    totals = content["totals"]
    screen.print(
        f"{totals['converted']} of {totals['layers']} linear layers would be converted, "
        f"{totals['fp8_flops_share']:.1%} of their FLOPs in FP8"
    )


def load(target: str) -> nn.Module:
    """The model that a folder or a module:function stands for.  Raises ConversionError, saying what was wrong."""
    if Path(target).is_dir():
        return _from_folder(Path(target))
    module, colon, function = target.partition(":")
    if not colon or not module or not function or "/" in module:
        raise ConversionError(f"{target!r} is neither a folder that exists nor module:function")
    return _from_function(module, function)


def describe(model: nn.Module, decisions: list[Decision]) -> dict:
    """Plain values; a layer's share of the FLOPs is that of the weights that a row passes, the same rows everywhere.

    Of experts, a row passes those that its router chooses: `experts` is [chosen, all], None elsewhere.

    >>> layer = nn.Linear(4, 8)
    >>> describe(layer, plan(layer, "rowwise"))["totals"]
    {'layers': 1, 'converted': 1, 'left_alone': 0, 'fp8_flops_share': 1.0}
    """
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
    fp8 = sum(d.recipe.fp8_share * size for d, size in zip(decisions, sizes, strict=True) if d.recipe) / total
    converted = sum(decision.recipe is not None for decision in decisions)
    totals = {
        "layers": len(layers),
        "converted": converted,
        "left_alone": len(layers) - converted,
        "fp8_flops_share": fp8,
    }
    return {"layers": layers, "totals": totals}


def _experts(decision: Decision, run: dict[int, int]) -> list[int] | None:
    """[how many experts a row passes, how many there are] of a stack of them.

    A GroupedLinear is called with rows that are sent to one expert each.
    """
    if len(decision.shape) != 3:
        return None
    alone = 1 if isinstance(decision.module, GroupedLinear) else decision.shape[0]
    return [run.get(id(decision.module), alone), decision.shape[0]]


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        raise ConversionError(f"{folder} has no config.json: want the folder of a Hugging Face model")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConversionError("reading a model folder needs transformers: pip install 'fp8engine[hf]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        named = [getattr(transformers, name, None) for name in config.architectures or []]
        kind = next((found for found in named if found is not None), None)
        with torch.device("meta"):
            return kind._from_config(config) if kind else transformers.AutoModel.from_config(config)
    except Exception as error:  # whatever transformers raises for a file it cannot use
        raise ConversionError(f"transformers cannot build {folder}: {type(error).__name__}: {error}") from error


def _from_function(module: str, function: str) -> nn.Module:
    name = f"{module}:{function}"
    sys.path.insert(0, "")  # a module in the folder where the command runs, as `python -m` finds it
    try:
        made: Any = importlib.import_module(module)
        for part in function.split("."):
            made = getattr(made, part)
        model = made if isinstance(made, nn.Module) else made()
    except Exception as error:  # the user's code: anything
        raise ConversionError(f"{name} cannot be called: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise ConversionError(f"{name} gave {type(model).__name__}, not an nn.Module")
    return model


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, recipe = text.partition("=")
    if not equals or not pattern:
        raise InvalidRecipe(f"--override {text!r}: want GLOB=RECIPE, such as '*.down=rowwise'")
    return pattern, recipe


def _skipping(decisions: list[Decision], patterns: Iterable[str]) -> list[Decision]:
    """The decisions with these layers left alone as well."""
    names = [decision.name for decision in decisions]
    match_skips(patterns, names)
    for pattern in patterns:
        decisions = [
            dataclasses.replace(decision, recipe=None, reason=f"--skip {pattern}")
            if decision.recipe and fnmatch.fnmatchcase(decision.name, pattern)
            else decision
            for decision in decisions
        ]
    return decisions


def _table(title: str, layers: list[dict]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "kind", "shape", "FLOPs", "recipe", "why"):
        table.add_column(heading, justify="right" if heading == "FLOPs" else "left", overflow="fold")
    for layer in layers:
        shape, recipe = "x".join(map(str, layer["shape"])), layer["recipe"]
        style = None if recipe else "dim"
        table.add_row(
            layer["name"],
            layer["kind"],
            shape,
            f"{layer['flops_share']:.1%}",
            recipe or "-",
            layer["reason"],
            style=style,
        )
    return table
