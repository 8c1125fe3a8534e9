"""Paths and places in the page's pictures that need no script: the loss curve, and maps of formats over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# E4M3 blue, E5M2 amber, the finer the darker; a margin turns them green; 16 bits and more grey.  Told apart by
# colour-blind readers too, on white and on black.
SHADES = {
    "E4M3/tensor": "#7cc0f2",
    "E4M3/row": "#3b8bd4",
    "E4M3/block": "#2757ab",
    "E5M2/tensor": "#f5bd4f",
    "E5M2/row": "#e0852c",
    "E5M2/block": "#b3541a",
    "E4M3": "#2fae9e",
    "E5M2": "#b9b03a",
    "BF16": "#9aa4ae",
    "FP16": "#7f8a96",
    "FP32": "#626d79",
}
OTHER = "#a06cc8"
BINS = 500  # of the loss curve
WIDTH, HEIGHT = 1000, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 990, 12, 184  # edges of the curve's field in it


def colour(label: str) -> str:
    """A cast's colour; where one matmul reads the slot under another cast, that of the first.

    >>> colour("E4M3/row (wgrad E4M3/tensor)"), colour("E4M3/tensor margin 2") == SHADES["E4M3"]
    ('#3b8bd4', True)
    """
    label = label.partition(" (")[0]
    return SHADES.get(label) or SHADES.get(label.partition("/")[0], OTHER)


def row_height(layers: int) -> int:
    """Pixels of a map's row."""
    return 17 if layers <= 40 else 13 if layers <= 100 else 9


def format_map(blob: Mapping, role: str) -> list[tuple[str, str]]:
    """(colour, path) of each cast on a map of layers x samples: its runs along the rows."""
    paths: dict[int, list[str]] = {}
    for y, layer in enumerate(blob["layers"]):
        x = 0
        for cast, length in layer["slots"].get(role, {}).get("cast", ()):
            if cast is not None:
                paths.setdefault(cast, []).append(f"M{x} {y}.06h{length}v.88h-{length}z")
            x += length
    return [(colour(blob["casts"][cast]["label"]), "".join(parts)) for cast, parts in sorted(paths.items())]


def loss_curve(losses: Sequence[float], marks: Mapping[int, int]) -> dict[str, Any] | None:
    """Loss against step, in units of WIDTH x HEIGHT; None where none is finite.  marks: step -> formats changed.

    steps, first, last: how many there are, and the losses at both ends.  raw, smooth: paths, as measured and smoothed.
    levels: (y, loss) of the lines across.  times: (x, step) along the lower edge.
    marks: (x, step, formats that changed there).
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    room = 0.06 * (high - low) or max(abs(high), 1.0) * 0.05
    low, high = low - room, high + room
    x = lambda step: LEFT + (RIGHT - LEFT) * step / max(len(losses) - 1, 1)  # noqa: E731 - a scale, used below
    y = lambda loss: TOP + (BOTTOM - TOP) * (high - loss) / (high - low)  # noqa: E731 - the other one
    return {
        "steps": len(losses),
        "first": finite[0],
        "last": finite[-1],
        "raw": _line(losses, x, y),
        "smooth": _line(_smooth(losses), x, y),
        "levels": [(y(tick), tick) for tick in ticks(low, high, 5)],
        "times": [(x(tick), int(tick)) for tick in ticks(0, len(losses) - 1, 8) if tick == int(tick)],
        "marks": [(x(step), step, count) for step, count in marks.items() if 0 <= step < len(losses)],
    }


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two, at most `most` + 1 of them.

    >>> ticks(1.2, 5.7, 5), ticks(0, 199, 8)
    ([2.0, 3.0, 4.0, 5.0], [0.0, 50.0, 100.0, 150.0])
    """
    if not high > low:
        return [float(low)]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _line(values: Sequence[float], x, y) -> str:
    """A path through them, broken where one is not finite; of very many, the least and the largest of each bin."""
    every = max(math.ceil(len(values) / BINS), 1)
    path, pen = [], "M"
    for start in range(0, len(values), every):
        inside = [(value, i) for i, value in enumerate(values[start : start + every], start) if math.isfinite(value)]
        if not inside:
            pen = "M"
            continue
        for value, i in sorted({min(inside), max(inside)}, key=lambda pair: pair[1]):
            path.append(f"{pen}{x(i):.1f} {y(value):.1f}")
            pen = "L"
    return "".join(path)


def _smooth(losses: Sequence[float], reach: int = 10) -> list[float]:
    """Means of up to `reach` finite neighbours on either side, as many on both: the ends stay where they are."""
    smooth = []
    for i, loss in enumerate(losses):
        side = min(reach, i, len(losses) - 1 - i)
        near = [value for value in losses[i - side : i + side + 1] if math.isfinite(value)]
        smooth.append(sum(near) / len(near) if math.isfinite(loss) else math.nan)
    return smooth
