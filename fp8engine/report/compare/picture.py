"""Picture of a comparison: a row for each transformer block, a column for each recipe, an SQNR in each cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8engine.report.compare.result import Comparison, note
from fp8engine.report.figure import png, titles
from fp8engine.report.flow import repeats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {"own_sqnr_db": "worst layer of a block, alone", "sqnr_db": "output of a block, in the model"}
LEAST, MOST = 10.0, 40.0  # dB, the ends of the colours: FP8's layers and blocks are between, BF16's above
ROW, TALLEST, NUMBERED = 0.2, 20.0, 140  # inches; rows of more blocks than that are too low for a number
FLAT = 5  # recipes; the names of more would touch, and are turned
WIDTH, NAME = 8.0, 22  # inches, at 100 dots an inch; characters of a block's name


def draw(comparison: Comparison) -> bytes | None:
    """A PNG of 800 dots' width, on white; None where matplotlib is not installed."""
    columns = [result.blocks for result in comparison.results]
    rows = [row for row in zip(*columns, strict=True) if any(block.own_sqnr_db is not None for block in row)]

    def panels(figure: Figure) -> None:
        step = 1 + len(rows) // NUMBERED
        names = _shortened([row[0].name for row in rows])
        both = figure.subplots(1, 2, sharey=True)
        for panel, (key, title) in zip(both, PANELS.items(), strict=True):
            _heat(panel, [[getattr(block, key) for block in row] for row in rows])
            panel.set_title(title, fontsize=9.5, loc="left")
            panel.set_xticks(range(len(columns)), [result.recipe for result in comparison.results])
            if len(columns) > FLAT:
                panel.tick_params(axis="x", labelrotation=30)
                for label in panel.get_xticklabels():
                    label.set_horizontalalignment("left")
        both[0].set_yticks(range(0, len(rows), step), names[::step], fontsize=8)
        below = f"SQNR in dB: 6 dB more is half the error; colours from {LEAST:.0f} to {MOST:.0f} dB"
        titles(figure, f"{comparison.model} against FP32 on {comparison.tokens:,} tokens", below)

    return png(panels, WIDTH, 1.5 + min(ROW * max(len(rows), 3), TALLEST), dots=100)


def _heat(panel: Axes, values: Sequence[Sequence[float | None]]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    colours, scale = colormaps["viridis"].with_extremes(bad="#ffffff"), Normalize(LEAST, MOST)
    shown: Any = [[math.nan if value is None else min(value, MOST) for value in row] for row in values]
    panel.imshow(shown, cmap=colours, norm=scale, aspect="auto", interpolation="nearest")
    panel.tick_params(length=0, labeltop=True, labelbottom=False)
    panel.spines[:].set_visible(False)
    for y, row in enumerate(values if len(values) <= NUMBERED else []):
        for x, value in enumerate(row):
            dark = value is not None and scale(value) < 0.65  # and NaN is not: its cell is white
            told = "-" if value is None else note(value) or f"{value:.1f}"
            panel.text(x, y, told, ha="center", va="center", fontsize=7.5, color="#ffffff" if dark else "#1b1b1b")


def _shortened(names: Sequence[str]) -> list[str]:
    """The names without the beginning that all of them share, and at most NAME characters of their ends.

    >>> _shortened(["model.layers.0", "model.layers.1"]), _shortened(["encoder.block.0", "decoder.block.0"])
    (['0', '1'], ['encoder.block.0', 'decoder.block.0'])
    """
    cut = len(repeats.shared(names)) if len(names) > 1 else 0
    return [name[cut:] if len(name) - cut <= NAME else f"…{name[1 - NAME :]}" for name in names]
