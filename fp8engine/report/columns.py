"""Rows of text as a table of a given width; the time is linear in the number of cells."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence

NARROWEST = 5  # the widest column gives way first, and none below this


def columns(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    r"""Lines: the first row, a rule, the other rows.  What is too long for its column goes on in the line below.

    >>> print(*columns([["layer", "note"], ["blocks.0.up", "never ran"]], 23), sep="\n")
    │ layer    │ note     │
    ├──────────┼──────────┤
    │ blocks.0 │ never    │
    │ .up      │ ran      │
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 3 * len(widths) + 1 > width and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    for i, row in enumerate(rows):
        cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield f"│ {' │ '.join(part.ljust(width) for part, width in zip(line, widths, strict=True))} │"
        if i == 0:
            yield f"├{'┼'.join('─' * (width + 2) for width in widths)}┤"


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
