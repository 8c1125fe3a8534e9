"""Decisions for the page: those with one sentence together, and those about the greatest outliers first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8engine.auto.history import Sample
from fp8engine.report.facts import Facts
from fp8engine.report.flow import repeats

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?=x? |%|,|;|\)|$)")


def decisions(report: Facts, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """An entry for each sentence: before, after, why, when; slots, folded; changes; crest, least SQNR, more of it."""
    groups: dict[tuple, list[dict]] = {}
    for each in report.decisions:
        groups.setdefault((each["before"], each["after"], NUMBER.sub("", each["why"])), []).append(each)
    crests = {slot: max((each.crest for each in seen), default=0.0) for slot, seen in samples.items()}
    told = [_told(group, max(crests.get(each["slot"], 0.0) for each in group)) for group in groups.values()]
    return sorted(told, key=lambda each: (-each["crest"], len(each["changes"])))


def told_once(sentences: Sequence[str]) -> str:
    """One sentence for several that differ in their numbers alone; it has the least and the largest of each number.

    >>> told_once(["SQNR 24.9 dB where 31.9 dB can be had", "SQNR 25.2 dB where 31.9 dB can be had"])
    'SQNR 24.9 to 25.2 dB where 31.9 dB can be had'
    """
    columns = zip(*(NUMBER.findall(sentence) for sentence in sentences), strict=True)
    ranges = [tuple(dict.fromkeys((min(column, key=float), max(column, key=float)))) for column in columns]
    first, *others = NUMBER.split(sentences[0])
    return first + "".join(" to ".join(numbers) + words for numbers, words in zip(ranges, others, strict=True))


def _told(group: Sequence[dict], crest: float) -> dict[str, Any]:
    slots = dict.fromkeys(each["slot"] for each in group)
    steps = sorted({each["step"] for each in group})
    noise = [each["sqnr_db"] for each in group if each["sqnr_db"] is not None and math.isfinite(each["sqnr_db"])]
    return {
        "before": group[0]["before"],
        "after": group[0]["after"],
        "why": told_once([each["why"] for each in group]),
        "when": f"steps {steps[0]} to {steps[-1]}" if steps[1:] else f"step {steps[0]}",
        "slots": [told for told, _ in repeats.fold((slot, "") for slot in slots)],
        "changes": group,
        "crest": crest,
        "least": min(noise) if noise else group[0]["sqnr_db"],
        "more": len(noise) > 1 and max(noise) > min(noise),
    }
