"""What FP8 costs real models: the loss (of MiniLM the embeddings) under each recipe against FP32, paired over windows.

    python benchmarks/real.py smollm2|minilm|rxn [--recipes current rowwise ...] [--windows 16] [--length 512]
                              [--skip-windows 2] [--steps 0] [--rank] [--json]

The first windows (`--skip-windows`) are not evaluated: `auto` takes its statistics from them, and `--rank` its costs.
--steps: AdamW steps before the evaluation, FP32 too, on the windows after the evaluated ones, in the same order.
--rank: 30 % of the FLOPs in BF16, chosen by predicted cost, by SQNR or at random: how much of the loss is recovered?
A recipe is a name of fe.convert's, rowwise_exact, blockwise_exact, or auto_budget (0.5 % of the loss).
No gradients are taken in an evaluation.  FP8 is emulated on a CPU: values are FP8's, times are not.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from common import machine, parser, save
from real_models import LOSS, MODELS, Real, load
from rich.console import Console
from rich.table import Table
from torch import nn

import fp8engine as fe
from fp8engine.numerics.recipe import RECIPES, Recipe, resolve
from fp8engine.ops import casts

DEFAULT = ("current", "delayed", "rowwise", "rowwise_exact", "blockwise", "blockwise_exact", "auto")
BUDGET = 0.005
CALIBRATION = 12  # forward and backward passes; `auto` reads the statistics of one in the next
LEARNING_RATE = 1e-5
SHARE = 0.3  # of the FLOPs of the layers that --rank leaves in 16 bits
SEEDS = (0, 1)


class Paired(NamedTuple):
    """A mean difference and the standard error of that mean, both in hundredths."""

    percent: float
    error: float

    def __str__(self) -> str:
        return f"{self.percent:+.3f} ± {self.error:.3f}"


class Cost(NamedTuple):
    """What a layer's casts per tensor cost on one window: nats of loss predicted, SQNR of its result; its FLOPs."""

    nats: float
    sqnr_db: float
    flops: float


def paired(apart: Sequence[float], scale: float) -> Paired:
    """Mean of the windows' differences, and its standard error (NaN for one window).  scale: what is 100 %."""
    percent = [100 * each / scale for each in apart]
    error = statistics.stdev(percent) / math.sqrt(len(percent)) if len(percent) > 1 else math.nan
    return Paired(statistics.fmean(percent), error)


def chosen(order: Sequence[str], flops: dict[str, float], share: float) -> list[str]:
    """Layers in that order as long as they fit into a share of all FLOPs; one that does not fit is passed over."""
    room, found = share * sum(flops.values()), []
    for name in order:
        if flops[name] <= room:
            found.append(name)
            room -= flops[name]
    return found


def recipe_of(name: str) -> Recipe:
    """The recipe of a name.  Raises SystemExit for auto_budget where fe.auto has no budget."""
    exact = {"rowwise_exact": fe.rowwise, "blockwise_exact": fe.blockwise}
    if name in exact:
        return exact[name](power_of_2=False)
    if name == "auto":
        return fe.auto(interval=1)
    if name == "auto_budget":
        if "budget" not in inspect.signature(fe.auto).parameters:
            raise SystemExit("this version's fe.auto takes no budget")
        options = {"interval": 1, "budget": BUDGET}
        return fe.auto(**options)  # pyright: ignore[reportArgumentType]
    return resolve(name)


def converted(real: Real, recipe: str | None, skipped: int, overrides: dict[str, str] | None = None) -> nn.Module:
    """A copy of the model under a recipe (None: FP32 as it is); `auto` has decided on the first windows."""
    model = copy.deepcopy(real.model)
    if recipe is None:
        return model
    asked = recipe_of(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)
        fe.convert(model, asked, overrides=overrides or {})
    if asked.name == "auto":
        for step in range(CALIBRATION):
            real.loss(model, real.windows[step % skipped]).backward()
            model.zero_grad()
    return model


def train(real: Real, model: nn.Module, windows: Sequence) -> None:
    """One AdamW step a window, in evaluation mode: dropout would draw other numbers under each recipe."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for window in windows:
        real.loss(model, window).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(real: Real, model: nn.Module, windows: Sequence) -> list[torch.Tensor]:
    """The outcome of each window, without gradients."""
    with torch.no_grad():
        return [real.outcome(model, window) for window in windows]


def against(real: Real, found: list[torch.Tensor], base: list[torch.Tensor]) -> tuple[list[float], float]:
    """(by how much each window's outcome differs from FP32's; what is 100 %: FP32's loss, or one)."""
    scale = statistics.fmean(map(float, base)) if real.unit == LOSS else 1.0
    return [float(real.apart(*pair)) for pair in zip(found, base, strict=True)], scale


def fp8_share(model: nn.Module) -> float:
    """Share of the FLOPs of all linear layers, the head among them, that ran in FP8."""
    return fe.inspect(model).totals["fp8_flops_share"]


def recipes(real: Real, names: Sequence[str], options, say: Callable[[str], None]) -> list[dict]:
    """A row for FP32 and for each recipe."""
    first, last = options.skip_windows, options.skip_windows + options.windows
    rows, base = [], []
    for name in (None, *names):
        start = time.monotonic()
        model = converted(real, name, first)
        train(real, model, real.windows[last : last + options.steps])
        found = evaluate(real, model, real.windows[first:last])
        base = base or found
        apart, scale = against(real, found, base)
        rows.append(
            {
                "recipe": name or "fp32",
                "loss": statistics.fmean(map(float, found)) if real.unit == LOSS else None,
                **paired(apart, scale)._asdict(),
                "fp8_flops_share": 0.0 if name is None else fp8_share(model),
                "apart": apart,
            }
        )
        say(f"{rows[-1]['recipe']}: {time.monotonic() - start:.0f} s")
    return rows


def costs(real: Real, window: object) -> dict[str, Cost]:
    """Cost of each layer that fe.convert would convert, from one forward and backward in FP32.

    1/2 T sum (dy error)^2, dy the gradient of the mean of T terms: the diagonal of the empirical Fisher information.
    Input and weight are cast to E4M3 per tensor; a layer that runs several times sums over its calls.
    """
    model = copy.deepcopy(real.model)
    layers = fe.inspect(converted(real, "current", 1)).layers
    converts = {layer["name"] for layer in layers if layer["recipe"] != "none"}
    cast, found = fe.Cast(fe.E4M3), {name: [0.0] * 4 for name in converts}

    def watch(sums: list[float]):
        def forward(layer: nn.Linear, inputs: tuple, y: torch.Tensor) -> None:
            x_MK = inputs[0].detach().flatten(0, -2)
            with torch.no_grad():
                a, b = (casts.quantize(t, cast) for t in (x_MK, layer.weight))
                a_MK, b_NK = (casts.decode(q.data, torch.float32) * q.scale for q in (a, b))
                error = (a_MK @ b_NK.t() - x_MK @ layer.weight.t()).view_as(y)
                sums[1] += float(y.square().sum())
                sums[2] += float(error.square().sum())
            sums[3] += 2.0 * len(x_MK) * layer.weight.numel()

            def backward(dy: torch.Tensor) -> None:
                sums[0] += float((error * dy).square().sum())

            y.register_hook(backward)

        return forward

    for name in converts:
        model.get_submodule(name).register_forward_hook(watch(found[name]))
    mean, terms = real.likelihood(model, window)
    mean.backward()
    return {
        name: Cost(0.5 * terms * squares, 10 * math.log10(signal / noise), flops)
        for name, (squares, signal, noise, flops) in found.items()
        if flops
    }


def rank(real: Real, options, say: Callable[[str], None]) -> tuple[list[dict], dict[str, Cost]]:
    """(a row for each way of choosing what stays in BF16 beside `current`, cost of each layer)."""
    first, last = options.skip_windows, options.skip_windows + options.windows
    windows, measured = real.windows[first:last], costs(real, real.windows[0])
    flops = {name: cost.flops for name, cost in measured.items()}
    names = sorted(measured)
    orders = {
        "none": [],
        "predicted nats": sorted(names, key=lambda name: -measured[name].nats),
        "predicted nats per FLOP": sorted(names, key=lambda name: -measured[name].nats / flops[name]),
        "worst SQNR": sorted(names, key=lambda name: measured[name].sqnr_db),
        **{f"random {seed}": random.Random(seed).sample(names, len(names)) for seed in SEEDS},
    }
    base, rows, everything = evaluate(real, real.model, windows), [], []
    for way, order in orders.items():
        left = chosen(order, flops, SHARE)
        found = evaluate(real, converted(real, "current", first, dict.fromkeys(left, "bf16")), windows)
        apart, scale = against(real, found, base)
        everything = everything or apart
        rows.append(
            {
                "kept in BF16": way,
                "share": sum(flops[name] for name in left) / sum(flops.values()),
                "predicted_nats": sum(cost.nats for name, cost in measured.items() if name not in left),
                "apart": apart,
                **paired(apart, scale)._asdict(),
                "recovered": paired([a - b for a, b in zip(everything, apart, strict=True)], scale)._asdict(),
                "layers": left,
            }
        )
        say(f"{way}: {rows[-1]['percent']:+.3f}")
    return rows, measured


def table(result: dict) -> Table:
    """The result as a table for a terminal."""
    what = f"{result['model']}, {result['windows']} windows; differences in {result['unit']}"
    if result["kind"] == "rank":
        shown = Table("kept in BF16", "of FLOPs", "against fp32", "recovered", "predicted", title=what)
        for row in result["rows"]:
            recovered = Paired(**row["recovered"])
            cells = f"{row['share']:.0%}", str(Paired(row["percent"], row["error"])), str(recovered)
            shown.add_row(row["kept in BF16"], *cells, f"{row['predicted_nats']:.5f}")
        return shown
    shown = Table("recipe", "loss", "against fp32", "linear FLOPs in FP8", title=what)
    for row in result["rows"]:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        apart = "" if row["recipe"] == "fp32" else str(Paired(row["percent"], row["error"]))
        shown.add_row(row["recipe"], loss, apart, f"{row['fp8_flops_share']:.1%}")
    return shown


def main() -> None:
    """Measure, print the table, write the result."""
    options = parser(__doc__)
    options.add_argument("model", choices=MODELS)
    options.add_argument("--recipes", nargs="+", default=DEFAULT, help=f"{', '.join(RECIPES)}, and those above")
    options.add_argument("--windows", type=int, default=16)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--skip-windows", type=int, default=2, help="at least 1")
    options.add_argument("--steps", type=int, default=0)
    options.add_argument("--rank", action="store_true")
    options.add_argument("--json", action="store_true")
    options = options.parse_args()
    if options.skip_windows < 1:
        raise SystemExit("--skip-windows: at least 1, from which `auto` and --rank take their statistics")
    console, err = Console(), Console(stderr=True)
    real = load(options.model, options.length, options.skip_windows + options.windows + options.steps)
    asked = {key: getattr(options, key) for key in ("model", "windows", "length", "skip_windows", "steps")}
    result = {"machine": machine(), "kind": "rank" if options.rank else "recipes", **asked}
    result["unit"] = real.unit
    if options.rank:
        result["rows"], measured = rank(real, options, err.print)
        result["layers"] = {name: cost._asdict() for name, cost in measured.items()}
    else:
        result["rows"] = recipes(real, options.recipes, options, err.print)
    console.print(json.dumps(result) if options.json else table(result))
    what = f"real_{options.model}" + "_rank" * options.rank + f"_{options.steps}_steps" * bool(options.steps)
    err.print(f"written to {save(what, result)}")


if __name__ == "__main__":
    main()
