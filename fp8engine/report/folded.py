"""Tables of a report's text: ways in which layers ran, one row for layers that ran alike, and those left alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from fp8engine.report.facts import Layer
from fp8engine.report.flow import repeats
from fp8engine.scaling.table import OUTPUT, ROLES

# A layer's share stands out above so many times the middle one of the layers that otherwise ran alike, if it is above
# what harms nothing anyway: 2 % flushed (`auto` changes a cast at 5 %), and a printed 0.01 % saturated.
TIMES, HARMLESS = 4.0, {"saturated": 5e-5, "underflowed": 0.02}
READ_AS = (
    "saturated and flushed are shares of input / weight / grad_output; a row for several layers has the largest of "
    "theirs, and a layer whose share stands out has its own (every layer by itself: report.table(every=True))"
)
Rows = list[list[str]]


def tables(layers: Sequence[Layer], every: bool) -> list[Rows]:
    """The tables that have rows, each with its headings first.  every: a row for each layer, with all columns.

    Otherwise the first table has the ways in which layers ran, each with a letter by which the second names it.
    """
    stores = [OUTPUT] * any(layer["output"]["cast"] != "none" for layer in layers)  # a result in FP8 is rare
    ran = _ran([layer for layer in layers if layer["recipe"] != "none"], every)
    left = groups([layer for layer in layers if layer["recipe"] == "none"], ["kind", "shape", "reason"], every)
    way = ["recipe", "backend", *ROLES, *stores]
    ways: Counter[tuple[str, ...]] = Counter()
    for _, members in ran:
        ways[_way(members[0], stores)] += len(members)
    letters = {key: f"{ascii_uppercase[i % 26]}{i // 26 or ''}" for i, key in enumerate(ways)}
    legend = [["ran as", *way, "layers"], *([letters[key], *key, str(count)] for key, count in ways.items())]
    rows = [["layer", "shape", *(way if every else ["ran as"]), "saturated", "flushed", "note"]]
    for name, members in ran:
        key = _way(members[0], stores)
        shares = (" / ".join(_largest(members, role, share) for role in ROLES) for share in HARMLESS)
        rows.append([name, shape_of(members[0]), *(key if every else [letters[key]]), *shares, _note(members[0])])
    shown = [i for i in range(len(rows[0])) if every or i < 3 or any(set(row[i]) - set("- /0") for row in rows[1:])]
    rows = [[row[i] for i in shown] for row in rows]
    others = [["left alone", "shape", "why"], *([name, shape_of(each), each["reason"]] for name, (each, *_) in left)]
    return [table for table in ([] if every else legend, rows, others) if table[1:]]


def groups(layers: Sequence[Any], alike: Sequence[str], every: bool = False) -> list[tuple[str, list[Any]]]:
    """(name, layers) of each row: layers of repeated blocks with equal values of the keys `alike`, or every layer.

    >>> [name for name, _ in groups([{"name": f"h.{i}.up", "reason": "recipe"} for i in range(3)], ["reason"])]
    ['h.0-2.up × 3']
    """
    if every:
        return [(layer["name"], [layer]) for layer in layers]
    folded = repeats.fold((layer["name"], str([layer[key] for key in alike])) for layer in layers)
    return [(name, [layers[i] for i in members]) for name, members in folded]


def measured(counted: Mapping, key: str) -> float | None:
    """The share "saturated" or "underflowed" of a slot, or of a report's totals; None where no element was looked at.

    >>> measured({"elements": 8, "saturated": 0.0}, "saturated"), measured({"elements": 0}, "saturated")
    (0.0, None)
    """
    return counted[key] if counted.get("elements" if key == "saturated" else "sampled") else None


def _ran(layers: Sequence[Layer], every: bool) -> list[tuple[str, list[Layer]]]:
    """`groups` of the converted layers, those apart whose share stands out."""
    alike = [{"name": layer["name"], "alike": _alike(layer), "of": layer, "apart": ()} for layer in layers]
    for _, members in groups(alike, ["alike"], every):
        limits = {
            (role, key): max(
                harmless, TIMES * statistics.median_low(each["of"][role].get(key, 0.0) for each in members)
            )
            for role in ROLES
            for key, harmless in HARMLESS.items()
        }
        for each in members:
            each["apart"] = [at for at, limit in limits.items() if each["of"][at[0]].get(at[1], 0.0) > limit]
    return [(name, [each["of"] for each in those]) for name, those in groups(alike, ["alike", "apart"], every)]


def _alike(layer: Layer) -> tuple[str, ...]:
    """What the layers of one row have in common, besides their names."""
    return (layer["kind"], shape_of(layer), *_way(layer, [OUTPUT]), _note(layer))


def _way(layer: Mapping, stores: Sequence[str]) -> tuple[str, ...]:
    backend = f"{layer['backend']} (emulated)" if layer["emulated"] else layer["backend"]
    return (layer["recipe"], backend, *(layer[role]["cast"] for role in (*ROLES, *stores)))


def _note(layer: Layer) -> str:
    reason = layer["reason"]
    if (layer["emulated"] and reason.startswith("emulated")) or reason == f"asked for {layer['recipe']}":
        reason = ""  # other columns say so
    return "; ".join(filter(None, [reason, layer.get("outliers")]))


def shape_of(layer: Layer) -> str:
    """A layer's shape as text, such as "64x32"."""
    return "x".join(map(str, layer["shape"]))


def _largest(layers: Sequence[Mapping], role: str, key: str) -> str:
    share = max((each for layer in layers if (each := measured(layer[role], key)) is not None), default=None)
    return "-" if share is None else "0" if share == 0 else "<0.01%" if share < 5e-5 else f"{share:.2%}"
