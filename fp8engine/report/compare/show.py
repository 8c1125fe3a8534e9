"""Tables and lines of a comparison for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fp8engine.report.columns import named
from fp8engine.report.compare.result import Comparison, note, order
from fp8engine.report.compare.scores import Estimate
from fp8engine.report.flow.repeats import grouped

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 8  # layers in the table for a terminal, the worst first; casts of a matmul in the line of what auto chose


def table(comparison: Comparison) -> Table:
    """One line a recipe, FP32's first; what the model does not have is left out."""
    from rich.table import Table  # here: importing rich draws from Python's random numbers

    texts = f"{comparison.texts} text{'s' * (comparison.texts != 1)}, {comparison.tokens:,} tokens"
    shown = Table(title=f"{comparison.model} in {comparison.dtype} against FP32: {texts}", title_justify="left")
    rows = [["precision", "loss", "change %", "same top-1 %", "1 - cosine %", "largest", "output dB", "FP8 FLOPs"]]
    rows.append(["fp32", _number(comparison.loss, ".4f"), *["-"] * 6])
    for result in comparison.results:
        apart = None if result.cosine is None else result.cosine.times(-100)
        rows.append(
            [
                result.recipe + " (emulated)" * result.emulated,
                _number(result.loss, ".4f"),
                estimate(comparison.change_percent(result), "+.3f"),
                estimate(None if result.top1 is None else result.top1.times(100), ".2f"),
                estimate(None if apart is None else Estimate(100 + apart.value, apart.error), ".4f"),
                _number(None if result.least_cosine is None else 100 - 100 * result.least_cosine, ".4f"),
                decibels(result.sqnr_db),
                f"{result.fp8_flops_share:.0%}",
            ]
        )
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]  # what this model has
    for heading, *_ in columns:
        shown.add_column(heading, justify="left" if heading == "precision" else "right")
    for row in list(zip(*columns, strict=True))[1:]:
        shown.add_row(*row)
    return shown


def layer_table(comparison: Comparison) -> Table | None:
    """The layers of the lowest own SQNR under any FP8 recipe, and what the others make of them; None without any."""
    from rich.table import Table

    worst: dict[str, float] = {}
    for result in comparison.results:
        for layer in result.worst_first() if result.fp8_flops_share else []:
            worst[layer.name] = min(worst.get(layer.name, math.inf), order(layer.own_sqnr_db))
    if not worst:
        return None
    title = f"the worst {min(SHOWN, len(worst))} of {len(worst)} converted layers, each alone: SQNR in dB"
    shown = Table(title=title, title_justify="left")
    shown.add_column("layer", overflow="fold")
    for heading in ("shape", *(result.recipe for result in comparison.results)):
        shown.add_column(heading, justify="right")
    layers = [{layer.name: layer for layer in result.layers} for result in comparison.results]
    for name in sorted(worst, key=lambda name: worst[name])[:SHOWN]:
        shape = "x".join(map(str, layers[0][name].shape))
        here = [found[name] for found in layers]
        shown.add_row(name, shape, *("-" if each.recipe == "none" else decibels(each.own_sqnr_db) for each in here))
    return shown


def choices(comparison: Comparison) -> list[str]:
    """A line for each recipe that decides: how many layers multiply with which casts, the most frequent first."""
    lines = []
    for result in comparison.results:
        if (made := result.chosen) is None:
            continue
        told = []
        for matmul, count in made["matmuls"].items():
            counted = [f"{cast} {layers}" for cast, layers in count.items()]
            if rest := sum(list(count.values())[SHOWN:]):
                counted[SHOWN:] = [f"others {rest}"]
            told.append(f"{matmul} {', '.join(counted)}")
        told += [f"not sampled {made['not_sampled']}"] * bool(made["not_sampled"])
        share = f"{result.fp8_flops_share:.0%} of linear FLOPs in FP8"
        lines.append(f"{result.recipe} chose, by layers: {'; '.join([*told, share])}")
    return lines


def left_alone(comparison: Comparison) -> list[str]:
    """A line for each reason to leave layers alone: the first of them, how many more, and under which recipes."""
    lines: dict[str, list[str]] = {}
    for result in comparison.results:
        left = grouped((layer.reason, layer.name) for layer in result.layers if layer.recipe == "none")
        for reason, names in left.items():
            lines.setdefault(f"{named(names)}: {reason}", []).append(result.recipe)
    everywhere = len(comparison.results)
    under = {line: "" if len(some) == everywhere else f" under {', '.join(some)}" for line, some in lines.items()}
    return [f"left alone{where}: {line}" for line, where in under.items()]


def decibels(value: float | None) -> str:
    """An SQNR for a table: a number, or why it is none.

    >>> decibels(31.42), decibels(math.inf), decibels(math.nan), decibels(None)
    ('31.4', 'equal', 'not finite', 'not comparable')
    """
    return note(value) or f"{value:.1f}"


def estimate(found: Estimate | None, form: str) -> str:
    """A mean with its standard error for a table; the mean alone where there is no error.

    >>> estimate(Estimate(0.25, 0.0625), "+.2f"), estimate(Estimate(0.25, None), ".2f"), estimate(None, ".2f")
    ('+0.25 ± 0.06', '0.25', '-')
    """
    if found is None or found.error is None or not math.isfinite(found.value):
        return _number(None if found is None else found.value, form)
    return f"{found.value:{form}} ± {found.error:{form.removeprefix('+')}}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}" if math.isfinite(value) else "not finite"
