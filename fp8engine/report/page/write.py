"""The page of a report as one HTML file: the template page.html, with style, script and numbers inside.

The page loads nothing: its Content-Security-Policy allows what is written in it, and pictures in data: URLs.
"""

from __future__ import annotations

import base64
import functools
import math
import os
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Protocol

from fp8engine import files
from fp8engine.errors import ReportError
from fp8engine.report.facts import Facts
from fp8engine.report.flow import Flow
from fp8engine.report.outliers import ABOVE
from fp8engine.report.page import parts, svg
from fp8engine.report.page.data import blob, samples_of, to_json
from fp8engine.report.page.decided import decisions
from fp8engine.report.page.words import WORDS, explained
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from jinja2 import Template


class Drawn(Protocol):
    """Anything with a drawing, such as a graph of `fe.flow`."""

    def to_svg(self) -> str:
        """A whole SVG document."""
        ...


def write(
    report: Facts, path: str | os.PathLike, losses: Sequence[float] | None = None, flow: Drawn | None = None
) -> None:
    """Put the page at `path`, whole or not at all.  Raises ReportError where it cannot be written."""
    text = page(report, losses, flow)
    try:
        files.write(path, text.encode(errors="replace"))  # losses and names may hold what UTF-8 does not
    except OSError as error:
        raise ReportError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def page(report: Facts, losses: Sequence[float] | None = None, flow: Drawn | None = None) -> str:
    """The page as text.  Raises ReportError for losses that are not numbers, or a flow that cannot draw itself."""
    measured = None if losses is None else _numbers(losses)
    samples = samples_of(report)
    numbers = blob(report, samples)
    cards = parts.cards(report, samples, measured)
    return _template().render(
        report=report,
        numbers=numbers,
        recipes=parts.recipes(report),
        cards=cards,
        across=parts.across(len(cards)),
        layers=parts.troubled(report),
        losses=measured,
        curve=measured and svg.loss_curve(measured, Counter(decision["step"] for decision in report.decisions)),
        why_no_maps=parts.why_no_maps(report),
        casts=parts.casts(numbers),
        maps={role: svg.format_map(numbers, role) for role in numbers["roles"]},
        row_height=svg.row_height(len(numbers["layers"])),
        names=parts.short_names(numbers),
        places={layer["name"]: i for i, layer in enumerate(numbers["layers"])},
        outliers=parts.outliers(report),
        decided=decisions(report, samples),
        left=parts.left(report),
        flow=None if flow is None else _picture(flow, report),
        data=to_json(numbers),
    )


@functools.cache
def _template() -> Template:
    """page.html.  What it is given is escaped, but for the drawings, numbers, style and script of this package."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # torch brings it; few programs write a page

    made = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        colour=svg.colour, decibel=parts.decibel, explained=explained, shares=parts.shares, largest=parts.largest
    )
    made.globals.update(style=_asset("page.css"), script=_asset("page.js"), words=WORDS)
    made.globals.update(paints=parts.PAINTS, above=ABOVE, svg=svg)
    return made.get_template("page.html")


def _picture(flow: Drawn, report: Facts) -> str:
    """A drawing in base64, for an image: its styles and ids do not mix with the page's, and no script in it runs."""
    formats = {x["name"]: [x[role]["format"] for role in ROLES] for x in report.layers if x["recipe"] != "none"}
    try:
        drawn = flow.to_svg(formats) if isinstance(flow, Flow) else flow.to_svg()
        return base64.b64encode(drawn.encode()).decode()
    except (AttributeError, UnicodeError) as error:
        raise ReportError(f"flow: {type(flow).__name__} has no to_svg() that gives text; leave flow= out") from error


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
