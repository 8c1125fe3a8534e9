"""Rows of text as a table of a given width; the time is linear in the number of cells."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence

NARROWEST = 5  # no column gives way below this


def columns(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    r"""Lines: the first row, a rule, the other rows.  What is too long for its column goes on in the line below.

    Words, and so the names of layers, stay whole where the width allows; then those of the first column, the names.

    >>> print(*columns([["layer", "note"], ["blocks.0.up", "never ran"]], 23), sep="\n")
    │ layer       │ note  │
    ├─────────────┼───────┤
    │ blocks.0.up │ never │
    │             │ ran   │
    """
    table = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in table]
    longest = [max(len(word) for cell in column for word in cell.split() or [""]) for column in table]
    for least in (longest, [longest[0], *[NARROWEST] * (len(widths) - 1)], [NARROWEST] * len(widths)):
        while sum(widths) + 3 * len(widths) + 1 > width:
            wide = [i for i, size in enumerate(widths) if size > least[i]]
            if not wide:
                break
            widths[max(wide, key=lambda i: widths[i])] -= 1
    for i, row in enumerate(rows):
        cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield f"│ {' │ '.join(part.ljust(width) for part, width in zip(line, widths, strict=True))} │"
        if i == 0:
            yield f"├{'┼'.join('─' * (width + 2) for width in widths)}┤"


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
