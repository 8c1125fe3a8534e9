"""Tables of a comparison for a terminal, and its picture for a file."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from fp8engine.report.compare.result import Comparison, RecipeResult, note

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 8  # layers in the table for a terminal, the worst first; casts in the line of what auto chose
# Okabe-Ito, told apart by colour-blind readers; in the order of the recipes asked for.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#7f8c9b", "#1b1b1b")
FAINT = "#d9dde2"


def table(comparison: Comparison) -> Table:
    """One line a recipe."""
    from rich.table import Table  # here: importing rich draws from Python's random numbers

    title = f"{comparison.model} in {comparison.dtype}, {comparison.texts} texts, {comparison.tokens} tokens"
    shown = Table(title=title, title_justify="left")
    rows = [["precision", "loss", "change", "top-1 agrees", "cosine, mean", "least", "output SQNR dB", "FP8 FLOPs"]]
    rows.append([comparison.dtype, _number(comparison.loss, ".4f"), *["-"] * 6])
    rows += [
        [
            result.recipe + " (emulated)" * result.emulated,
            _number(result.loss, ".4f"),
            _number(comparison.loss_change_percent(result), "+.2f", " %"),
            _number(result.top1, ".2%"),
            _number(result.cosine, ".5f"),
            _number(result.least_cosine, ".5f"),
            decibels(result.sqnr_db),
            f"{result.fp8_flops_share:.0%}",
        ]
        for result in comparison.results
    ]
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]  # what this model has
    for heading, *_ in columns:
        shown.add_column(heading, justify="left" if heading == "precision" else "right")
    for row in list(zip(*columns, strict=True))[1:]:
        shown.add_row(*row)
    return shown


def layer_table(result: RecipeResult) -> Table:
    """The layers of the lowest own SQNR."""
    from rich.table import Table

    worst = result.worst_first()
    title = f"{result.recipe}: the worst {min(SHOWN, len(worst))} of {len(worst)} converted layers, SQNR in dB"
    shown = Table(title=title, title_justify="left")
    for heading in ("layer", "shape", "layer alone", "in the model"):
        shown.add_column(heading, justify="left" if heading == "layer" else "right", overflow="fold")
    for layer in worst[:SHOWN]:
        shape = "x".join(map(str, layer.shape))
        shown.add_row(layer.name, shape, decibels(layer.own_sqnr_db), decibels(layer.sqnr_db))
    return shown


def choices(comparison: Comparison) -> list[str]:
    """A line for each recipe that decides: how many slots it gave each cast, the most frequent first."""
    lines = []
    for result in comparison.results:
        if (made := result.chosen) is None:
            continue
        counted = [f"{cast} {count}" for cast, count in made["slots"].items()]
        if rest := sum(list(made["slots"].values())[SHOWN:]):
            counted[SHOWN:] = [f"other casts {rest}"]
        layers = {"forward in 16 bits": made["forward_in_16_bits"], "not sampled": made["not_sampled"]}
        told = [f"{what}: {count} layer{'s' * (count != 1)}" for what, count in layers.items() if count]
        share = f"{result.fp8_flops_share:.0%} of linear FLOPs in FP8"
        lines.append(f"{result.recipe} chose, by slots: {'; '.join([', '.join(counted), *told, share])}")
    return lines


def left_alone(comparison: Comparison) -> list[str]:
    """A line for each reason to leave layers alone: the first of them, how many more, and under which recipes."""
    lines: dict[str, list[str]] = {}
    for result in comparison.results:
        by_reason: dict[str, list[str]] = {}
        for layer in result.layers:
            if layer.recipe == "none":
                by_reason.setdefault(layer.reason, []).append(layer.name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.setdefault(f"{names[0]}{more}: {reason}", []).append(result.recipe)
    everywhere = len(comparison.results)
    under = {line: "" if len(some) == everywhere else f" under {', '.join(some)}" for line, some in lines.items()}
    return [f"left alone{where}: {line}" for line, where in under.items()]


def decibels(value: float | None) -> str:
    """An SQNR for a table: a number, or why it is none.

    >>> decibels(31.42), decibels(math.inf), decibels(math.nan), decibels(None)
    ('31.4', 'equal', 'not finite', 'not comparable')
    """
    return note(value) or f"{value:.1f}"


def picture(comparison: Comparison) -> bytes | None:
    """A PNG of each layer's SQNR under every recipe; None where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    names = [layer.name for layer in comparison.results[0].layers]
    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": FAINT}):
        figure = Figure(figsize=(max(7.0, min(24.0, 2 + 0.22 * len(names))), 6.5), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 1, sharex=True)
        for panel, key in zip(panels, ("own_sqnr_db", "sqnr_db"), strict=True):
            for index, result in enumerate(comparison.results):
                colour = COLOURS[index % len(COLOURS)]
                values = [_finite(getattr(layer, key)) for layer in result.layers]
                # Earlier ones are drawn wider, beneath: equal lines are all seen.
                over = (len(comparison.results) - 1 - index) * min(1.0, 4 / len(comparison.results))
                width, size = 1 + 1.5 * over, 4 + 3 * over
                panel.plot(range(len(names)), values, "o-", color=colour, linewidth=width, markersize=size)
                panel.plot([], [], color=colour, linewidth=2.6, label=_legend(comparison, result))
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(color=FAINT, linewidth=0.6)
            panel.set_ylabel("SQNR, dB")
        panels[0].set_title("each linear layer on its own: same input, other casts", loc="left", fontsize=10)
        panels[1].set_title("in the model: errors of earlier layers arrive with the input", loc="left", fontsize=10)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, ncols=2)
        step = -(-len(names) // 60)  # more names than that lie on one another
        panels[1].set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=7)
        title = f"{comparison.model} in {comparison.dtype} against itself under FP8, {comparison.tokens} tokens"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return memory.getvalue()


def _legend(comparison: Comparison, result: RecipeResult) -> str:
    parts = [result.recipe]
    if result.loss is not None and comparison.loss is not None:
        parts.append(f"loss {result.loss:.4f} ({comparison.loss:.4f})")
    if result.top1 is not None:
        parts.append(f"top-1 {result.top1:.1%}")
    if result.cosine is not None:
        parts.append(f"cosine {result.cosine:.4f}")
    return ", ".join(parts)


def _finite(value: float | None) -> float:
    """matplotlib leaves a gap at NaN."""
    return value if value is not None and math.isfinite(value) else math.nan


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
