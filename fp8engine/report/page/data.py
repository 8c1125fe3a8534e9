"""What the page's script draws, as one small JSON value: every slot's looks, thinned and in whole numbers.

    amax       thousandths of a decade: 1000 log10 amax      null where the tensor was zero
    sqnr       tenths of a dB          null where the cast is exact, false where it turns a finite value into Inf
    crest      hundredths of a power of two: 100 log2(amax / rms)
    flushed, saturated      in 1e-5 of the elements
    cast       a place in `casts`                            null where the slot was not seen at that step

At most COLUMNS looks of a slot are shown.  Of more, each column is the worst of `every` looks in a row, and the last
one's cast, so that nothing bad is thinned away.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8engine.controller.history import Look
from fp8engine.errors import UnknownName
from fp8engine.formats import Format
from fp8engine.scaling import ROLES

COLUMNS = 100


def looks_of(report) -> dict[str, list[Look]]:
    """Slot name -> looks, oldest first, of everyone who decides in the model; empty under fixed recipes."""
    found: dict[str, list[Look]] = {}
    for controller in report.controllers:
        found |= {slot: list(looks) for slot, looks in list(controller.history.looks.items()) if looks}
    return found


def blob(report, looks: Mapping[str, Sequence[Look]]) -> dict[str, Any]:
    """The value itself.

    steps: of each column.  layers: name -> role -> the rows above, in the report's order.  max, margin: of each cast.
    """
    steps = sorted({look.step for each in looks.values() for look in each})
    every = max(math.ceil(len(steps) / COLUMNS), 1)
    columns = {step: i // every for i, step in enumerate(steps)}
    casts: dict[str, int] = {}
    layers: dict[str, dict[str, dict]] = {name: {} for name in _names(report, looks)}
    width = math.ceil(len(steps) / every)
    for slot, seen in looks.items():
        layer, _, role = slot.rpartition(".")
        layers[layer][role] = _rows(seen, columns, width, casts)
    return {
        "steps": [steps[min((i + 1) * every, len(steps)) - 1] for i in range(width)],
        "every": every,
        "casts": [{"label": label, "max": _max(label), "margin": _margin(label)} for label in casts],
        "layers": [{"name": name, "slots": slots} for name, slots in layers.items()],
        "roles": list(ROLES),
    }


def to_json(value) -> str:
    """JSON that may stand inside a <script>: no NaN, and nothing that could end the element or begin a comment.

    >>> to_json({"</script>": 1})
    '{"\\\\u003c/script\\\\u003e":1}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _names(report, looks: Iterable[str]) -> list[str]:
    """Layers that were looked at: in the report's order, then any that it calls otherwise."""
    seen = dict.fromkeys(slot.rpartition(".")[0] for slot in looks)
    known = [layer["name"] for layer in report.layers if layer["name"] in seen]
    return [*known, *(name for name in seen if name not in set(known))]


def _rows(seen: Sequence[Look], columns: Mapping[int, int], width: int, casts: dict[str, int]) -> dict[str, list]:
    parts: list[list[Look]] = [[] for _ in range(width)]
    for look in seen:
        parts[columns[look.step]].append(look)
    rows: dict[str, list] = {
        "cast": [casts.setdefault(part[-1].cast, len(casts)) if part else None for part in parts],
        "amax": [_log(max(look.amax for look in part), 1000, math.log10) if part else None for part in parts],
        "sqnr": [_decibels(min(look.sqnr_db for look in part)) if part else None for part in parts],
        "crest": [_log(max(map(_crest, part)), 100, math.log2) if part else None for part in parts],
        "flushed": [_whole(1e5 * max(look.flushed for look in part)) if part else None for part in parts],
        "saturated": [_whole(1e5 * max(look.saturated for look in part)) if part else None for part in parts],
    }
    if any(look.nonfinite for look in seen):
        rows["nonfinite"] = [int(sum(look.nonfinite for look in part)) for part in parts]
    return rows


def _crest(look: Look) -> float:
    return look.amax / look.rms if look.rms > 0 else 0.0


def _log(value: float, times: int, log) -> int | None:
    return round(times * log(value)) if value > 0 and math.isfinite(value) else None


def _decibels(value: float) -> int | bool | None:
    if math.isfinite(value):
        return round(10 * value)
    return None if value > 0 else False


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None


def _max(label: str) -> float | None:
    """The largest value of a cast's format, if that is FP8: what amax is scaled to."""
    try:
        format = Format.named(label.partition("/")[0])
    except UnknownName:
        return None
    return format.max if format.is_fp8 else None


def _margin(label: str) -> int:
    return int(label.rpartition(" margin ")[2]) if " margin " in label else 0
