"""`fp8engine bench predict`: predicted times of linear layers in BF16 and under each recipe, without a card."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fp8engine.cli.bench import bench
from fp8engine.cli.options import CARDS, LLAMAS
from fp8engine.cli.shared import Answer, command, console, say, table
from fp8engine.errors import ShapeError

ERROR = "the model's median error against published measurements is 8 %, the largest 50 % (docs/performance.md)"


@command("predict", bench)
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_DIR|MODULE:FUNCTION|LLAMA|M,N,K",
            help=f"A model, or {', '.join(LLAMAS)}, or the sizes of one layer.",
            show_default=False,
        ),
    ],
    card: Annotated[str, typer.Option(help=f"{', '.join(CARDS)}.")] = "h100-sxm",
    tokens: Annotated[int, typer.Option(min=1, help="Of a step, for a model.")] = 8192,
) -> Answer:
    """Predict the time of linear layers in BF16 and under each recipe; nothing is measured, and no card is needed."""
    from fp8engine.bench import cases, predict
    from fp8engine.cli.models import load_sizes
    from fp8engine.numerics.cards import card_named

    on = card_named(card)
    if "," in target:
        shapes = cases.parse(target)
        if len(shapes) > 1:
            raise ShapeError(f"{target!r}: want M,N,K of one layer")
        found = predict.of_shape(shapes[0], on)
    else:
        found = predict.of_model(load_sizes(target), tokens, on)
    return Answer({"target": target, **found}, lambda: _tell(f"{target} on {on.title}", found))


def _tell(title: str, found: dict[str, Any]) -> None:
    screen = console()
    say(screen, f"{title}: PREDICTED times of a training step, nothing was measured; casts are included")
    screen.print(_layers(found))
    if len(found["rows"]) == 1 and found["rows"][0]["recipes"]:
        screen.print(_matmuls(found["rows"][0]["recipes"]))
    for row in found["rows"]:
        if row["why"]:
            say(screen, f"{row['name']} stays in BF16: {row['why']}")
    say(screen, ERROR)


def _layers(found: dict[str, Any]):
    """A row for each group of layers, and their sum."""
    sums = found["total"]["recipes"]
    headings = ("layer", "layers", "M x N x K", "BF16", *sums)
    shown = table("predicted microseconds, and times as fast as BF16", headings, right=headings[1:])
    for row in found["rows"]:
        cells = [row["name"], str(row["count"]), "x".join(map(str, row["shape"]))]
        if "bf16_us" not in row:
            shown.add_row(*cells, *["-"] * (1 + len(sums)))
            continue
        recipes = [_cell(row["recipes"].get(recipe)) for recipe in sums]
        shown.add_row(*cells, f"{row['bf16_us']:.0f}", *recipes)
    bf16 = f"{found['total']['bf16_us']:.0f}"
    shown.add_row("all layers", "", "", bf16, *map(_cell, sums.values()), style="bold")
    return shown


def _cell(found: dict[str, Any] | None) -> str:
    return "BF16" if found is None else f"{found['us']:.0f}  {found['speedup']:.2f}x"


def _matmuls(recipes: dict[str, Any]):
    """What one layer's time is made of."""
    names = ("forward", "dgrad", "wgrad")
    shown = table("predicted microseconds, and what limits the matmul", ("recipe", *names, "casts"), right=("casts",))
    for recipe, found in recipes.items():
        matmuls = (f"{found['matmuls'][name]['us']:.0f}  {found['matmuls'][name]['limit']}" for name in names)
        shown.add_row(recipe, *matmuls, f"{found['casts_us']:.0f}")
    return shown
