"""The file that keeps what a card measured of itself, in the user's cache directory.

    $XDG_CACHE_HOME/fp8engine/CARD-DIGEST.json        ~/.cache where XDG_CACHE_HOME is not set (XDG base directories)

    {"format": 1, "key": {...}, "choices": [...], "sum": SHA-256 of key and choices}

The key holds all that the choices depend on: the card, its driver, the versions of CUDA, torch and Triton, and a digest
of the kernels' source and their tuning table.  DIGEST is the key's.  A file whose sum or key is not what it has to be,
or that holds what this version does not know, is refused by its name, and what it held is measured anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8engine import environment, files
from fp8engine.errors import StateError
from fp8engine.ops import device

FORMAT = 1
DRIVER = Path("/proc/driver/nvidia/version")  # of the kernel module: "... Kernel Module  580.95.05  ..."


class Job(NamedTuple):
    """One matmul: operation of the tuning table, kind of scales, and sizes.  y [M, N] of a [M, K] and b [N, K].

    kind: "tensor", "row", "block" (1x128 by 128x128) or "block by block" (1x128 by 1x128).
    """

    operation: str
    kind: str
    m: int
    n: int
    k: int


class Choice(NamedTuple):
    """What was measured to be the fastest.  backend: "triton" or "cublas".  config: ours, as a dict; None for cublas.

    us: microseconds of each that was timed, by its name.
    """

    backend: str
    config: dict[str, Any] | None
    us: dict[str, float]

    def __str__(self) -> str:
        return "measured on this card: " + ", ".join(f"{name} {us:.0f} us" for name, us in self.us.items())


def key_of(where: torch.device) -> dict[str, Any] | None:
    """All that a card's choices depend on; None where the driver's version cannot be read: nothing is then kept."""
    try:
        driver = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    except OSError:
        driver = None
    if driver is None:
        return None
    return {
        "card": device.name(where),
        "capability": list(device.capability(where)),
        "processors": device.processors(where),
        "driver": driver[1],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "kernels": kernels_digest(),
    }


@functools.cache
def kernels_digest() -> str:
    """SHA-256 of the kernels' source and their tuning table."""
    home = importlib.import_module("fp8engine.kernels.tuning").TABLE.parent
    found = hashlib.sha256()
    for path in sorted([*home.glob("*.py"), *home.glob("*.json")]):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def path_of(key: dict[str, Any]) -> Path:
    """The file of a key."""
    card = re.sub(r"[^a-z0-9]+", "-", str(key["card"]).lower()).strip("-")
    return environment.caches() / "fp8engine" / f"{card}-{_digest(key)[:12]}.json"


def read(key: dict[str, Any]) -> dict[Job, Choice]:
    """The choices kept under a key; none where there is no file.

    Raises StateError with the file's name for a file that is damaged, of another key, or of another version.
    """
    path = path_of(key)
    try:
        content = json.loads(path.read_text())
        reason = _why_refused(content, key)
        if not reason:
            return from_rows(content["choices"])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error}): measured anew") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise StateError(f"{path} is not a measurement of this card ({reason}): measured anew")


def _why_refused(content: Any, key: dict[str, Any]) -> str:
    if content["format"] != FORMAT:
        return f"format {content['format']}, not {FORMAT}"
    if content["key"] != key:
        return "of another card, driver or version"
    return "" if content["sum"] == _digest([key, content["choices"]]) else "its checksum does not fit its content"


def write(key: dict[str, Any], choices: Mapping[Job, Choice]) -> Path:
    """Keep choices under a key, in place of what was there.  Raises OSError."""
    path, rows = path_of(key), to_rows(choices)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "key": key, "choices": rows, "sum": _digest([key, rows])}
    files.write(path, json.dumps(content, indent=1) + "\n")
    return path


def to_rows(choices: Mapping[Job, Choice]) -> list[dict[str, Any]]:
    """Choices as plain values."""
    return [{**job._asdict(), **choice._asdict()} for job, choice in choices.items()]


def from_rows(rows: Iterable[Mapping[str, Any]]) -> dict[Job, Choice]:
    """The inverse of `to_rows`.  Raises KeyError, TypeError or StateError for what is no such row."""
    config_of = importlib.import_module("fp8engine.kernels.tuning").Config
    found = {}
    for row in rows:
        job = Job(**{name: row[name] for name in Job._fields})
        choice = Choice(**{name: row[name] for name in Choice._fields})
        if choice.backend == "triton":
            config_of(**(choice.config or {}))  # a field that this version does not know is a TypeError
        elif choice.backend != "cublas" or choice.config is not None:
            raise StateError(f"backend {choice.backend!r} is none that a card measures")
        found[job] = choice
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
