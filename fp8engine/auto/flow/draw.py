"""SVG drawing of a flow's graph, self-contained: no script, no font or style from elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from fp8engine.auto.flow.fold import fold
from fp8engine.auto.flow.layout import Spot, place
from fp8engine.auto.flow.text import INK, ink_of

if TYPE_CHECKING:
    from fp8engine.auto.flow.result import Flow

MARGIN, PAD, TOP = 28.0, 16.0, 99.0  # around the picture, inside a frame, above the first row's middle
ROW, HEIGHT = 62.0, 30.0  # from row to row; of a box
LETTER, SMALL, WIDE = 12.0, 10.0, 0.58  # sizes of type in pixels; a letter's width over its size
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" \
font-family="system-ui, Helvetica, Arial, sans-serif">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0,0.8 L7.5,4 L0,7.2 z" fill="#7a7f87"/></marker></defs>"""


def svg(flow: Flow) -> str:
    """The graph from top to bottom, equal blocks once in a dashed frame; full names as tool tips."""
    folded = fold(flow)
    kinds = {node: ink_of(flow.nodes[node].kind) for node in folded.labels}
    widths = {node: max(HEIGHT, WIDE * LETTER * len(label) + 20) for node, label in folded.labels.items()}
    spots, paths = place(folded, widths)
    everything = {spot: None for path in [spots.values(), *paths.values()] for spot in path}
    right = max((spot.x + spot.width / 2 for spot in everything), default=0.0)
    legend, width = _legend(set(kinds.values()))
    width = max(width, right + 2 * (MARGIN + PAD))
    for spot in everything:
        spot.x, spot.y = spot.x + (width - right) / 2, TOP + ROW * spot.row
    height = max((spot.y for spot in everything), default=TOP) + HEIGHT / 2 + MARGIN + PAD
    frames, titles, boxes = [], [], []
    for frame in folded.frames:
        inside = [spots[node] for node in frame.nodes]
        y, bottom = min(spot.y for spot in inside), max(spot.y for spot in inside)
        crossing = [spot for ends, path in paths.items() if {*ends} & {*frame.nodes} for spot in path[1:-1]]
        inside += [spot for spot in crossing if y <= spot.y <= bottom and spot.lane == inside[0].lane]
        x, end = min(spot.x - spot.width / 2 for spot in inside), max(spot.x + spot.width / 2 for spot in inside)
        place_of = x - PAD, y - 37, max(end - x, WIDE * LETTER * len(frame.title)) + 2 * PAD, bottom - y + 60
        width = max(width, sum(place_of[::2]) + MARGIN)
        frames.append(_rect(place_of, 12, 'fill="#f7f9fb" stroke="#b8c4d0" stroke-dasharray="5 4"'))
        style = 'font-weight="600" fill="#4a6078" stroke="#f7f9fb" stroke-width="5" paint-order="stroke"'
        titles.append(_text(x - 4, y - 22, frame.title, style))
    for node, spot in spots.items():
        full, ink = flow.nodes[node], INK[kinds[node]]
        tip = f"{full.kind}: {full.name}" + (f", in {full.where}" if full.where else "")
        place_of = spot.x - spot.width / 2, spot.y - HEIGHT / 2, spot.width, HEIGHT
        radius = HEIGHT / 2 if kinds[node] in ("residual", "output", "embedding") else 7
        box = _rect(place_of, radius, f'fill="{ink.fill}" stroke="{ink.border}"')
        label = _text(spot.x, spot.y + 4, folded.labels[node], f'text-anchor="middle" fill="{ink.text}"')
        boxes.append(f"<g><title>{escape(tip)}</title>{box}{label}</g>")
    curves, paper = map(_curve, paths.values()), _rect((0, 0, width, height), 0, 'fill="#ffffff"')
    return "\n".join([HEAD.format(width, height), paper, *legend, *frames, *curves, *titles, *boxes, "</svg>\n"])


def _curve(path: Sequence[Spot]) -> str:
    """From the lower side of the first box through the points to the upper side of the last."""
    y = [path[0].y + HEIGHT / 2, *(spot.y for spot in path[1:-1]), path[-1].y - HEIGHT / 2]
    bends = [f"M{path[0].x:.1f},{y[0]:.1f}"]
    for (a, b), (y0, y1) in zip(itertools.pairwise(path), itertools.pairwise(y), strict=True):
        bends.append(f"C{a.x:.1f},{(y0 + y1) / 2:.1f} {b.x:.1f},{(y0 + y1) / 2:.1f} {b.x:.1f},{y1:.1f}")
    return f'<path d="{" ".join(bends)}" fill="none" stroke="#7a7f87" marker-end="url(#tip)"/>'


def _legend(kinds: set[str]) -> tuple[list[str], float]:
    """(boxes and words for these kinds, the width that they take)."""
    drawn, x = [], MARGIN
    for ink in (ink for kind, ink in INK.items() if kind in kinds):
        drawn.append(_rect((x, 20, 14, 14), 4, f'fill="{ink.fill}" stroke="{ink.border}"'))
        drawn.append(_text(x + 20, 31, ink.legend, 'fill="#444"', SMALL))
        x += WIDE * SMALL * len(ink.legend) + 36
    return drawn, x


def _rect(place: tuple[float, float, float, float], radius: float, style: str) -> str:
    x, y, width, height = place
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" {style}/>'


def _text(x: float, y: float, text: str, style: str, size: float = LETTER) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" {style}>{escape(text)}</text>'
