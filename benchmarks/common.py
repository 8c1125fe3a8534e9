"""Parts of every benchmark: where it runs, the machine's description, interleaved timing, the result file.

Timing: variants take turns, so a slow second hits all of them; each turn is one call, timed by the wall clock; the
median over turns is reported with the spread between the quartiles.

Importing it makes a bare checkout importable: fp8engine need not be installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fp8engine.bench import harness

RESULTS = Path(__file__).parent / "results"
WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> dict:
    """CPU, threads, versions, date and commit, as every result file of a CPU carries them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    found = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return harness.machine(torch.device("cpu")) | {"bf16_instructions": found}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of options whose help is a script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def show(result: dict) -> None:
    """Print a benchmark's rows."""
    print(result["what"])
    for row in result["rows"]:
        print(harness.line(row))


def interleaved(calls: dict[str, Callable[[], float]], turns: int, warmup: int = 3) -> dict[str, dict[str, float]]:
    """Seconds of each call: median and quartile spread over `turns` rounds.  A call returns its own timed seconds."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            seconds[name].append(call())
    found = {}
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(times, n=4)
        found[name] = {"median": middle, "spread": (high - low) / middle}
    return found


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def save(what: str, result: dict) -> Path:
    """Write a result under results/<machine>/<date>-<what>.json; the machine is the card where there is one."""
    card = result["machine"].get("card")
    slug = "".join(c if c.isalnum() else "-" for c in (card or result["machine"]["cpu"]).lower()).strip("-")
    path = RESULTS / (slug if card else f"cpu-{slug}") / f"{result['machine']['date']}-{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
