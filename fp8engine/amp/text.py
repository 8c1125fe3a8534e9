"""Text of amp's reports, a table with lines below it and names of dtypes."""

from __future__ import annotations

import io

import torch

from fp8engine.numerics.formats import BY_DTYPE, word


def precision(dtype: torch.dtype) -> str:
    """A dtype as reports print it: "FP16", or torch's own name for what no format of ours is."""
    return BY_DTYPE[dtype].name if dtype in BY_DTYPE else word(dtype)


def as_text(table, lines: list[str], width: int) -> str:
    """A rich table and lines below it as plain text: names are text, [brackets] in them no markup."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False, markup=False, emoji=False)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return out.getvalue()
