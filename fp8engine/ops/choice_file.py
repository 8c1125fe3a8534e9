"""Choices of kernels that a card has measured, and their file: $XDG_CACHE_HOME/fp8engine/CARD-DIGEST.json.

    {"key": all that the choices depend on, "choices": [...], "sum": SHA-256 of key and choices}

DIGEST is the key's.  What is damaged, has another key, or holds what this version does not know is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8engine import environment, files
from fp8engine.errors import StateError
from fp8engine.ops import device

FORMAT = 1  # of the file, a part of the key
DRIVER = Path("/proc/driver/nvidia/version")  # of the kernel module: "... Kernel Module  580.95.05  ..."
TUNING = "fp8engine.kernels.tuning"
log = logging.getLogger(__name__)


class Job(NamedTuple):
    """One matmul: operation of the tuning table, kind of scales (card_trials.KINDS), sizes of a [M, K] and b [N, K]."""

    operation: str
    kind: str
    m: int
    n: int
    k: int


class Choice(NamedTuple):
    """The fastest: a configuration of kernels/tuning.py, or None for cuBLASLt.  us: microseconds of each, by name."""

    config: Any | None
    us: dict[str, float]

    @property
    def backend(self) -> str:
        return "cublas" if self.config is None else "triton"

    def __str__(self) -> str:
        return "measured on this card: " + ", ".join(f"{name} {us:.0f} us" for name, us in self.us.items())


def key_of(where: torch.device) -> dict[str, Any]:
    """All that a card's choices depend on.  Without a driver's version, None where it cannot be read, none are kept."""
    driver = None
    with contextlib.suppress(OSError):
        driver = re.search(r"Kernel Module\D*([\d.]+)", DRIVER.read_text())
    table = importlib.import_module(TUNING).TABLE
    kernels = {path.name: path.read_bytes().hex() for path in (table, *table.parent.glob("*.py"))}
    return {
        "format": FORMAT,
        "card": device.name(where),
        "capability": list(device.capability(where)),
        "processors": device.processors(where),
        "driver": driver and driver[1],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "kernels": _digest(kernels),
    }


def path_of(key: Mapping[str, Any]) -> Path:
    """The file of a key."""
    card = re.sub(r"[^a-z0-9]+", "-", str(key["card"]).lower()).strip("-")
    return environment.caches() / "fp8engine" / f"{card}-{_digest(key)[:12]}.json"


def read(key: Mapping[str, Any]) -> dict[Job, Choice]:
    """The choices kept under a key; none where there is no file, or one that is refused, which the log names."""
    path = path_of(key)
    try:
        return unpack(path.read_bytes(), key) if path.exists() else {}
    except (OSError, StateError) as error:
        log.warning("%s: %s: measured anew", path, error)
        return {}


def write(key: Mapping[str, Any], choices: Mapping[Job, Choice]) -> Path:
    """Keep choices under a key, in place of what was there.  Raises OSError or StateError with the reason."""
    if key["driver"] is None:
        raise StateError("this system does not tell its driver's version")
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, pack(key, choices))
    return path


def pack(key: Mapping[str, Any], choices: Mapping[Job, Choice]) -> str:
    """Choices with the key that they are valid for, as the file has them and rank 0 tells them to the others."""
    rows = [{"job": job, "config": config and config._asdict(), "us": us} for job, (config, us) in choices.items()]
    return json.dumps({"key": key, "choices": rows, "sum": _digest([key, rows])}, indent=1) + "\n"


def unpack(text: bytes, key: Mapping[str, Any]) -> dict[Job, Choice]:
    """The inverse of `pack`.  Raises StateError for what is damaged, of another key, or of another version."""
    config_of = importlib.import_module(TUNING).Config  # for a field that this version does not know, a TypeError
    try:
        content = json.loads(text)
        rows = content["choices"]
        if content["key"] != key:
            reason = f"of another card, driver or version: {content['key']}"
        elif content["sum"] != _digest([key, rows]):
            reason = "its checksum does not fit its content"
        else:
            return {Job(*row["job"]): Choice(row["config"] and config_of(**row["config"]), row["us"]) for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise StateError(f"not a measurement of this card ({reason})")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
