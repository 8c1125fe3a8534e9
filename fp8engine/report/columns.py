"""Text tables in columns, as wide as the terminal; a name stays whole, or loses its beginning."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

# Characters that a column keeps: of names, of text that goes on below itself, and any where nothing else helps.
NAME, SHORT_NAME, TEXT, NARROWEST = 38, 24, 24, 5


def terminal_width() -> int | None:
    """Columns of the terminal; None where standard output is a file or a pipe, whose lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], width: int | None = None) -> Iterator[str]:
    r"""Lines: the first row, a rule, the other rows.  What is too long for its column goes on in the line below.

    A column without a cell that holds something is left out.
    The first column is of names, which lose their beginning before words of the others are broken.

    >>> print(*columns([["layer", "note"], ["blocks.0.up", "never ran"]], 22), sep="\n")
    layer       │ note
    ────────────┼──────
    blocks.0.up │ never
                │ ran
    >>> print(*columns([["layer", "note"], ["transformer.blocks.0-29.attention.up", "never"]], 32), sep="\n")
    layer              │ note
    ───────────────────┼──────
    …0-29.attention.up │ never
    """
    table = [column for i, column in enumerate(zip(*rows, strict=True)) if i == 0 or any(column[1:])]
    rows = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in table]
    longest = [max(len(word) for cell in column for word in cell.split() or [""]) for column in table]
    text = [max(word, min(size, TEXT)) for word, size in zip(longest, widths, strict=True)][1:]
    name, short = min(NAME, widths[0]), min(SHORT_NAME, widths[0])
    stages = [widths[0], *text], [name, *text], [name, *longest[1:]], [short, *longest[1:]], [NARROWEST] * len(widths)
    for least in stages:
        while width is not None and sum(widths) + 3 * len(widths) - 3 > width:
            wide = [i for i, size in enumerate(widths) if size > least[i]]
            if not wide:
                break
            widths[max(wide, key=lambda i: widths[i])] -= 1
    folded = [[[shortened(name, widths[0])], *map(_folded, cells, widths[1:])] for name, *cells in rows]
    widths = [max(len(line) for cell in column for line in cell or [""]) for column in zip(*folded, strict=True)]
    for i, parts in enumerate(folded):
        for line in itertools.zip_longest(*parts, fillvalue=""):
            yield " │ ".join(part.ljust(size) for part, size in zip(line, widths, strict=True)).rstrip()
        if i == 0:
            yield "─┼─".join("─" * size for size in widths)


def shortened(name: str, width: int) -> str:
    """A name of at most `width` characters: behind an ellipsis as many of its last parts as fit.

    >>> shortened("model.layers.0-29.mlp.down_proj × 30", 32)
    '…layers.0-29.mlp.down_proj × 30'
    """
    if len(name) <= width:
        return name
    end = name[len(name) - width :]
    _, dot, parts = end.partition(".")
    return f"…{parts if dot else end[1:]}"


def named(names: Sequence[str]) -> str:
    """One name for several.

    >>> named(["up"]), named(["up", "gate", "down"])
    ('up', 'up and 2 more')
    """
    return f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]


def wrapped(lines: Sequence[str], width: int | None) -> Iterator[str]:
    """The lines, each continued below itself where it is longer than `width`; words, and so names, stay whole."""
    for line in lines:
        yield from (
            [line]
            if width is None
            else textwrap.wrap(line, width, break_on_hyphens=False, break_long_words=False, subsequent_indent="  ")
        )


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
