"""The numbers of the page as one small JSON value: every slot's samples, thinned, a number in two or three letters.

A row is a string: WIDTH letters of ALPHABET a sample, most significant first, together a whole number n:

    amax       10^((n - 60000) / 1000), three letters            NONE where the tensor was zero
    sqnr       (n - 1000) / 10 dB                                NONE where the cast is exact, LOST where it makes Inf
    crest      amax / rms = 2^(n / 100)                          NONE where that is no number
    flushed, saturated      0, or the share 10^((n - 1) / 500 - 8) of the elements
    cast       a list of [place in `casts`, columns]; null for columns in which the slot was not seen

At most COLUMNS samples of a slot are shown.  Of more, each column is the worst of several in a row, with the cast of
the last one, so that nothing bad is thinned away.
"""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

from fp8engine.auto.history import Sample
from fp8engine.numerics.formats import FORMATS
from fp8engine.report.facts import Facts
from fp8engine.scaling.table import ROLES

COLUMNS = 100
ALPHABET = string.ascii_letters + string.digits + "-_"  # none that HTML or JSON writes as more than one
WIDTH = {"amax": 3, "sqnr": 2, "crest": 2, "flushed": 2, "saturated": 2}
NONE, LOST = -1, -2  # the last numbers that a row's letters can write


def samples_of(report: Facts) -> dict[str, list[Sample]]:
    """Slot name -> samples, oldest first; empty under fixed recipes."""
    return {slot: samples.evenly() for slot, samples in report.auto.samples.items()}


def blob(report: Facts, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """The value that `to_json` writes into the page.

    steps: the last of each column.  thinned: whether a column may be several samples.  layers: name -> role -> the rows
    above, of those that were sampled, in the report's order.  max, margin: of each cast.
    """
    steps = sorted({sample.step for each in samples.values() for sample in each})
    spans = (each.span for each in report.auto.samples.values())
    every = max(math.ceil(len(steps) / COLUMNS), 1)
    columns = {step: i // every for i, step in enumerate(steps)}
    casts: dict[str, int] = {}
    layers: dict[str, dict[str, dict]] = {layer["name"]: {} for layer in report.layers}
    width = math.ceil(len(steps) / every)
    for slot, seen in samples.items():
        layer, _, role = slot.rpartition(".")
        layers.setdefault(layer, {})[role] = _rows(seen, columns, width, casts)
    return {
        "steps": [steps[min((i + 1) * every, len(steps)) - 1] for i in range(width)],
        "thinned": every > 1 or max(spans, default=1) > 1,
        "casts": [_told(label) for label in casts],
        "layers": [{"name": name, "slots": slots} for name, slots in layers.items() if slots],
        "roles": list(ROLES),
    }


def to_json(value) -> str:
    """JSON that may stand inside a <script>: no NaN, and nothing that could end the element or begin a comment.

    >>> to_json({"</script>": 1})
    '{"\\\\u003c/script\\\\u003e":1}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rows(seen: Sequence[Sample], columns: Mapping[int, int], width: int, casts: dict[str, int]) -> dict[str, Any]:
    parts: list[list[Sample]] = [[] for _ in range(width)]
    for sample in seen:
        parts[columns[sample.step]].append(sample)
    numbers = {
        "amax": [_log(max((each.amax for each in part), default=0.0), 1000, math.log10, 60000) for part in parts],
        "sqnr": [_decibels(min((each.sqnr_db for each in part), default=math.inf)) for part in parts],
        "crest": [_log(max((each.crest for each in part), default=0.0), 100, math.log2, 0) for part in parts],
        "flushed": [_share(max((each.flushed for each in part), default=0.0)) for part in parts],
        "saturated": [_share(max((each.saturated for each in part), default=0.0)) for part in parts],
    }
    rows: dict[str, Any] = {key: "".join(_letters(n, WIDTH[key]) for n in found) for key, found in numbers.items()}
    named = (casts.setdefault(part[-1].cast, len(casts)) if part else None for part in parts)
    rows["cast"] = [[cast, len(list(run))] for cast, run in itertools.groupby(named)]
    if any(sample.nonfinite for sample in seen):
        rows["nonfinite"] = [int(sum(sample.nonfinite for sample in part)) for part in parts]
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
