"""Picture of a session: losses against fp32's step by step, the losses themselves, and the activations saved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8engine.demo import disk
from fp8engine.demo.report import Result, Summary
from fp8engine.report.figure import DIM, FAINT, INK, png, titles

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
    "rowwise_gw_hp": "#cc79a7",
    "auto": "#7b2fbe",
}
WARNING = "#9a3b00"  # of the remark that speeds are emulated
GOAL = 0.5  # percent: DESIGN section 9
LEARNT = 4.2  # nats a byte: a run starts near 5.5 and is below this after a few steps, where the curves begin to tell


def draw(summary: Summary, path: Path) -> Path | None:
    """Write the picture; None, and no file, where matplotlib is not installed or no step was taken."""
    results = [result for result in summary.results if result.steps]
    if not results:
        return None
    emulated = bool(summary.note())  # its speeds say nothing

    def panels(figure: Figure) -> None:
        below = ["loss", "small"] if emulated else ["loss", "fast", "small"]
        mosaic: Any = [["far"] * len(below), below]
        drawn: Any = figure.subplot_mosaic(mosaic, height_ratios=[1.35, 1])
        for panel in drawn.values():
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(length=0)
            panel.grid(color=FAINT, linewidth=0.6)
            panel.set_axisbelow(True)
        _difference(drawn["far"], results)
        _loss(drawn["loss"], results, summary.about["loss_of_byte_pairs"])
        if not emulated:
            _bars(drawn["fast"], results, "thousand tokens a second", [r.tokens_per_second / 1e3 for r in results])
        saved = [result.activation_bytes / 2**20 for result in results]
        _bars(drawn["small"], results, "activations saved for backward, MiB", saved)
        titles(figure, summary.title(), summary.note(), WARNING)

    image = png(panels, width=9.6, height=6.4, dots=130)
    if image is None:
        return None
    disk.write(path, image)
    return path


def _loss(panel: Axes, results: list[Result], pairs: float) -> None:
    last = max(result.steps for result in results)
    for result in results:
        plain = result.recipe == "fp32"
        smooth = _smooth(result.curve.losses)
        colour = COLOURS.get(result.recipe, INK)
        panel.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=2.4 if plain else 1.1)
    panel.axhline(pairs, color="#9aa3ad", linewidth=1, linestyle=(0, (4, 3)))
    told = f"a table of byte pairs: {pairs:.2f}"
    panel.annotate(told, (last, pairs), xytext=(-2, 4), textcoords="offset points", ha="right", color=DIM, fontsize=8.5)
    ends = _finite(min(result.curve.losses) for result in results)
    top = max([LEARNT, *(end + 0.5 for end in ends)])  # a run of few steps ends above it
    panel.set(xlabel="step", xlim=(0, 1.015 * last), ylim=(min([pairs, *ends]) - 0.15, top))
    panel.set_title("training loss, nats a byte", loc="left", fontsize=10)


def _difference(panel: Axes, results: list[Result]) -> None:
    """Training losses are paired: both saw the same batch, and what one batch differs from another by falls out."""
    base = next((result.curve for result in results if result.recipe == "fp32"), None)
    panel.set_xlim(0, 1.015 * max(result.steps for result in results))
    panel.set_xlabel("step")
    panel.set_title(
        f"loss against fp32's on the same text, one seed, %   (green: within {GOAL})", loc="left", fontsize=10
    )
    if base is None:
        panel.text(0.5, 0.5, "fp32 was not among the recipes", transform=panel.transAxes, ha="center", color=DIM)
        return
    panel.axhspan(-GOAL, GOAL, color="#e8f3ec", zorder=0)
    panel.axhline(0, color=COLOURS["fp32"], linewidth=1.6, label="fp32")
    widest, validation = GOAL, dict(base.validation)
    for result in results:
        if result.recipe == "fp32":
            continue
        colour = COLOURS.get(result.recipe, INK)
        pairs = zip(result.curve.losses, base.losses, strict=False)  # one of both may have been stopped
        far = _smooth([100 * (loss / other - 1) for loss, other in pairs], keep=0.97)
        dots = [
            (step, 100 * (loss / validation[step] - 1))
            for step, loss in result.curve.validation
            if validation.get(step)
        ]
        label = f"{result.recipe}   {dots[-1][1]:+.2f}" if dots else result.recipe
        panel.plot(range(1, len(far) + 1), far, color=colour, linewidth=1.3, label=label)
        panel.plot([step for step, _ in dots], [each for _, each in dots], "o", color=colour, markersize=5)
        widest = max([widest, *_finite(abs(each) for _, each in dots)])
    panel.set_ylim(-1.9 * widest, 1.25 * widest)  # the legend is below
    title = "lines: training, smoothed; dots: validation, at the end:"
    panel.legend(frameon=False, title=title, alignment="left", loc="lower left", ncols=4, handlelength=1.2)


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


def _finite(values: Iterable[float]) -> list[float]:
    """Without the NaN and Inf of a diverged run."""
    return [value for value in values if math.isfinite(value)]


def _smooth(losses: list[float], keep: float = 0.9) -> list[float]:
    """An exponential average that starts at the first value."""
    smooth, last = [], losses[0]
    for loss in losses:
        last = keep * last + (1 - keep) * loss
        smooth.append(last)
    return smooth
