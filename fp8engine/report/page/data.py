"""The numbers of the page as one small JSON value: every slot's samples, thinned, a number in two or three letters.

A row is a string: WIDTH letters of ALPHABET a sample, most significant first, together a whole number n:

    amax       10^((n - 60000) / 1000), three letters            NONE where the tensor was zero
    sqnr       (n - 1000) / 10 dB                                NONE where the cast is exact, LOST where it makes Inf
    crest      amax / rms = 2^(n / 100)                          NONE where that is no number
    flushed, saturated      0, or the share 10^((n - 1) / 500 - 8) of the elements
    cast       a list of [place in `casts`, columns]; null for columns in which the slot was not seen

A column is a sample of each slot.  Of a long training it is the worst of several in a row, with the cast of the last
one, so that nothing bad is thinned away (`Samples.evenly`, of one span for all slots).
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8engine.auto.history import Sample
from fp8engine.numerics.formats import FORMATS
from fp8engine.report.facts import Facts
from fp8engine.scaling.table import ROLES

ALPHABET = string.ascii_letters + string.digits + "-_"  # none that HTML or JSON writes as more than one
NONE, LOST = -1, -2  # the last numbers that a row's letters can write


def samples_of(report: Facts) -> dict[str, list[Sample]]:
    """Slot name -> samples, oldest first, all thinned to the longest span of a slot; empty under fixed recipes."""
    span = _span(report)
    return {slot: samples.evenly(span) for slot, samples in report.auto.samples.items()}


def blob(report: Facts, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """The value that is written into the page as JSON.

    steps: the last of each column.  thinned: whether a column may be several samples.  layers: name -> role -> the rows
    above, of those that were sampled, in the report's order.  max, margin: of each cast.
    """
    span = _span(report)
    steps = {step // span: step for step in sorted(sample.step for each in samples.values() for sample in each)}
    casts: dict[str, int] = {}
    layers: dict[str, dict[str, dict]] = {layer["name"]: {} for layer in report.layers}
    for slot, seen in samples.items():
        layer, _, role = slot.rpartition(".")
        at = {sample.step // span: sample for sample in seen}
        layers.setdefault(layer, {})[role] = _rows([at.get(column) for column in steps], casts)
    return {
        "steps": list(steps.values()),
        "thinned": span > 1,
        "casts": [_told(label) for label in casts],
        "layers": [{"name": name, "slots": slots} for name, slots in layers.items() if slots],
        "roles": list(ROLES),
    }


def _span(report: Facts) -> int:
    """Steps in a column."""
    return max((samples.span for samples in report.auto.samples.values()), default=1)


def _rows(columns: Sequence[Sample | None], casts: dict[str, int]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        key: "".join(_letters(NONE if sample is None else number(sample), width) for sample in columns)
        for key, (width, number) in NUMBERS.items()
    }
    named = (None if sample is None else casts.setdefault(sample.cast, len(casts)) for sample in columns)
    rows["cast"] = [[cast, len(list(run))] for cast, run in itertools.groupby(named)]
    if any(sample is not None and sample.nonfinite for sample in columns):
        rows["nonfinite"] = [0 if sample is None else sample.nonfinite for sample in columns]
    return rows


def _letters(number: int, width: int) -> str:
    """A number in letters; a negative one counts back from the last that there is.

    >>> _letters(65, 2), _letters(NONE, 2)
    ('bb', '__')
    """
    number = number if number < 0 else min(number, 64**width + LOST - 1)
    return "".join(ALPHABET[number >> 6 * place & 63] for place in reversed(range(width)))


def _log(value: float, times: int, log, zero: int) -> int:
    return max(round(times * log(value)) + zero, 0) if value > 0 and math.isfinite(value) else NONE


def _decibels(value: float) -> int:
    if math.isfinite(value):
        return max(round(10 * value) + 1000, 0)
    return NONE if value > 0 else LOST


def _share(value: float) -> int:
    return max(round(500 * (math.log10(value) + 8)) + 1, 1) if value > 0 else 0


def _told(label: str) -> dict[str, Any]:
    """A cast.  max: the largest value of its format, if that is FP8: what amax is scaled to."""
    format, margin = FORMATS.get(label.partition("/")[0]), label.partition(" margin ")[2]
    return {"label": label, "max": format.max if format and format.is_fp8 else None, "margin": int(margin or 0)}


NUMBERS: dict[str, tuple[int, Callable[[Sample], int]]] = {  # letters, and what they write of a sample
    "amax": (3, lambda sample: _log(sample.amax, 1000, math.log10, 60000)),
    "sqnr": (2, lambda sample: _decibels(sample.sqnr_db)),
    "crest": (2, lambda sample: _log(sample.crest, 100, math.log2, 0)),
    "flushed": (2, lambda sample: _share(sample.flushed)),
    "saturated": (2, lambda sample: _share(sample.saturated)),
}
