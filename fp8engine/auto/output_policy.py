"""What a layer's result is stored in: a pure function of who reads it and of what its statistics predict.

    16 bits    whatever a norm, a softmax, a residual, a loss or nobody known reads; whatever one reader cannot take as
               FP8 codes under one scale; what would miss its readers' needs
    FP8        the rest: the matmul that makes it writes the codes that all its readers multiply

A need that the user gives for another kind of reader (`fe.auto(min_sqnr_db={"matmul": 22, "norm": 25})`) is kept like
a matmul's.  An activation that stands alone computes in 16 bits, and would decode what had been written; a fused one
is no reader, it is part of the layer.  Hysteresis is policy.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fp8engine.auto.policy import MOST_CHANGES, PATIENCE, Needs, misses
from fp8engine.numerics.formats import BF16, E4M3, E5M2, Format
from fp8engine.numerics.recipe import Cast, PerTensor
from fp8engine.scaling.prediction import Measured


class Reader(NamedTuple):
    """Who reads a result.  kind: as flow has it.  why_not: why it takes no FP8 codes.  e5m2: whether E5M2's too."""

    kind: str
    name: str = ""
    why_not: str = ""
    e5m2: bool = True


class Stored(NamedTuple):
    """What a result is stored in: an FP8 format, or BF16 for the 16 or 32 bits that the layer computes in.

    margin: powers of two free above the predicted amax.  reason: why it changed, or why it is in 16 bits.
    cheaper: looks in a row that would allow FP8.  changes: so far.
    """

    format: Format = BF16
    margin: int = 0
    reason: str = ""
    cheaper: int = 0
    changes: int = 0


def cast_of(format: Format) -> Cast:
    """The cast under which a result is stored: its scale has to be known beforehand."""
    return Cast(format, PerTensor(), "delayed")


def decide_output(measured: Measured | None, readers: Sequence[Reader], needs: Needs, previous: Stored) -> Stored:
    """What a layer's result is stored in from now on.

    measured: None where nothing is known of this look.  needs: the strictest of the readers' (policy.needs_of), an
    infinite SQNR where the recipe names no need for one of their kinds.

    >>> from fp8engine.auto.policy import needs_of
    >>> from fp8engine.numerics.recipe import auto
    >>> decide_output(None, [Reader("matmul"), Reader("norm")], needs_of(auto(), ("matmul", "norm")), Stored()).reason
    'a norm reads it'
    """
    fp8 = previous.format.is_fp8
    why = cannot(readers, needs)
    if not why and (measured is None or measured.amax == 0):
        return previous
    found = None
    if not why and measured is not None:
        wanted = needs.relaxed() if fp8 else needs
        formats = [format for format in (E4M3, E5M2) if format == E4M3 or all(reader.e5m2 for reader in readers)]
        table = {format: measured.predict(cast_of(format), previous.margin) for format in formats}
        found = max(table, key=lambda format: table[format].sqnr_db - 100.0 * table[format].flushed)
        if fp8 and previous.format in table and not misses(table[previous.format], wanted):
            found = previous.format
        why = misses(table[found], wanted)
    if why or found is None:
        if not fp8:
            return previous._replace(reason=why, cheaper=0)
        return Stored(BF16, 0, why, 0, previous.changes + 1)
    if found == previous.format:
        return previous._replace(cheaper=0)
    if previous.changes >= MOST_CHANGES - 1:  # the last one is kept for trouble
        return previous._replace(cheaper=0)
    if not fp8 and previous.changes > 0 and previous.cheaper + 1 < PATIENCE:
        return previous._replace(cheaper=previous.cheaper + 1)
    who = ", ".join(dict.fromkeys(reader.name or reader.kind for reader in readers))
    return Stored(found, previous.margin, f"all that read it read FP8: {who}", 0, previous.changes + 1)


def widened(previous: Stored, margin: int, saturated: float) -> Stored:
    """The margin has grown on the device, because values lay beyond what a predicted scale had room for.

    saturated: share of the elements since the last look.
    """
    if not previous.format.is_fp8 or margin <= previous.margin:
        return previous
    return previous._replace(
        margin=margin, reason=f"{saturated:.2%} of the elements saturated under a predicted scale: margin {margin}"
    )


def cannot(readers: Sequence[Reader], needs: Needs) -> str:
    """Why a result is for 16 bits whatever it holds; "" where it depends on its numbers."""
    if not readers:
        return "nothing is known of what reads it"
    for reader in readers:
        if reader.kind == "activation":
            return "an activation of its own reads it"
        if needs.min_sqnr_db == float("inf") and reader.kind != "matmul":
            return WORDS.get(reader.kind, f"{reader.kind} reads it")
        if reader.why_not:
            return f"{reader.name or reader.kind} reads it, and {reader.why_not}"
    return ""


WORDS = {
    "norm": "a norm reads it",
    "softmax": "a softmax reads it",
    "residual": "it is added to a residual",
    "loss": "a loss reads it",
    "output": "it leaves the model",
    "unknown": "something unknown reads it",
}
