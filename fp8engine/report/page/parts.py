"""Contents of the page's sections as plain values; the templates turn them into HTML, and escape names and reasons."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fp8engine.auto.history import Sample
from fp8engine.report.facts import Facts, Layer
from fp8engine.report.flow import repeats
from fp8engine.report.folded import HARMLESS, measured
from fp8engine.report.state import slot_name
from fp8engine.scaling.table import ROLES

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?=x? |%|,|;|\)|$)")
PAINTS = {"cast": "format", "sqnr": "SQNR", "flushed": "flushed to zero", "crest": "amax / rms"}


class Card(NamedTuple):
    """A card at the top.  note: below the value, before a slot's name.  share: drawn as a meter.  mood: a CSS class."""

    title: str
    value: str
    note: str = ""
    mood: str = ""
    slot: str = ""
    share: float | None = None


def cards(report: Facts, samples: Mapping[str, Sequence[Sample]], losses: Sequence[float] | None) -> list[Card]:
    """The cards at the top: shares, backends, losses of precision, counts of changes and warnings."""
    totals = report.totals
    share, emulated = totals["fp8_flops_share"], totals["emulated"]
    backends = sorted({layer["backend"] for layer in report.layers if layer["recipe"] != "none"}) or ["torch"]
    others = f"{totals['in_16_bits']} in 16 bits, {totals['left_alone']} left alone, {totals['never_ran']} never ran"
    how = "emulated: the values of FP8, not its speed" if emulated else "in hardware"
    found = [
        Card("FP8 share of linear FLOPs", f"{share:.1%}", share=share),
        Card("layers in FP8", f"{totals['in_fp8']} of {totals['layers']}", others),
        Card("matmuls ran on", " + ".join(backends), how, "warn" if emulated else ""),
        _lost(report, "saturated", "saturated"),
        _lost(report, "flushed to zero", "underflowed"),
    ]
    now = {slot: seen[-1].sqnr_db for slot, seen in samples.items() if math.isfinite(seen[-1].sqnr_db)}
    if now:
        worst = min(now, key=now.__getitem__)
        median = f"{statistics.median(now.values()):.1f} dB"
        found.append(Card("median SQNR now", median, f"least {now[worst]:.1f}:", slot=worst))
    if report.auto.plans:
        steps = len({decision["step"] for decision in report.decisions})
        found.append(Card("formats changed", str(len(report.decisions)), f"at {steps} step{'s' * (steps != 1)}"))
        slots = len({alarm["slot"] for alarm in report.alarms})
        note, mood = (f"on {slots} slot{'s' * (slots != 1)}", "bad") if slots else _calm(samples, report.outliers)
        found.append(Card("early warnings", str(len(report.alarms)), note, mood))
    if standing := report.outliers:
        largest = f"largest {standing[0]['ratio']:.0f} × rms:"
        found.append(Card("standing outliers", str(len(standing)), largest, "warn", standing[0]["slot"]))
    if totals["nonfinite"]:
        found.append(Card("NaN or Inf", f"{totals['nonfinite']:,}", "elements; they stayed so", "bad"))
    if losses is not None:
        last = [loss for loss in losses if math.isfinite(loss)][-20:]
        found.append(Card("loss", f"{statistics.fmean(last):.4g}" if last else "not finite", f"{len(losses)} steps"))
    return found


def casts(numbers: Mapping) -> list[str]:
    """Every cast on the maps, without what another matmul reads."""
    return sorted({cast["label"].partition(" (")[0] for cast in numbers["casts"]})


def short_names(numbers: Mapping) -> list[str]:
    """The layers' names without the beginning that all of them share."""
    names = [layer["name"] for layer in numbers["layers"]]
    shared = repeats.shared(names) if names[1:] else ""
    return [each.replace(shared, "…", 1) if shared else each for each in names]


def outliers(report: Facts) -> list[dict]:
    """Growing and standing outliers, one entry for each slot, the greatest first."""
    rows: dict[str, dict] = {each["slot"]: each | {"grew": "stands"} for each in report.outliers}
    for alarm in report.alarms:  # oldest first: the latest of a slot is shown
        known = {"cast": None, "sqnr_db": None, "remedy": ""} | rows.get(alarm["slot"], {})
        rows[alarm["slot"]] = known | alarm | {"grew": f"×{alarm['growth']:.1f} in {alarm['steps']} steps"}
    return sorted(rows.values(), key=lambda each: -each["ratio"])


def decisions(report: Facts, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Decisions, those with one sentence together, and those about the greatest outliers first.

    An entry for each sentence: before, after, why, when; slots, folded; changes; crest, least SQNR, more of it.
    """
    groups = repeats.grouped(
        ((each["before"], each["after"], NUMBER.sub("", each["why"])), each) for each in report.decisions
    )
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


def across(count: int) -> int:
    """How many cards a row of a wide page has, so that the last row lacks as few as possible.

    >>> [across(count) for count in (5, 6, 7, 9, 10, 11)]
    [5, 3, 4, 3, 5, 4]
    """
    return min((5, 4, 3), key=lambda columns: -count % columns)


def troubled(report: Facts) -> list[tuple[int, Layer]]:
    """(place in the model, layer), the one that loses most first: beside what harms nothing."""
    lost = [max(largest(layer, key) / HARMLESS[key] for key in HARMLESS) for layer in report.layers]
    return sorted(enumerate(report.layers), key=lambda row: -lost[row[0]])


def largest(layer: Mapping, key: str) -> float:
    """The largest share that a layer's input, weight or gradient loses; -1.0 where none was looked at."""
    return max(-1.0 if (share := measured(layer[role], key)) is None else share for role in ROLES)


def decibel(value: float | None) -> str:
    """A SQNR as text."""
    return "–" if value is None else f"{value:.1f} dB" if math.isfinite(value) else "exact"


def shares(layer: Mapping, key: str) -> str:
    """What a layer's input, weight and gradient lose, in percent."""
    found = [measured(layer[role], key) for role in ROLES]
    if all(share is None for share in found):
        return "–"
    return " / ".join("–" if share is None else _percent(share).removesuffix(" %") for share in found) + " %"


def _calm(samples: Mapping, standing: Sequence[dict]) -> tuple[str, str]:
    """(text, CSS class) of the card where nothing has warned: "good" only where tensors were sampled and are calm."""
    if not samples:
        return "no tensor was sampled", ""
    return ("none grows: see standing outliers", "") if standing else ("no tensor has outliers or grows them", "good")


def _lost(report: Facts, title: str, key: str) -> Card:
    """The card of a share of all elements, with the slot that has the largest one."""
    share = measured(report.totals, key)
    if share is None:
        return Card(title, "–", "nothing was cast" if measured(report.totals, "saturated") is None else "not sampled")
    found = {(layer["name"], role): measured(layer[role], key) or 0.0 for layer in report.layers for role in ROLES}
    slots = {slot_name(*slot): share for slot, share in found.items()}
    worst = max(slots, key=slots.__getitem__)
    if not slots[worst]:
        return Card(title, _percent(share))
    mood = "warn" if slots[worst] > HARMLESS[key] else ""
    return Card(title, _percent(share), f"most {_percent(slots[worst])}:", mood, worst)


def _percent(share: float) -> str:
    return "0 %" if share == 0 else "< 0.001 %" if share < 1e-5 else f"{100 * share:.2g} %"


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
