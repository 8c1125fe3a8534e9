"""Small pieces of the page as HTML: tables, casts with their colour, names, decibels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fp8engine.report.page.svg import colour
from fp8engine.report.page.words import explained


def table(head: Sequence[str], rows: str, mark: str = "", scrolls: str = "") -> str:
    """A table.  rows: HTML.  mark: its id.  scrolls: the label of the box in which it scrolls; "": in none."""
    titles = "".join(f'<th scope="col">{explained(title)}</th>' for title in head)
    place = f' id="{mark}"' if mark else ""
    made = f"<table{place}><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0" aria-label="{scrolls}">{made}</div>' if scrolls else made


def chip(cast: str) -> str:
    """A cast beside its colour."""
    return f'<span class="chip" style="--c:{colour(cast)}">{escape(cast)}</span>'


def name(text: str) -> str:
    """A name that loses its beginning where there is no room for it; whole on hover.

    >>> name("up.input")
    '<code class="name" title="up.input"><bdi>up.input</bdi></code>'
    """
    return f'<code class="name" title="{escape(text)}"><bdi>{escape(text)}</bdi></code>'


def decibel(value: float | None) -> str:
    """A SQNR as text."""
    return "–" if value is None else f"{value:.1f} dB" if math.isfinite(value) else "exact"
