"""The page of a report as one HTML file: its sections in order, with style, script and numbers inside.

The page loads nothing: its Content-Security-Policy allows what is written in it, and pictures in data: URLs.
"""

from __future__ import annotations

import base64
import math
import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Protocol

from fp8engine import files
from fp8engine.errors import ReportError
from fp8engine.report.flow import Flow
from fp8engine.report.page import parts
from fp8engine.report.page.data import blob, samples_of, to_json
from fp8engine.report.page.decided import decisions
from fp8engine.report.page.svg import format_map, loss_curve, row_height
from fp8engine.report.page.words import listed
from fp8engine.scaling.table import ROLES

DECISIONS_NOTE = "one sentence once; those about the greatest outliers first"


class Drawn(Protocol):
    """Anything with a drawing, such as a graph of `fe.flow`."""

    def to_svg(self) -> str:
        """A whole SVG document."""
        ...


def write(report, path: str | os.PathLike, losses: Sequence[float] | None = None, flow: Drawn | None = None) -> None:
    """Put the page at `path`, whole or not at all.  Raises ReportError where it cannot be written."""
    text = page(report, losses, flow)
    try:
        files.write(path, text.encode(errors="replace"))  # losses and names may hold what UTF-8 does not
    except OSError as error:
        raise ReportError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def page(report, losses: Sequence[float] | None = None, flow: Drawn | None = None) -> str:
    """The page as text.  Raises ReportError for losses that are not numbers, or a flow that cannot draw itself."""
    measured = None if losses is None else _numbers(losses)
    samples = samples_of(report)
    numbers = blob(report, samples)
    sections = [
        parts.section("loss", "Loss", _loss(report, measured)) if measured is not None else "",
        parts.section("formats", "Format of every tensor", _maps(report, numbers), parts.FORMATS_NOTE),
        parts.section("detail", "One layer", parts.detail(numbers)) if numbers["layers"] else "",
        parts.section("outliers", "Outliers", parts.outliers(report), parts.OUTLIERS_NOTE),
        parts.section("decisions", "Decisions", decisions(report, samples), DECISIONS_NOTE),
        parts.section("layers", "Layers", parts.layers(report, numbers)),
        parts.section("left", "Left alone, and why", parts.left(report)),
        parts.section("flow", "Who consumes what", _picture(flow, report)) if flow is not None else "",
        parts.section("memory", "Memory", parts.memory(report)),
        parts.section("words", "Words", listed()),
    ]
    filled = {
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        "subtitle": escape(parts.subtitle(report)),
        "cards": parts.cards(report, samples, measured),
        "sections": "\n".join(filter(None, sections)),
        "data": to_json(numbers),
    }
    pieces = _asset("page.html").split("\u00a7")  # each odd piece is a name; § in what is filled in stays
    return "".join(filled[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _loss(report, losses: Sequence[float]) -> str:
    marks = Counter(decision["step"] for decision in report.decisions)
    legend = '<p class="quiet">pale: each step; strong: smoothed; dotted: steps at which formats changed</p>'
    return loss_curve(losses, marks) + legend


def _maps(report, numbers: dict) -> str:
    if not numbers["layers"]:
        return f'<p class="quiet">{escape(parts.why_no_maps(report))}</p>'
    names = "".join(f"<span><bdi>{escape(layer['name'])}</bdi></span>" for layer in numbers["layers"])
    first, last = numbers["steps"][0], numbers["steps"][-1]
    height = row_height(len(numbers["layers"]))
    columns = "".join(
        f'<figure><figcaption>{role}</figcaption><div class="field">{format_map(numbers, role)}</div>'
        f'<div class="axis"><span>step {first}</span><span>{last}</span></div></figure>'
        for role in numbers["roles"]
    )
    thin = "; a column is the worst of several samples" if numbers["thinned"] else ""
    return (
        f"{parts.legend(numbers)}"
        f'<div class="maps" style="--row:{height}px"><div class="names" aria-hidden="true">{names}</div>{columns}</div>'
        f'<p class="quiet">{len(numbers["steps"])} columns{thin}. Point, or use the arrow keys, to read a cell; '
        "click, or press Enter, to see its layer below.</p>"
        '<p id="status" role="status" aria-live="polite"></p>'
    )


def _picture(flow: Drawn, report) -> str:
    """A drawing as an image: its styles and ids do not mix with the page's, and a script in it does not run."""
    formats = {x["name"]: [x[role]["format"] for role in ROLES] for x in report.layers if x["recipe"] != "none"}
    try:
        drawn = flow.to_svg(formats) if isinstance(flow, Flow) else flow.to_svg()
        code = base64.b64encode(drawn.encode()).decode()
    except (AttributeError, UnicodeError) as error:
        raise ReportError(f"flow: {type(flow).__name__} has no to_svg() that gives text; leave flow= out") from error
    return f'<div class="flow"><img alt="Who consumes what, as a graph" src="data:image/svg+xml;base64,{code}"></div>'


def _numbers(losses: Sequence[float]) -> list[float]:
    """One number a step; what is not finite breaks the curve."""
    try:
        found = [float(loss) for loss in losses]
    except (TypeError, ValueError) as error:
        raise ReportError(f"losses: want one number a training step ({error})") from error
    if not found:
        raise ReportError("losses: none given; leave losses= out for a page without the curve")
    return [loss if math.isfinite(loss) else math.nan for loss in found]


def _asset(name: str) -> str:
    return resources.files("fp8engine.report.page").joinpath(name).read_text(encoding="utf-8")
