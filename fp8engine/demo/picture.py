"""Picture of a session: losses beside fp32's, activations saved, and the formats that `auto` chose, step by step."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8engine.demo import disk
from fp8engine.demo.report import Result, Summary, differences
from fp8engine.report.figure import DIM, INK, png, titles
from fp8engine.report.page.svg import colour
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# 16 and 32 bits in greys and blues, FP8 in warm and strong colours; told apart by colour-blind readers too (Okabe-Ito).
COLOURS = {
    "fp32": "#1b1b1b",
    "bf16": "#7f8c9b",
    "fp16": "#b3bcc6",
    "current": "#d55e00",
    "delayed": "#e69f00",
    "rowwise": "#0072b2",
    "blockwise": "#009e73",
    "mxfp8": "#56b4e9",
    "rowwise_gw_hp": "#cc79a7",
    "auto": "#7b2fbe",
}
WARNING = "#9a3b00"  # of the remark that speeds are emulated
GOAL = 0.5  # percent: DESIGN section 9


def draw(summary: Summary, path: Path) -> Path | None:
    """Write the picture; None, and no file, where matplotlib is not installed or no step was taken.

    Of several results of one recipe, with different seeds, the mean and its standard error are shown.
    """
    results = [result for result in summary.results if result.steps]
    if not results:
        return None
    emulated = bool(summary.note())  # its speeds say nothing
    decided = next((result for result in results if result.formats), None)

    def panels(figure: Figure) -> None:
        left = ["far", "small"] if emulated else ["far", "small", "fast"]
        mosaic: Any = [[name, "formats"] if decided else [name] for name in left]
        drawn: Any = figure.subplot_mosaic(mosaic, height_ratios=[1.3, *[1] * (len(left) - 1)])
        for panel in drawn.values():
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(length=0)
            panel.set_axisbelow(True)
        _difference(drawn["far"], results)
        firsts = list({result.recipe: result for result in reversed(results)}.values())[::-1]
        saved = [result.activation_bytes / 2**20 for result in firsts]
        _bars(drawn["small"], firsts, "activations saved for backward, MiB", saved)
        if not emulated:
            _bars(drawn["fast"], firsts, "thousand tokens a second", [r.tokens_per_second / 1e3 for r in firsts])
        if decided:
            _formats(drawn["formats"], decided)
        titles(figure, summary.title(), summary.note(), WARNING)

    image = png(panels, width=9.6, height=5.6 if emulated else 7.2, dots=130)
    if image is None:
        return None
    disk.write(path, image)
    return path


def by_recipe(results: list[Result]) -> dict[str, list[float]]:
    """By recipe, without fp32: `differences` of the seeds that have one, and did not diverge."""
    found: dict[str, list[float]] = {result.recipe: [] for result in results if result.recipe != "fp32"}
    for result, far in zip(results, differences(results), strict=True):
        if result.recipe in found and far is not None and math.isfinite(far):
            found[result.recipe].append(far)
    return found


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """The mean, and its standard error where there are several values.

    >>> mean_and_error([1.0, 2.0, 3.0]), mean_and_error([0.5])
    ((2.0, 0.577...), (0.5, None))
    """
    if len(values) < 2:
        return statistics.fmean(values), None
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def _difference(panel: Axes, results: list[Result]) -> None:
    """One line a recipe: a faint dot for each seed, a strong one and a bar for their mean and its standard error."""
    found = {recipe: values for recipe, values in by_recipe(results).items() if values}
    seeds = max(map(len, found.values()), default=0)
    mean = f"mean of {seeds} seeds ± its standard error" if seeds > 1 else "one seed: others differ by as much"
    panel.set_title(f"validation loss against fp32's, %\n{mean}", loc="left", fontsize=10)
    if not found:
        panel.text(0.5, 0.5, "no run beside one of fp32", transform=panel.transAxes, ha="center", color=DIM)
        panel.set(xticks=[], yticks=[])
        return
    panel.axvspan(-GOAL, GOAL, color="#e8f3ec", zorder=0)
    panel.axvline(0, color=COLOURS["fp32"], linewidth=1.2)
    widest = max([GOAL, *(abs(value) for values in found.values() for value in values)])
    for place, (recipe, values) in enumerate(found.items()):
        colour = COLOURS.get(recipe, INK)
        middle, error = mean_and_error(values)
        if error is not None:
            panel.plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
        panel.errorbar(middle, place, xerr=error, fmt="o", color=colour, markersize=6.5, elinewidth=2, capsize=3)
        told = f"{middle:+.2f}" + (f" ± {error:.2f}" if error is not None else "")
        panel.text(1.3 * widest, place, told, va="center", fontsize=8.5)
    panel.set(xlim=(-1.25 * widest, 2.0 * widest), ylim=(len(found) - 0.4, -0.6))
    panel.set_yticks(range(len(found)), list(found))
    panel.set_xticks([-GOAL, 0, GOAL], [f"-{GOAL}", "0", f"+{GOAL}"])


def _formats(panel: Axes, result: Result) -> None:
    """The cast of every tensor that a linear layer reads, over the steps: a row each, its input, weight, gradient."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    rows = [_over_steps(result, slot) for slot in result.formats]
    shades = {colour(cast): cast.partition(" (")[0] for row in rows for cast in row}  # the page's colours
    image = [[to_rgb(colour(cast)) for cast in row] for row in rows]
    panel.imshow(image, aspect="auto", interpolation="nearest", extent=(0, result.steps, len(rows), 0))
    layers = list(dict.fromkeys(slot.rpartition(".")[0] for slot in result.formats))
    for place in range(1, len(layers)):
        panel.axhline(len(ROLES) * place, color="white", linewidth=1.5)
    middles = [len(ROLES) * place + len(ROLES) / 2 for place in range(len(layers))]
    panel.set_yticks(middles, [layer.removeprefix("blocks.") for layer in layers])
    panel.set_xlabel("step; of each layer: input, weight, gradient")
    panel.set_title(f"what {result.recipe} chose: {len(result.decisions)} changes", loc="left", fontsize=10)
    patches = [Patch(color=shade, label=cast) for shade, cast in shades.items()]
    panel.legend(handles=patches, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=3, fontsize=8.5)


def _over_steps(result: Result, slot: str) -> list[str]:
    """The cast of one slot at each step."""
    changes = [change for change in result.decisions if change["slot"] == slot]
    casts = [changes[0]["before"] if changes else result.formats[slot], *(change["after"] for change in changes)]
    starts = [0, *(change["step"] for change in changes), result.steps]
    return [cast for cast, (first, last) in zip(casts, pairwise(starts), strict=True) for _ in range(first, last)]


def _bars(panel: Axes, results: list[Result], title: str, values: list[float]) -> None:
    names = [result.recipe for result in results]
    bars = panel.barh(names, values, color=[COLOURS.get(name, INK) for name in names], height=0.68)
    panel.bar_label(bars, fmt="%.1f", padding=3, fontsize=8.5)
    panel.invert_yaxis()
    panel.grid(visible=False)
    panel.spines["bottom"].set_visible(False)
    panel.set_xticks([])
    panel.set_xlim(0, 1.18 * max(values))
    panel.set_title(title, loc="left", fontsize=10)
