"""The HTML page of a report: the template page.html, with its style, its script and its numbers inside.

The page loads nothing: its Content-Security-Policy allows what is written in it, and pictures in data: URLs.
"""

from __future__ import annotations

import base64
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from markupsafe import Markup, escape

from fp8engine.errors import ReportError
from fp8engine.report.facts import ABOVE, Facts
from fp8engine.report.flow import Flow
from fp8engine.report.flow.draw import environment
from fp8engine.report.page import parts, svg
from fp8engine.report.page.data import blob, samples_of
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from jinja2 import Template


# Words of the page with their meaning, in the sentences of docs/README.md; shown on hover, and listed at its end.
WORDS = {
    "amax": "The largest finite magnitude of a tensor, or of a group of its elements.",
    "decision": "One change of a slot's format, with its step and the numbers that caused it.",
    "early warning": "A message that amax/rms of a slot has grown by a factor of four, raised before anything "
    "saturates.",
    "emulated": "FP8 values multiplied without FP8 Tensor Cores, in BF16 or FP32 instructions.",
    "flushed": "An element that is not zero is so small under the scale that its code is zero.",
    "granularity": "The elements that share one scale: the whole tensor, a row, a column or a block.",
    "outlier": "An element, row or channel far larger than the rest of its tensor.",
    "recipe": "The casts of a layer's operands and the rules of its three matmuls.",
    "rms": "The root of the mean square of a tensor's elements.",
    "saturated": "An element larger than the format's largest number under the scale is stored as that largest number.",
    "scale": "The FP32 number that turns FP8 codes back into values: x ≈ q · scale.",
    "slot": "One tensor of one layer, as the engine keeps account of it.",
    "SQNR": "Signal to quantisation noise ratio in decibels: 10 log10 of the sum of squares of the exact values over "
    "that of the errors.",
}
FOUND = re.compile(rf"\b({'|'.join(WORDS)})(?=s?\b)")


class Drawn(Protocol):
    """Anything with a drawing, such as a graph of `fe.flow`."""

    def to_svg(self) -> str:
        """A whole SVG document."""
        ...


def page(report: Facts, losses: Sequence[float] | None = None, flow: Drawn | None = None) -> str:
    """The page as text.  Raises ReportError for losses that are not numbers, or a flow that cannot draw itself."""
    measured = None if losses is None else _numbers(losses)
    samples = samples_of(report)
    numbers = blob(report, samples)
    return _template().render(
        report=report,
        samples=samples,
        losses=measured,
        curve=measured and svg.loss_curve(measured, Counter(decision["step"] for decision in report.decisions)),
        numbers=numbers,
        flow=None if flow is None else _picture(flow, report),
    )


@functools.cache
def _template() -> Template:
    """page.html.  Its drawings, numbers, style and script are this package's, and not escaped."""
    made = environment("page")
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters.update(colour=svg.colour, decibel=parts.decibel, explained=explained)
    made.globals.update(words=WORDS, above=ABOVE, parts=parts, svg=svg)
    return made.get_template("page.html")


def explained(text: str) -> Markup:
    """Text as HTML whose known words say on hover what they mean.

    >>> print(explained("amax < 3"))
    <abbr title="The largest finite magnitude of a tensor, or of a group of its elements.">amax</abbr> &lt; 3
    """
    word = Markup('<abbr title="{}">{}</abbr>')
    return Markup(FOUND.sub(lambda found: word.format(WORDS[found[1]], found[1]), escape(text)))


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
    except (TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"losses: want one number a training step ({error})") from error
    if not found:
        raise ReportError("losses: none given; leave losses= out for a page without the curve")
    return [loss if math.isfinite(loss) else math.nan for loss in found]
