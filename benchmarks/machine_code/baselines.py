"""Baselines of the machine code, one for each Triton that users get: `baselines/<version>.json`.

    {"triton": version, "kernels": {name of a row: what judge.baseline_of keeps}, "keys": {name of a row: keys.py}}

A file a version, so that a kernel's change shows each Triton's rows apart.  The versions are those of torch's
releases from the oldest that pyproject.toml allows on: 2.11 names 3.6.0, 2.13 3.7.1, 2.14 3.8.0, 2.15 3.9.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("baselines")
RANGE = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
DEVELOPED = "3.7.1"  # what development and CI run: constraints.txt


class NoBaseline(LookupError):
    """There is no baseline of this Triton, or the file is another version's.  The message names the remedy."""


def path(version: str) -> Path:
    """Where the baseline of that Triton is."""
    return FOLDER / f"{version}.json"


def load(file: Path, version: str, new: bool = False) -> dict[str, Any]:
    """The baseline in that file.  new: it is about to be written, and may not be there yet.

    Raises NoBaseline where it is not there or is not that Triton's.
    """
    remedy = f"install triton=={DEVELOPED} (constraints.txt), or write one of this Triton: make codegen UPDATE=1"
    if not file.exists():
        if new:
            return {"triton": version, "kernels": {}, "keys": {}}
        raise NoBaseline(f"no baseline of Triton {version} ({file}): {remedy}")
    found = json.loads(file.read_text())
    if found["triton"] != version:
        raise NoBaseline(f"{file} is the baseline of Triton {found['triton']}, and this is {version}: {remedy}")
    return found


def write(file: Path, version: str, kernels: dict[str, Any], known: dict[str, str]) -> None:
    """A line for each row; then the keys, so that a change of all keys hides no change of a row."""
    parts = [f' "triton": "{version}"']
    for title, values in (("kernels", kernels), ("keys", {name: known[name] for name in kernels if name in known})):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        parts.append(f' "{title}": {{\n{lines}\n }}')
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n")
