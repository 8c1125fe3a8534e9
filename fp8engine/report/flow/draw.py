"""SVG drawing of a flow's graph, self-contained: no script, no font or style from elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

from fp8engine.report.flow.fold import Folded, fold
from fp8engine.report.flow.graph import Graph
from fp8engine.report.flow.layout import Spot, place
from fp8engine.report.flow.text import INK, ink_of

MARGIN, PAD, TOP = 28.0, 16.0, 99.0  # around the picture, inside a frame, above the first row's middle
ROW, HEIGHT = 62.0, 30.0  # from row to row; of a box
LETTER, SMALL, TINY, WIDE = 12.0, 10.0, 8.5, 0.58  # sizes of type in pixels; a letter's width over its size
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" \
font-family="system-ui, Helvetica, Arial, sans-serif">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
markerUnits="userSpaceOnUse" orient="auto">\
<path d="M0,0.8 L7.5,4 L0,7.2 z" fill="#7a7f87"/></marker></defs>
<style>@media (prefers-color-scheme: dark) {{ .paper {{ fill: #171c23 }} .frame {{ fill: #1d242d; stroke: #4a5766 }} \
.words {{ fill: #c3ccd7 }} .title {{ stroke: #1d242d }} .residual {{ stroke: #7fc47f }} }}</style>"""
TITLE = 'class="words title" font-weight="600" fill="#4a6078" stroke="#f7f9fb" stroke-width="5" paint-order="stroke"'
FORMATS = "below a matmul's name: the formats of input · weight · grad_output, one where they are equal"


def svg(flow: Graph, formats: Mapping[str, Sequence[str]] | None = None) -> str:
    """The graph from top to bottom, equal blocks once in a dashed frame; full names as tool tips.

    formats: of a layer's input, weight and grad_output, by its name, which are written below the name.
    """
    folded = fold(flow)
    kinds = {node: ink_of(flow.nodes[node].kind) for node in folded.labels}
    below = _below(flow, folded, formats or {})
    sizes = {node: max(LETTER * len(label), TINY * len(below.get(node, ""))) for node, label in folded.labels.items()}
    widths = {node: max(HEIGHT, WIDE * size + 20) for node, size in sizes.items()}
    spots, paths = place(folded, widths)
    everything = {spot: None for path in [spots.values(), *paths.values()] for spot in path}
    right = max((spot.x + spot.width / 2 for spot in everything), default=0.0)
    legend, width = _legend(set(kinds.values()))
    if below:
        legend.append(_text(MARGIN, 50, FORMATS, 'class="words" fill="#444"', SMALL))
        width = max(width, WIDE * SMALL * len(FORMATS) + 2 * MARGIN)
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
        style = 'class="frame" fill="#f7f9fb" stroke="#b8c4d0" stroke-dasharray="5 4"'
        frames.append(_rect(place_of, 12, style))
        titles.append(_text(x - 4, y - 22, frame.title, TITLE))
    for node, spot in spots.items():
        full, ink = flow.nodes[node], INK[kinds[node]]
        tip = f"{full.kind}: {full.name}" + (f", in {full.where}" if full.where else "")
        place_of = spot.x - spot.width / 2, spot.y - HEIGHT / 2, spot.width, HEIGHT
        radius = HEIGHT / 2 if kinds[node] in ("residual", "output", "embedding") else 7
        box = _rect(place_of, radius, f'fill="{ink.fill}" stroke="{ink.border}"')
        style = f'text-anchor="middle" fill="{ink.text}"'
        label = _text(spot.x, spot.y + (-1 if node in below else 4), folded.labels[node], style)
        if node in below:
            label += _text(spot.x, spot.y + 10, below[node], style, TINY)
        boxes.append(f"<g><title>{escape(tip)}</title>{box}{label}</g>")
    curves = (_curve(path, kinds[ends[1]] == "residual" and len(path) > 2) for ends, path in paths.items())
    paper = _rect((0, 0, width, height), 0, 'class="paper" fill="#ffffff"')
    return "\n".join([HEAD.format(width, height), paper, *legend, *frames, *curves, *titles, *boxes, "</svg>\n"])


def _below(flow: Graph, folded: Folded, formats: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """The text below a layer's name: formats of all layers that its box stands for."""
    frames = {node: frame for frame in folded.frames for node in frame.nodes}
    found = {}
    for node in folded.labels:
        name, frame = flow.nodes[node].name, frames.get(node)
        names = [name] if frame is None else [f"{block}{name.removeprefix(frame.first)}" for block in frame.blocks]
        if seen := [formats[each] for each in names if each in formats]:
            roles = ["|".join(dict.fromkeys(column)) for column in zip(*seen, strict=True)]
            found[node] = " · ".join(roles if len(set(roles)) > 1 else roles[:1])
    return found


def _curve(path: Sequence[Spot], residual: bool) -> str:
    """From the lower side of the first box through the points to the upper side of the last.

    residual: whether it leads past a branch to where that is added.
    """
    y = [path[0].y + HEIGHT / 2, *(spot.y for spot in path[1:-1]), path[-1].y - HEIGHT / 2]
    bends = [f"M{path[0].x:.1f},{y[0]:.1f}"]
    for (a, b), (y0, y1) in zip(itertools.pairwise(path), itertools.pairwise(y), strict=True):
        bends.append(f"C{a.x:.1f},{(y0 + y1) / 2:.1f} {b.x:.1f},{(y0 + y1) / 2:.1f} {b.x:.1f},{y1:.1f}")
    ink = 'class="residual" stroke="#5b9b5b" stroke-width="2"' if residual else 'stroke="#7a7f87"'
    return f'<path d="{" ".join(bends)}" fill="none" {ink} marker-end="url(#tip)"/>'


def _legend(kinds: set[str]) -> tuple[list[str], float]:
    """(boxes and words for these kinds, the width that they take)."""
    drawn, x = [], MARGIN
    for ink in (ink for kind, ink in INK.items() if kind in kinds):
        drawn.append(_rect((x, 20, 14, 14), 4, f'fill="{ink.fill}" stroke="{ink.border}"'))
        drawn.append(_text(x + 20, 31, ink.legend, 'class="words" fill="#444"', SMALL))
        x += WIDE * SMALL * len(ink.legend) + 36
    return drawn, x


def _rect(place: tuple[float, float, float, float], radius: float, style: str) -> str:
    x, y, width, height = place
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" {style}/>'


def _text(x: float, y: float, text: str, style: str, size: float = LETTER) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" {style}>{escape(text)}</text>'
