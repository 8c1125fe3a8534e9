"""Transformer blocks of a model, found in the names of its linear layers: entries of a list of modules of one class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def blocks(kinds: Mapping[str, type], layers: Iterable[str]) -> dict[str, list[str]]:
    """Block -> its layers, in the layers' order.  kinds: the class of each module, by its name.

    A block is the outermost "list.index" on the way to a layer whose list holds more than one entry with layers, all of
    one class; else the outermost of all; a layer without any is a block of itself.

    >>> names = [f"model.layers.{block}.{layer}" for block in (0, 1) for layer in ("up", "experts.0", "experts.1")]
    >>> kinds = dict.fromkeys([*names, "model.layers.0", "model.layers.1"], object)
    >>> blocks(kinds, [*names[1:3], names[5], "lm_head"])["model.layers.0"]
    ['model.layers.0.experts.0', 'model.layers.0.experts.1']
    >>> list(blocks({"0": list, "0.h.0": object, "0.h.1": object, "2": dict}, ["0.h.0.up", "0.h.1.up", "2.down"]))
    ['0.h.0', '0.h.1', '2']
    """
    ways = {layer: _entries(layer) for layer in layers}
    lists: dict[str, set[str]] = {}
    for entries in ways.values():
        for entry in entries:
            lists.setdefault(_list_of(entry), set()).add(entry)
    repeated = {name for name, found in lists.items() if len(found) > 1 and len({kinds[entry] for entry in found}) == 1}
    made: dict[str, list[str]] = {}
    for layer, entries in ways.items():
        outermost = [entry for entry in entries if _list_of(entry) in repeated] or entries or [layer]
        made.setdefault(outermost[0], []).append(layer)
    return made


def _entries(layer: str) -> list[str]:
    """The prefixes of a name that end in a number, the shortest first."""
    parts = layer.split(".")
    return [".".join(parts[: at + 1]) for at, part in enumerate(parts) if part.isdigit()]


def _list_of(entry: str) -> str:
    return entry.rpartition(".")[0]
