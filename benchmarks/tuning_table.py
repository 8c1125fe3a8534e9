"""The tuning table as a file: rows replaced, written one configuration a line, and what that changes."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

SOURCE = ("card", "driver", "capability", "torch", "triton", "date", "commit")


def merged(
    content: Mapping[str, Any], architecture: str, rows: Mapping[tuple[str, str], dict], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The table with some rows replaced, and where each of them comes from.  rows: (operation, class) -> row.

    about: the machine.  Everything else stays as it was.
    """
    new = copy.deepcopy(dict(content))
    for (operation, name), row in rows.items():
        new["operations"][operation][architecture][name] = row
        new["source"][f"{operation} {architecture} {name}"] = {key: about.get(key) for key in SOURCE}
    return new


def dump(content: Mapping[str, Any]) -> str:
    """The table as its file has it: one configuration a line."""
    return "\n".join(_lines(content, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    nested = isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values())
    if not nested:
        yield json.dumps(value)
        return
    yield "{"
    for index, (key, inner) in enumerate(value.items()):
        first, *rest = _lines(inner, depth + 1)
        block = [f"{' ' * (depth + 1)}{json.dumps(key)}: {first}", *rest]
        block[-1] += "," if index < len(value) - 1 else ""
        yield from block
    yield " " * depth + "}"


def difference(old: str, new: str) -> str:
    """What changes in the table's file, as a unified diff; empty where nothing does."""
    return "".join(
        difflib.unified_diff(
            old.splitlines(True), new.splitlines(True), "a/kernels/tuning.json", "b/kernels/tuning.json"
        )
    )
