"""Drawings of a flow's graph: an SVG without script, font or style from elsewhere, and the source of Mermaid's."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fp8engine.report.flow.graph import Folded, Graph, fold
from fp8engine.report.flow.layout import Spot, place

if TYPE_CHECKING:
    from jinja2 import Environment, Template


class Ink(NamedTuple):
    """Colours of a kind of nodes: of the box, its border, its text.  legend: what the kind is called beside them."""

    fill: str
    border: str
    text: str
    legend: str


INK = {
    "matmul": Ink("#1f4e79", "#163a5c", "#ffffff", "matmul"),
    "attention": Ink("#e6dcf5", "#8e6bbf", "#3b2363", "attention, softmax"),
    "norm": Ink("#fbe9c6", "#d19a2a", "#5c3f05", "norm"),
    "residual": Ink("#dff0df", "#5b9b5b", "#1e4a1e", "residual"),
    "activation": Ink("#fbdccb", "#d9774a", "#632a0c", "activation"),
    "embedding": Ink("#dce9f5", "#7fa6cc", "#1f3d5c", "input, embedding"),
    "loss": Ink("#f8d3d6", "#c4515b", "#5f141b", "loss"),
    "output": Ink("#eeeeee", "#8a8a8a", "#333333", "output"),
    "unknown": Ink("#ffffff", "#8a8a8a", "#333333", "other"),
}
SAME_INK = {"softmax": "attention", "input": "embedding"}
MARGIN, PAD, TOP = 28.0, 16.0, 99.0  # around the picture, inside a frame, above the first row's middle
ROW, HEIGHT = 62.0, 30.0  # from row to row; of a box
LETTER, SMALL, TINY, WIDE = 12.0, 10.0, 8.5, 0.58  # sizes of type in pixels; a letter's width over its size
FORMATS = "below a matmul's name: the formats of input · weight · grad_output, one where they are equal"


def svg(flow: Graph, formats: Mapping[str, Sequence[str]] | None = None) -> str:
    """The graph from top to bottom, equal blocks once in a dashed frame; full names as tool tips.

    formats: of a layer's input, weight and grad_output, by its name, which are written below the name.
    """
    folded = fold(flow)
    kinds, below = _kinds(flow, folded), _below(flow, folded, formats or {})
    sizes = {node: max(LETTER * len(label), TINY * len(below.get(node, ""))) for node, label in folded.labels.items()}
    spots, paths = place(folded, {node: max(HEIGHT, WIDE * size + 20) for node, size in sizes.items()})
    everything = {spot: None for path in [spots.values(), *paths.values()] for spot in path}
    right = max((spot.x + spot.width / 2 for spot in everything), default=0.0)
    legend, width = [], MARGIN
    for ink in (ink for kind, ink in INK.items() if kind in kinds.values()):
        legend.append((width, ink))
        width += WIDE * SMALL * len(ink.legend) + 36
    width = max(width, right + 2 * (MARGIN + PAD), (WIDE * SMALL * len(FORMATS) + 2 * MARGIN) * bool(below))
    for spot in everything:
        spot.x, spot.y = spot.x + (width - right) / 2, TOP + ROW * spot.row
    height = max((spot.y for spot in everything), default=TOP) + HEIGHT / 2 + MARGIN + PAD
    frames = []
    for frame in folded.frames:
        inside = [spots[node] for node in frame.nodes]
        y, bottom = min(spot.y for spot in inside), max(spot.y for spot in inside)
        crossing = [spot for ends, path in paths.items() if {*ends} & {*frame.nodes} for spot in path[1:-1]]
        inside += [spot for spot in crossing if y <= spot.y <= bottom and spot.lane == inside[0].lane]
        x, end = min(spot.x - spot.width / 2 for spot in inside), max(spot.x + spot.width / 2 for spot in inside)
        across = max(end - x, WIDE * LETTER * len(frame.title)) + 2 * PAD
        frames.append(((x - PAD, y - 37, across, bottom - y + 60), frame.title))
        width = max(width, x - PAD + across + MARGIN)
    drawn = {"width": width, "height": height, "legend": legend, "frames": frames, "spots": spots, "paths": paths}
    return _template().render(drawn, nodes=flow.nodes, labels=folded.labels, kinds=kinds, below=below)


@functools.cache
def _template() -> Template:
    made = environment("flow")
    made.filters.update(px="{:.1f}".format, bends=_bends)
    made.globals.update(INK=INK, FORMATS=FORMATS, MARGIN=MARGIN, PAD=PAD, HEIGHT=HEIGHT)
    made.globals.update(LETTER=LETTER, SMALL=SMALL, TINY=TINY)
    return made.get_template("graph.svg")


def environment(folder: str) -> Environment:
    """The templates in a folder of the report; what they are given is escaped, but for what they call safe.

    asset(name), in a template: the text of another file of the folder.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # torch brings it; few programs draw

    loader = PackageLoader("fp8engine.report", folder)
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    made.trim_blocks = made.lstrip_blocks = True
    made.globals["asset"] = lambda name: loader.get_source(made, name)[0]
    return made


def mermaid(flow: Graph) -> str:
    """The graph as a Mermaid flowchart, which GitHub and notebooks render.

    >>> import torch
    >>> from fp8engine.report.flow import record
    >>> print(mermaid(record(torch.nn.Linear(2, 2), torch.ones(1, 2))))
    flowchart TD
    n0["[0]"]:::embedding
    n1["(model)"]:::matmul
    n2["output"]:::output
    n0 --> n1
    n1 --> n2
    classDef matmul fill:#1f4e79,stroke:#163a5c,color:#ffffff
    classDef embedding fill:#dce9f5,stroke:#7fa6cc,color:#1f3d5c
    classDef output fill:#eeeeee,stroke:#8a8a8a,color:#333333
    """
    folded = fold(flow)
    kinds = _kinds(flow, folded)
    # Markup between Mermaid's quotes is written as its decimal codes.
    told = lambda label: re.sub(r'[<>"&#;]', lambda found: f"#{ord(found[0])};", label)  # noqa: E731 - two uses
    boxes = {node: f'n{node}["{told(label)}"]:::{kinds[node]}' for node, label in folded.labels.items()}
    lines = ["flowchart TD"]
    for number, frame in enumerate(folded.frames):
        inside = [f"    {boxes.pop(node)}" for node in frame.nodes]
        lines += [f'subgraph block{number}["{told(frame.title)}"]', *inside, "end"]
    lines += [*boxes.values(), *(f"n{i} --> n{j}" for i, j in folded.edges)]
    used = {kind: ink for kind, ink in INK.items() if kind in kinds.values()}
    lines += [f"classDef {kind} fill:{ink.fill},stroke:{ink.border},color:{ink.text}" for kind, ink in used.items()]
    return "\n".join(lines)


def _kinds(flow: Graph, folded: Folded) -> dict[int, str]:
    """The key of INK for each node that is drawn."""
    return {node: SAME_INK.get(kind := flow.nodes[node].kind, kind) for node in folded.labels}


def _below(flow: Graph, folded: Folded, formats: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """The text below a layer's name: formats of all layers that its box stands for."""
    frames = {node: frame for frame in folded.frames for node in frame.nodes}
    found = {}
    for node in folded.labels:
        name, frame = flow.nodes[node].name, frames.get(node)
        names = [name] if frame is None else [f"{each}{name.removeprefix(frame.blocks[0])}" for each in frame.blocks]
        if seen := [formats[each] for each in names if each in formats]:
            roles = ["|".join(dict.fromkeys(column)) for column in zip(*seen, strict=True)]
            found[node] = " · ".join(roles if len(set(roles)) > 1 else roles[:1])
    return found


def _bends(path: Sequence[Spot]) -> str:
    """From the lower side of the first box through the points to the upper side of the last."""
    y = [path[0].y + HEIGHT / 2, *(spot.y for spot in path[1:-1]), path[-1].y - HEIGHT / 2]
    bends = [f"M{path[0].x:.1f},{y[0]:.1f}"]
    for (a, b), (y0, y1) in zip(itertools.pairwise(path), itertools.pairwise(y), strict=True):
        bends.append(f"C{a.x:.1f},{(y0 + y1) / 2:.1f} {b.x:.1f},{(y0 + y1) / 2:.1f} {b.x:.1f},{y1:.1f}")
    return " ".join(bends)
