"""Decisions as a section of the page: those with one sentence together, and those about the greatest outliers first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from fp8engine.report.flow import repeats
from fp8engine.report.page.html import chip, decibel, name, table

if TYPE_CHECKING:
    from fp8engine.auto.history import Sample

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?=x? |%|,|;|\)|$)")


def decisions(report, samples: Mapping[str, Sequence[Sample]]) -> str:
    """A row for each sentence, its slots and steps inside; a box that filters them."""
    if not report.decisions:
        note = "No format was changed." if report.auto.plans else "A fixed recipe makes none."
        return f'<p class="quiet">{note}</p>'
    groups: dict[tuple, list[dict]] = {}
    for each in report.decisions:
        groups.setdefault((each["before"], each["after"], NUMBER.sub("", each["why"])), []).append(each)
    crests = {slot: max((each.crest for each in seen), default=0.0) for slot, seen in samples.items()}
    ranked = [(max(crests.get(each["slot"], 0.0) for each in group), group) for group in groups.values()]
    rows = "".join(_row(crest, group) for crest, group in sorted(ranked, key=lambda x: (-x[0], len(x[1]))))
    head = ("changes", "from → to", "why, and where", "amax / rms, at most", "SQNR then")
    return (
        '<div class="bar"><label>filter <input id="filter" type="search" placeholder="layer, format, reason …" '
        'autocomplete="off"></label><span id="count" class="quiet" role="status"></span></div>'
        f"{table(head, rows, 'decided', scrolls='Decisions')}"
    )


def told_once(sentences: Sequence[str]) -> str:
    """One sentence for several that differ in their numbers alone; it has the least and the largest of each number.

    >>> told_once(["SQNR 24.9 dB where 31.9 dB can be had", "SQNR 25.2 dB where 31.9 dB can be had"])
    'SQNR 24.9 to 25.2 dB where 31.9 dB can be had'
    """
    columns = zip(*(NUMBER.findall(sentence) for sentence in sentences), strict=True)
    ranges = [tuple(dict.fromkeys((min(column, key=float), max(column, key=float)))) for column in columns]
    first, *others = NUMBER.split(sentences[0])
    return first + "".join(" to ".join(numbers) + words for numbers, words in zip(ranges, others, strict=True))


def _row(crest: float, group: Sequence[dict]) -> str:
    first = group[0]
    folded = [told for told, _ in repeats.fold((slot, "") for slot in dict.fromkeys(each["slot"] for each in group))]
    more = f" and {len(folded) - 1} more" if folded[1:] else ""
    steps = sorted({each["step"] for each in group})
    when = f"step {steps[0]}" if not steps[1:] else f"steps {steps[0]} to {steps[-1]}"
    changes = "".join(
        f'<tr><td class="n">{each["step"]}</td><td>{name(each["slot"])}</td><td>{escape(each["why"])}</td>'
        f'<td class="n">{decibel(each["sqnr_db"])}</td></tr>'
        for each in group
    )
    noise = [each["sqnr_db"] for each in group if each["sqnr_db"] is not None and math.isfinite(each["sqnr_db"])]
    least = decibel(min(noise)) if noise else decibel(first["sqnr_db"])
    return (
        f'<tr><td class="n">{len(group)}</td><td>{chip(first["before"])} → {chip(first["after"])}</td>'
        f"<td>{escape(told_once([each['why'] for each in group]))}<details><summary>{when}: "
        f"{name(folded[0])}{more}</summary>{table(('step', 'slot', 'why', 'SQNR then'), changes)}</details></td>"
        f'<td class="n">{f"{crest:.0f}" if crest else "–"}</td>'
        f'<td class="n">{least}{" or more" if noise[1:] and max(noise) > min(noise) else ""}</td></tr>'
    )
