"""A flow as a picture: one description of boxes, curves and frames, written as SVG or drawn by matplotlib."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from fp8engine.auto.flow.fold import Frame, fold, within
from fp8engine.auto.flow.layout import ROW, Spot, place
from fp8engine.auto.flow.result import Flow

MARGIN, HEIGHT, PAD = 28.0, 30.0, 16.0  # around the picture; of a box; around a frame
LETTER, SMALL = 12.0, 10.0  # sizes of type, in pixels
# kind -> (fill, border, ink, what the legend says)
INK = {
    "matmul": ("#1f4e79", "#163a5c", "#ffffff", "matmul"),
    "attention": ("#e6dcf5", "#8e6bbf", "#3b2363", "attention, softmax"),
    "norm": ("#fbe9c6", "#d19a2a", "#5c3f05", "norm"),
    "residual": ("#dff0df", "#5b9b5b", "#1e4a1e", "residual"),
    "activation": ("#fbdccb", "#d9774a", "#632a0c", "activation"),
    "embedding": ("#dce9f5", "#7fa6cc", "#1f3d5c", "input, embedding"),
    "loss": ("#f8d3d6", "#c4515b", "#5f141b", "loss"),
    "output": ("#eeeeee", "#8a8a8a", "#333333", "output"),
    "unknown": ("#ffffff", "#8a8a8a", "#333333", "other"),
}
SAME_INK = {"softmax": "attention", "input": "embedding"}


@dataclass(frozen=True)
class Box:
    """A node on paper: its middle, its size, what it says, its kind."""

    x: float
    y: float
    width: float
    text: str
    kind: str
    tip: str


@dataclass(frozen=True)
class Picture:
    """What is drawn, in pixels from the top left.  frames: (x, y, width, height, text)."""

    width: float
    height: float
    boxes: list[Box]
    curves: list[list[tuple[float, float]]]
    frames: list[tuple[float, float, float, float, str]]


def picture(flow: Flow) -> Picture:
    """The folded graph, laid out."""
    folded = fold(flow)
    frame_of = {node: frame for frame in folded.frames for node in frame.nodes}
    texts = {node: _text(flow, node, frame_of.get(node)) for node in folded.nodes}
    widths = {node: _wide(text) for node, text in texts.items()}
    layout = place(folded, widths)
    everything = [*layout.spots.values(), *(spot for way in layout.ways.values() for spot in way)]
    right = max([spot.x + spot.width / 2 for spot in everything], default=0.0)
    kinds = [SAME_INK.get(flow.nodes[node].kind, flow.nodes[node].kind) for node in layout.spots]
    width = max(right + 2 * (MARGIN + PAD), _legend_width(kinds))
    start = (width - right) / 2
    legend = HEIGHT + 10
    y = lambda spot: legend + MARGIN + PAD + HEIGHT / 2 + ROW * spot.row  # noqa: E731
    boxes = []
    for node, spot in layout.spots.items():
        said = flow.nodes[node]
        tip = f"{said.kind}: {said.name}" + (f", in {said.where}" if said.where else "")
        boxes.append(Box(start + spot.x, y(spot), spot.width, texts[node], SAME_INK.get(said.kind, said.kind), tip))
    curves = []
    for way in layout.ways.values():
        points = [(start + way[0].x, y(way[0]) + HEIGHT / 2)]
        points += [(start + spot.x, y(spot)) for spot in way[1:-1]]
        curves.append([*points, (start + way[-1].x, y(way[-1]) - HEIGHT / 2)])
    frames = []
    for frame in folded.frames:
        inside = [layout.spots[node] for node in frame.nodes]
        first, last = min(spot.row for spot in inside), max(spot.row for spot in inside)
        ways = [way for edge, way in layout.ways.items() if set(edge) & set(frame.nodes)]
        passing = [spot for way in ways for spot in way[1:-1] if first <= spot.row <= last]
        inside += [spot for spot in passing if spot.lane == inside[0].lane]
        frames.append(_framed(frame, inside, start, y))
    width = max([width, *(x + wide + MARGIN for x, _, wide, *_ in frames)])
    return Picture(width, legend + 2 * (MARGIN + PAD) + ROW * max(layout.rows - 1, 0) + HEIGHT, boxes, curves, frames)


def _framed(frame: Frame, inside: list[Spot], start: float, y) -> tuple[float, float, float, float, str]:
    last = frame.last.rpartition(".")[2]
    text = f"{frame.first} … {last}   × {frame.times}" if frame.times > 1 else frame.inner
    left, right = (min(s.x - s.width / 2 for s in inside), max(s.x + s.width / 2 for s in inside))
    right = max(right, left + 0.6 * LETTER * len(text))
    top, bottom = min(map(y, inside)) - HEIGHT / 2 - 22, max(map(y, inside)) + HEIGHT / 2 + 8
    return start + left - PAD, top, right - left + 2 * PAD, bottom - top, text


def _text(flow: Flow, node: int, frame: Frame | None) -> str:
    """A node's name as short as its surroundings allow."""
    said = flow.nodes[node]
    if said.kind == "residual" and said.name.startswith("aten."):
        return "+"
    name = within(said.name, frame.first if frame.times > 1 else frame.inner) if frame else said.name
    name = name.removeprefix("aten.").removesuffix("_forward") or "(model)"
    if said.kind == "activation" and said.name == "aten.mul":
        name = "×"
    layer = flow.layers.get(said.name) if said.kind == "matmul" else None
    return f"{name}  (called {layer.calls} times)" if layer and layer.calls > 1 else name


def _wide(text: str) -> float:
    return max(HEIGHT, 0.58 * LETTER * len(text) + 20)


def _legend(kinds: Iterable[str]) -> Iterator[tuple[float, str, str]]:
    """(x, kind, text) of the kinds that are there."""
    x, there = MARGIN, set(kinds)
    for kind, (*_, text) in INK.items():
        if kind in there:
            yield x, kind, text
            x += _legend_step(text)


def _legend_step(text: str) -> float:
    return 0.52 * SMALL * len(text) + 36


def _legend_width(kinds: Iterable[str]) -> float:
    return max((x + _legend_step(text) for x, _, text in _legend(kinds)), default=0.0) + MARGIN / 2


def svg(flow: Flow) -> str:
    """The picture as SVG: no script, no font or style from elsewhere; names in full where the mouse rests.

    >>> import torch
    >>> from fp8engine.auto.flow import record
    >>> svg(record(torch.nn.Linear(2, 2), torch.ones(1, 2)))[:39]
    '<svg xmlns="http://www.w3.org/2000/svg"'
    """
    drawn = picture(flow)
    w, h = drawn.width, drawn.height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0.8 L7.5,4 L0,7.2 z" fill="#7a7f87"/></marker></defs>',
        f'<rect width="{w:.0f}" height="{h:.0f}" fill="#ffffff"/>',
    ]
    for x, kind, text in _legend(box.kind for box in drawn.boxes):
        fill, border, *_ = INK[kind]
        lines.append(
            f'<rect x="{x:.1f}" y="{MARGIN - 8}" width="14" height="14" rx="4" fill="{fill}" stroke="{border}"/>'
        )
        lines.append(f'<text x="{x + 20:.1f}" y="{MARGIN + 3}" font-size="{SMALL}" fill="#444">{escape(text)}</text>')
    for x, y, width, height, _ in drawn.frames:
        lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="12" fill="#f7f9fb" '
            'stroke="#b8c4d0" stroke-dasharray="5 4"/>'
        )
    for points in drawn.curves:
        way = "".join(_bend(*a, *b) for a, b in itertools.pairwise(points))
        start = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        lines.append(f'<path d="{start}{way}" fill="none" stroke="#7a7f87" stroke-width="1.3" marker-end="url(#tip)"/>')
    for x, y, _, _, text in drawn.frames:
        lines.append(
            f'<text x="{x + 12:.1f}" y="{y + 15:.1f}" font-size="{LETTER}" font-weight="600" fill="#4a6078" '
            f'stroke="#f7f9fb" stroke-width="5" paint-order="stroke">{escape(text)}</text>'
        )
    for box in drawn.boxes:
        fill, border, ink, _ = INK[box.kind]
        lines.append(
            f'<g><title>{escape(box.tip)}</title><rect x="{box.x - box.width / 2:.1f}" y="{box.y - HEIGHT / 2:.1f}" '
            f'width="{box.width:.1f}" height="{HEIGHT}" rx="{_round(box)}" fill="{fill}" stroke="{border}"/>'
            f'<text x="{box.x:.1f}" y="{box.y + 4:.1f}" font-size="{LETTER}" text-anchor="middle" fill="{ink}">'
            f"{escape(box.text)}</text></g>"
        )
    return "\n".join([*lines, "</svg>\n"])


def _bend(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (y0 + y1) / 2
    return f" C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1:.1f}"


def _round(box: Box) -> float:
    return HEIGHT / 2 if box.kind in ("residual", "output", "embedding") else 7


def png(flow: Flow, path: str | os.PathLike) -> None:
    """The picture through matplotlib, at twice the SVG's pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path

    drawn = picture(flow)
    figure = Figure(figsize=(drawn.width / 72, drawn.height / 72), dpi=144)  # so that a point is a pixel
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()

    def rounded(x, y, width, height, radius, **style):
        style = {"boxstyle": f"round,pad=0,rounding_size={radius}", "linewidth": 1, **style}
        axes.add_patch(FancyBboxPatch((x, y), width, height, mutation_aspect=1, **style))

    for x, kind, text in _legend(box.kind for box in drawn.boxes):
        fill, border, *_ = INK[kind]
        rounded(x, MARGIN - 8, 14, 14, 4, facecolor=fill, edgecolor=border)
        axes.text(x + 20, MARGIN - 1, text, fontsize=SMALL * 0.9, color="#444444", va="center")
    for x, y, width, height, text in drawn.frames:
        rounded(x, y, width, height, 12, facecolor="#f7f9fb", edgecolor="#b8c4d0", linestyle=(0, (5, 4)))
        halo = {"facecolor": "#f7f9fb", "edgecolor": "none", "pad": 1.5}
        style = {"fontsize": LETTER * 0.9, "color": "#4a6078", "weight": "bold", "va": "center", "zorder": 2}
        axes.text(x + 12, y + 11, text, bbox=halo, **style)
    for points in drawn.curves:
        corners, codes = [points[0]], [Path.MOVETO]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            middle = (y0 + y1) / 2
            corners += [(x0, middle), (x1, middle), (x1, y1)]
            codes += [Path.CURVE4] * 3
        style = {"arrowstyle": "-|>", "mutation_scale": 9, "color": "#7a7f87", "linewidth": 1.2}
        axes.add_patch(FancyArrowPatch(path=Path(corners, codes), shrinkA=0, shrinkB=0, **style))
    for box in drawn.boxes:
        fill, border, ink, _ = INK[box.kind]
        corner = box.x - box.width / 2, box.y - HEIGHT / 2
        rounded(*corner, box.width, HEIGHT, min(_round(box), HEIGHT / 2), facecolor=fill, edgecolor=border, zorder=3)
        axes.text(box.x, box.y, box.text, fontsize=LETTER * 0.9, color=ink, ha="center", va="center", zorder=4)
    figure.savefig(path, format="png")
