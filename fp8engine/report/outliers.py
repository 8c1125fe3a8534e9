"""Standing outliers: slots with an element far above the others, whether it is growing (auto/alarm.py) or not.

A listed slot need not be harmed: its predicted SQNR, which stands beside it, says how its cast bears them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fp8engine.auto import Controller

ABOVE = 100.0  # amax / rms: a normal distribution has 5 at a million elements; 10,000 elements are needed to exceed it


def standing(controllers: Iterable[Controller]) -> list[dict]:
    """The slots whose amax / rms is above ABOVE at their latest sample, the largest first, in types that JSON knows.

    step: of that sample.  ratio: amax / rms.  cast: as "E4M3/tensor".  sqnr_db: predicted of the cast, None where it
    is not finite (16 bits).  remedy: the call that an alarm would propose, "" where none is known.

    >>> from types import SimpleNamespace
    >>> from fp8engine.auto.history import History, Sample, Samples
    >>> history = History()
    >>> for slot, amax in (("up.input", 5.0), ("down.input", 1185.0)):
    ...     history.samples[slot] = Samples([Sample(16, "E4M3/row", amax, 1.0, 3.0, 29.2, 0.0, 0.0, 0)])
    >>> [(each["slot"], each["ratio"], each["sqnr_db"]) for each in standing([SimpleNamespace(history=history)])]
    [('down.input', 1185.0, 29.2)]
    """
    found = []
    for history in (controller.history for controller in controllers):
        for slot, samples in history.samples.items():
            if not samples:
                continue
            last = samples[-1]
            if math.isfinite(last.crest) and last.crest > ABOVE:
                sqnr = last.sqnr_db if math.isfinite(last.sqnr_db) else None
                told = {"step": last.step, "slot": slot, "ratio": last.crest, "cast": last.cast, "sqnr_db": sqnr}
                found.append(told | {"remedy": history.remedies.get(slot, "")})
    return sorted(found, key=lambda each: (-each["ratio"], each["slot"]))


def line(found: Sequence[dict]) -> str:
    """What `standing` found, at least one slot, as a line of text.

    >>> line([{"slot": "3.down.input", "ratio": 1185.2, "remedy": ""}])
    '1 slot has standing outliers, the largest 3.down.input: amax 1185x rms'
    """
    first, many = found[0], f"{len(found)} slots have" if found[1:] else "1 slot has"
    remedy = f"; remedy: {first['remedy']}" if first["remedy"] else ""
    return f"{many} standing outliers, the largest {first['slot']}: amax {first['ratio']:.0f}x rms{remedy}"
