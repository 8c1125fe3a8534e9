"""Sections of the page as HTML; names and reasons are escaped, whatever characters they hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from fp8engine.report.flow import repeats
from fp8engine.report.folded import measured
from fp8engine.report.outliers import ABOVE
from fp8engine.report.page.html import chip, decibel, name, table
from fp8engine.report.page.svg import colour
from fp8engine.report.page.words import explained
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from fp8engine.auto.history import Sample

FORMATS_NOTE = "one row a layer, one column a sample"
PAINTS = {"cast": "format", "sqnr": "SQNR", "flushed": "flushed to zero", "crest": "amax / rms"}
OUTLIERS_NOTE = (
    f"early warnings of amax growing away from rms, before anything saturates; and amax above {ABOVE:.0f} × rms at the "
    "latest sample"
)


def section(key: str, title: str, body: str, note: str = "") -> str:
    """A panel with its heading."""
    small = f"<small>{explained(note)}</small>" if note else ""
    return (
        f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{explained(title)}{small}</h2>{body}</section>'
    )


def subtitle(report) -> str:
    """One line: how many layers, under which recipes."""
    totals = report.totals
    recipes = sorted({layer["recipe"] for layer in report.layers if layer["recipe"] != "none"})
    return f"{totals['layers']} linear layers under {', '.join(recipes) or 'no recipe'}"


def cards(report, samples: Mapping[str, Sequence[Sample]], losses: Sequence[float] | None) -> str:
    """The cards at the top: shares, backends, losses of precision, counts of changes and warnings."""
    totals = report.totals
    share = totals["fp8_flops_share"]
    backends = sorted({layer["backend"] for layer in report.layers if layer["recipe"] != "none"}) or ["torch"]
    found = [
        _card("FP8 share of linear FLOPs", f"{share:.1%}", f'<meter min="0" max="1" value="{share:.4f}"></meter>'),
        _card(
            "layers in FP8",
            f"{totals['in_fp8']} of {totals['layers']}",
            f"{totals['in_16_bits']} in 16 bits, {totals['left_alone']} left alone, {totals['never_ran']} never ran",
        ),
        _card(
            "matmuls ran on",
            " + ".join(backends),
            "emulated: the values of FP8, not its speed" if totals["emulated"] else "in hardware",
            "warn" if totals["emulated"] else "",
        ),
        _card("saturated", *_losses(totals)),
    ]
    now = {slot: seen[-1].sqnr_db for slot, seen in samples.items() if math.isfinite(seen[-1].sqnr_db)}
    if now:
        worst = min(now, key=now.__getitem__)
        median = f"{statistics.median(now.values()):.1f} dB"
        found.append(_card("median SQNR now", median, f"<i>least {now[worst]:.1f}:</i> {name(worst)}"))
    if report.auto.plans:
        steps = len({decision["step"] for decision in report.decisions})
        found.append(_card("formats changed", str(len(report.decisions)), f"at {steps} step{'s' * (steps != 1)}"))
        slots = len({alarm["slot"] for alarm in report.alarms})
        note, mood = (f"on {slots} slot{'s' * (slots != 1)}", "bad") if slots else _calm(samples, report.outliers)
        found.append(_card("early warnings", str(len(report.alarms)), note, mood))
    if standing := report.outliers:
        largest = f"<i>largest {standing[0]['ratio']:.0f} × rms:</i> {name(standing[0]['slot'])}"
        found.append(_card("standing outliers", str(len(standing)), largest, "warn"))
    if totals["nonfinite"]:
        found.append(_card("NaN or Inf", f"{totals['nonfinite']:,}", "elements; they stayed so", "bad"))
    if losses is not None:
        last = [loss for loss in losses if math.isfinite(loss)][-20:]
        found.append(_card("loss", f"{statistics.fmean(last):.4g}" if last else "not finite", f"{len(losses)} steps"))
    return "".join(found)


def legend(numbers: Mapping) -> str:
    """The colour of every cast on the maps, and the choice of what else the script can paint on them."""
    casts = dict.fromkeys(sorted(cast["label"].partition(" (")[0] for cast in numbers["casts"]))
    items = "".join(f'<li><i style="background:{colour(cast)}"></i>{escape(cast)}</li>' for cast in casts)
    items += '<li><i class="hatched"></i>hatched: not seen at that step</li>'
    shown = "".join(f'<option value="{key}">{name}</option>' for key, name in PAINTS.items())
    choice = f'<label>show <select id="paint">{shown}</select></label>'
    return f'<div class="bar">{choice}<ul class="legend" id="key">{items}</ul></div>'


def why_no_maps(report) -> str:
    """The text in place of the maps: why there are none."""
    if not report.auto.plans:
        return (
            "No layer is under auto: a fixed recipe gives each tensor one cast for good, so nothing is measured over "
            'time. The casts are in the table of layers below; fe.convert(model, "auto") decides, and shows it here.'
        )
    if report.auto.repeats:
        return "This run repeats a plan: nothing is measured; what it changed, and when, is under Decisions."
    if report.auto.failed:
        return " ".join(report.auto.failed)
    return "Nothing has been seen yet: the first sample is read when the second training step begins."


def detail(numbers: Mapping) -> str:
    """The place in which the script draws the charts of the chosen layer."""
    names = [layer["name"] for layer in numbers["layers"]]
    shared = repeats.shared(names) if names[1:] else ""
    shown = [each.replace(shared, "…", 1) if shared else each for each in names]
    options = "".join(f'<option value="{i}">{escape(each)}</option>' for i, each in enumerate(shown))
    keys = "".join(f'<li class="r{i}"><svg viewBox="0 0 26 8" aria-hidden="true"><path d="M1 4H25"/></svg>{role}</li>'
                   for i, role in enumerate(numbers["roles"]))  # fmt: skip
    return (
        f'<div class="bar"><label>layer <select id="layer">{options}</select></label>'
        f'<ul class="legend">{keys}</ul><span id="when" class="quiet"></span></div>'
        '<div id="charts" tabindex="0" aria-label="Charts of the chosen layer; left and right move the cursor"></div>'
        "<noscript><p>These charts are drawn by the page's own script.</p></noscript>"
    )


def outliers(report) -> str:
    """Growing and standing outliers in one table, a row for each slot, the greatest first."""
    rows: dict[str, dict] = {each["slot"]: each | {"grew": "stands"} for each in report.outliers}
    for alarm in report.alarms:  # oldest first: the latest of a slot is shown
        known = rows.get(alarm["slot"], {"cast": None, "sqnr_db": None})
        rows[alarm["slot"]] = known | alarm | {"grew": f"×{alarm['growth']:.1f} in {alarm['steps']} steps"}
    if not rows:
        return f'<p class="quiet">{"None." if report.auto.plans else "Only layers under auto are watched."}</p>'
    told = "".join(
        f'<tr><td>{name(each["slot"])}</td><td class="n">{each["ratio"]:.0f}</td><td class="n">{each["grew"]}</td>'
        f'<td class="n">{each["step"]}</td><td>{"–" if each["cast"] is None else chip(each["cast"])}</td>'
        f'<td class="n">{decibel(each["sqnr_db"])}</td>'
        f'<td class="wide"><code>{escape(each.get("remedy", ""))}</code></td></tr>'
        for each in sorted(rows.values(), key=lambda each: -each["ratio"])
    )
    head = ("slot", "amax / rms", "growing or standing", "at step", "cast", "SQNR", "remedy")
    return table(head, told, scrolls="Outliers")


def layers(report, numbers: Mapping) -> str:
    """A row for each layer: its weight, its share of FLOPs, its casts and what they lose."""
    drawn = {layer["name"]: i for i, layer in enumerate(numbers["layers"])}
    rows = []
    for layer in report.layers:
        shown = name(layer["name"])
        if (place := drawn.get(layer["name"])) is not None:
            shown = f'<button class="pick" type="button" data-layer="{place}">{shown}</button>'
        casts = "".join(f"<td>{escape(layer[role]['cast'])}</td>" for role in ROLES)
        shares = ([measured(layer[role], key) for role in ROLES] for key in ("underflowed", "saturated"))
        lost = "".join(f"<td>{_triple(each)}</td>" for each in shares)
        rows.append(
            f"<tr><td>{shown}</td><td>{'×'.join(map(str, layer['shape']))}</td>"
            f'<td class="n">{layer["flops_share"]:.1%}</td><td>{escape(layer["recipe"])}</td>{casts}{lost}</tr>'
        )
    head = ("layer", "weight", "FLOPs", "recipe", *ROLES, "flushed i / w / g", "saturated i / w / g")
    return table(head, "".join(rows), scrolls="Layers")


def left(report) -> str:
    """Layers that are not in FP8, with the reason of each."""
    others = [
        layer for layer in report.layers if layer["recipe"] == "none" or not layer["ran"] or not layer["fp8_share"]
    ]
    if not others:
        return '<p class="quiet">None: every linear layer is in FP8.</p>'
    rows = "".join(
        f"<tr><td>{name(layer['name'])}</td><td>{escape(layer['kind'])}</td>"
        f'<td>{"×".join(map(str, layer["shape"]))}</td><td class="n">{layer["flops_share"]:.1%}</td>'
        f"<td>{escape(layer['reason'])}</td></tr>"
        for layer in others
    )
    return table(("layer", "kind", "weight", "FLOPs", "why"), rows, scrolls="Left alone")


def memory(report) -> str:
    """The memory that quantised weights take between calls."""
    kept = report.totals["kept_weight_bytes"]
    if not kept:
        return (
            '<p class="quiet">No FP8 copy of a weight is kept between training steps; what is saved for backward is '
            "the FP8 copy of each input, one byte an element.</p>"
        )
    rows = "".join(
        f'<tr><td>{name(layer["name"])}</td><td class="n">{layer["kept_bytes"] / 2**20:.2f} MiB</td>'
        f"<td>{escape(layer['kept_why'])}</td></tr>"
        for layer in sorted(report.layers, key=lambda layer: -layer["kept_bytes"])
        if layer["kept_bytes"]
    )
    sum_of_all = f"<p>Quantised weights kept between calls: {kept / 2**20:.1f} MiB.</p>"
    return sum_of_all + table(("layer", "kept", "why"), rows, scrolls="Memory")


def _calm(samples: Mapping, standing: Sequence[dict]) -> tuple[str, str]:
    """(text, CSS class) of the card where nothing has warned: "good" only where tensors were sampled and are calm."""
    if not samples:
        return "no tensor was sampled", ""
    return ("none grows: see standing outliers", "") if standing else ("no tensor has outliers or grows them", "good")


def _card(title: str, value: str, under: str, mood: str = "") -> str:
    under = under if under.startswith("<") else explained(under)
    return f'<div class="card {mood}"><h3>{explained(title)}</h3><b>{escape(value)}</b><span>{under}</span></div>'


def _losses(totals: Mapping) -> tuple[str, str]:
    """(the share of elements that saturated, a sentence on those that were flushed)."""
    saturated, flushed = measured(totals, "saturated"), measured(totals, "underflowed")
    if saturated is None:
        return "–", "nothing was cast"
    return _percent(saturated), "flushed: not sampled" if flushed is None else f"flushed to zero {_percent(flushed)}"


def _percent(share: float) -> str:
    return "0 %" if share == 0 else "< 0.001 %" if share < 1e-5 else f"{100 * share:.2g} %"


def _triple(shares: Sequence[float | None]) -> str:
    if all(share is None for share in shares):
        return "–"
    return " / ".join("–" if share is None else _percent(share).removesuffix(" %") for share in shares) + " %"
