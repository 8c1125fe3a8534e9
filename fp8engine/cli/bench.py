"""`fp8engine bench gemm | linear | model | predict`: benchmarks of this machine, and predictions without a card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from fp8engine.cli.options import Device, GemmShapes, LinearShapes, Predicted, Result
from fp8engine.cli.shared import Answer, app, command, console, device_named, say, table
from fp8engine.errors import BackendError, ShapeError
from fp8engine.numerics.cards import CARDS, card_named

HELP = "Measure the matmuls, layers and models on this machine; predict without a card."
bench = typer.Typer(no_args_is_help=True, help=HELP)
app.add_typer(bench, name="bench")
ERROR = (
    "the model's error against published measurements, median and worst: matmuls 6 % and 23 %, a layer's speed-up "
    "10 % and 33 % (benchmarks/README.md)"
)


@command("gemm", bench)
def gemm(shapes: GemmShapes = None, device: Device = None, out: Result = None) -> Answer:
    """Every matmul there is here: checked against float64, then timed beside torch's; no ratio for a wrong result."""
    from fp8engine.bench import cases
    from fp8engine.bench.gemm import gemm

    where = device_named(device)
    asked = cases.parse(shapes if shapes is not None else "llm" if where.type == "cuda" else "small")
    return _answer(gemm(asked, where), out)


@command("linear", bench)
def linear_layer(shapes: LinearShapes = None, device: Device = None, out: Result = None) -> Answer:
    """A Linear's forward and backward under every recipe, checked, then timed beside nn.Linear in BF16."""
    from fp8engine.bench import cases, linear

    where = device_named(device)
    return _answer(linear.linear(cases.parse(shapes) if shapes is not None else linear.SHAPES[where.type], where), out)


@command("model", bench)
def model(device: Device = None, out: Result = None) -> Answer:
    """transformers' Llama, BERT and ViT: forward and backward under every recipe, beside BF16's."""
    from fp8engine.bench import models, steps

    where = device_named(device)
    return _answer(steps.steps(models.cases(where), where), out)


@command("predict", bench)
def predict(
    target: Predicted,
    card: Annotated[str, typer.Option(help=f"{', '.join(CARDS)}.")] = "h100-sxm",
    tokens: Annotated[int, typer.Option(min=1, help="Of a step, for a model.")] = 8192,
) -> Answer:
    """Predict the time of linear layers in BF16 and under each recipe; nothing is measured, and no card is needed."""
    from fp8engine.bench import cases
    from fp8engine.bench.predict import of_model, of_shape
    from fp8engine.cli.models import load_sizes

    on = card_named(card)
    if "," in target:
        shapes = cases.parse(target)
        if len(shapes) > 1:
            raise ShapeError(f"{target!r}: want M,N,K of one layer")
        found = of_shape(shapes[0], on)
    else:
        found = of_model(load_sizes(target), tokens, on)
    return Answer({"target": target, **found}, lambda: _tell_prediction(f"{target} on {on.title}", found))


def _answer(result: dict, out: Result) -> Answer:
    """A result for --json and for a person; `out` gets it as JSON."""
    from fp8engine import files

    if out is not None:
        try:
            files.write(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise BackendError(f"cannot write {out}: {error.strerror}") from None
    return Answer(result, lambda: tell(result))


def tell(result: dict) -> None:
    """Print the machine, its limits where they were measured, a line a row, and how we compare with torch."""
    from fp8engine.bench.harness import line

    screen, about = console(), result["machine"]
    say(screen, f"{about['card'] or about['cpu']}, torch {about['torch']}: {result['what']}")
    if most := result.get("limits"):
        rates = "{matmul_16_bits_tflops:.3g} TFLOP/s in 16 bits, {copy_gb_per_s:.4g} GB/s copied".format(**most)
        say(screen, f"measured limits: {rates}")
    say(screen, *map(line, result["rows"]))
    for name, found in result.get("summary", {}).items():
        mean, least = found["geometric_mean"], found["minimum"]
        note = found["note"] if mean is None else f"geometric mean {mean:.3f}, least {least:.3f} of torch's speed"
        say(screen, f"{name}: {note}")


def _tell_prediction(title: str, found: dict) -> None:
    screen = console()
    say(screen, f"{title}: PREDICTED times of a training step, nothing was measured; casts are included")
    same = _same(found["total"])
    screen.print(_layers(found, [recipe for recipe in found["total"]["recipes"] if recipe not in same]))
    say(screen, "predicted the same: " + ", ".join(f"{recipe} as {other}" for recipe, other in same.items()))
    if len(found["rows"]) == 1 and found["rows"][0]["recipes"]:
        screen.print(_matmuls(found["rows"][0]["recipes"]))
    for row in found["rows"]:
        if row["why"]:
            say(screen, f"{row['name']} stays in BF16: {row['why']}")
    say(screen, ERROR)


def _same(total: dict) -> dict[str, str]:
    """Recipes that need no column: {recipe: one that comes before it and takes the same time}."""
    first = {total["bf16_us"]: "BF16"}
    names = {recipe: first.setdefault(found["us"], recipe) for recipe, found in total["recipes"].items()}
    return {recipe: other for recipe, other in names.items() if recipe != other}


def _layers(found: dict, recipes: Sequence[str]):
    """A row for each group of layers, and their sum.  recipes: those with a column."""
    headings = ("layer", "layers", "M x N x K", "BF16", *recipes)
    shown = table("predicted microseconds, and times as fast as BF16", headings, right=headings[1:])
    together = {"name": "[bold]all layers", "count": "", "shape": [], **found["total"]}
    for row in (*found["rows"], together):
        times = ["-"] * (1 + len(recipes))
        if "bf16_us" in row:
            times = [f"{row['bf16_us']:.0f}", *(_cell(row["recipes"].get(recipe)) for recipe in recipes)]
        shown.add_row(row["name"], str(row["count"]), "x".join(map(str, row["shape"])), *times)
    return shown


def _cell(found: dict | None) -> str:
    return "BF16" if found is None else f"{found['us']:.0f}  {found['speedup']:.2f}x"


def _matmuls(recipes: dict):
    """What one layer's time is made of."""
    names = ("forward", "dgrad", "wgrad")
    shown = table("predicted microseconds, and what limits the matmul", ("recipe", *names, "casts"), right=("casts",))
    for recipe, found in recipes.items():
        matmuls = (f"{found['matmuls'][name]['us']:.0f}  {found['matmuls'][name]['limit']}" for name in names)
        shown.add_row(recipe, *matmuls, f"{found['casts_us']:.0f}")
    return shown
