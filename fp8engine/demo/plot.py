"""The picture: how every precision learned, how far it strayed from fp32, what it cost in time and memory."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8engine.demo import files
from fp8engine.demo.summary import Summary
from fp8engine.demo.train import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
INK, DIM, FAINT = "#2b2f36", "#6b747e", "#d9dde2"
GOAL = 0.5  # percent: DESIGN section 9


def draw(summary: Summary, path: Path) -> Path | None:
    """Write the picture; None, and no file, where matplotlib is not installed or no step was taken."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    results = [result for result in summary.results if result.steps]
    if not results:
        return None
    with matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.edgecolor": FAINT,
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    ):
        figure = Figure(figsize=(12, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels: Any = figure.subplot_mosaic(
            [["loss", "far", "far"], ["loss", "fast", "small"]], width_ratios=[1.7, 1, 1]
        )
        for panel in panels.values():
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(length=0)
            panel.grid(color=FAINT, linewidth=0.6)
            panel.set_axisbelow(True)
        _loss(panels["loss"], results, summary.about["loss_of_byte_pairs"])
        _difference(panels["far"], results)
        _bars(panels["fast"], results, "thousand tokens a second", [r.tokens_per_second / 1e3 for r in results])
        _bars(
            panels["small"],
            results,
            "activations saved for backward, MiB",
            [r.activation_bytes / 2**20 for r in results],
        )
        figure.suptitle(summary.title(), x=0.01, ha="left", fontsize=12, fontweight="bold")
        if summary.note():
            figure.supxlabel(summary.note(), x=0.01, ha="left", fontsize=8.5, color="#9a3b00")
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=130, facecolor="white", metadata={"Software": None})
    files.write(path, memory.getvalue())
    return path


def _loss(panel: Axes, results: list[Result], pairs: float) -> None:
    last = max(result.steps for result in results)
    # The curves lie on one another: a window on the last fifth, drawn larger, shows them apart.
    window = panel.inset_axes((0.42, 0.42, 0.565, 0.22))
    for result in results:
        colour, plain = COLOURS.get(result.recipe, INK), result.recipe == "fp32"
        smooth = _smooth(result.curve.losses)
        steps = range(1, len(smooth) + 1)
        panel.plot(steps, smooth, color=colour, linewidth=2.4 if plain else 1.1)
        window.plot(steps, smooth, color=colour, linewidth=2.2 if plain else 1.1)
        judged, losses = zip(*result.curve.validation, strict=True)
        panel.plot(judged, losses, "o", color=colour, markersize=7 if plain else 3.5, zorder=3)
        panel.plot([], [], color=colour, linewidth=2.6, label=f"{result.recipe}   {losses[-1]:.3f}")
    panel.axhline(pairs, color="#9aa3ad", linewidth=1, linestyle=(0, (4, 3)))
    panel.annotate(
        f"a table of byte pairs: {pairs:.2f}",
        (1, pairs),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        color=DIM,
        fontsize=8.5,
    )
    tails = _finite(loss for result in results for loss in _smooth(result.curve.losses)[int(0.8 * last) :])
    if tails:
        room = 0.08 * (max(tails) - min(tails)) + 1e-3
        window.set(xlim=(0.8 * last, last), ylim=(min(tails) - room, max(tails) + room))
        box = panel.indicate_inset_zoom(window, edgecolor=DIM, linewidth=0.8, alpha=0.6)
        for line in box.connectors or ():
            line.set_visible(False)
        window.set_title("the training loss in the box", loc="left", fontsize=8, color=DIM, pad=3)
    window.tick_params(length=0, labelsize=7.5)
    window.grid(color=FAINT, linewidth=0.5)
    ends = _finite(loss for result in results for _, loss in result.curve.validation)
    panel.set(xlabel="step", xlim=(0, 1.015 * last), ylim=(min([pairs, *ends, *tails]) - 0.15, 4.2))
    panel.set_title("loss, nats a byte  (lines: training, smoothed; dots: validation)", loc="left", fontsize=10)
    panel.legend(frameon=False, title="final validation loss", alignment="left", loc="upper right", handlelength=1.2)


def _difference(panel: Axes, results: list[Result]) -> None:
    panel.axhspan(-GOAL, GOAL, color="#e8f3ec", zorder=0)
    panel.axhline(0, color=COLOURS["fp32"], linewidth=1.6)
    base = next((dict(result.curve.validation) for result in results if result.recipe == "fp32"), {})
    widest = GOAL
    for result in results:
        points = [(step, 100 * (loss / base[step] - 1)) for step, loss in result.curve.validation if base.get(step)]
        if points and result.recipe != "fp32":
            steps, far = zip(*points, strict=True)
            widest = max([widest, *_finite(map(abs, far))])
            colour = COLOURS.get(result.recipe, INK)
            panel.plot(steps, far, "o-", color=colour, linewidth=1.4, markersize=4)
    panel.set(
        xlim=(0, 1.015 * max(result.steps for result in results)), ylim=(-1.25 * widest, 1.25 * widest), xlabel="step"
    )
    panel.set_title(f"validation loss against fp32, %  (green: within {GOAL})", loc="left", fontsize=10)
    if not base:
        panel.text(0.5, 0.7, "fp32 was not among the recipes", transform=panel.transAxes, ha="center", color=DIM)


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
    """Without what a diverged run leaves."""
    return [value for value in values if math.isfinite(value)]


def _smooth(losses: list[float], keep: float = 0.9) -> list[float]:
    """An exponential average that starts at the first value."""
    smooth, last = [], losses[0]
    for loss in losses:
        last = keep * last + (1 - keep) * loss
        smooth.append(last)
    return smooth
