"""Text of amp's reports, a table with lines below it and names of dtypes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import torch

from fp8engine.numerics.formats import BY_DTYPE, word

FOLD, RIGHT = {"overflow": "fold"}, {"justify": "right"}  # of a column: long names, numbers


def precision(dtype: torch.dtype) -> str:
    """A dtype as reports print it: "FP16", or torch's own name for what no format of ours is."""
    return BY_DTYPE[dtype].name if dtype in BY_DTYPE else word(dtype)


def as_text(
    title: str, columns: Sequence[tuple[str, dict]], rows: Iterable[Sequence[str]], lines: Iterable[str], width: int
) -> str:
    """A table and lines below it as plain text: names are text, [brackets] in them no markup.

    columns: headings, with rich's options; one with a `ratio` fills the width.  rows: an empty one is a rule.
    """
    from rich.console import Console  # here: importing rich draws from Python's random numbers
    from rich.table import Table

    table = Table(title=title, title_justify="left", expand=any("ratio" in options for _, options in columns))
    for heading, options in columns:
        table.add_column(heading, **options)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return out.getvalue()
