"""What every benchmark here shares: the machine's description, interleaved timing, the result file.

Timing: variants take turns, so a slow second hits all of them; each turn is one call, timed by the wall clock; the
median over turns is reported with the spread between the quartiles.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """CPU, threads, versions, date and commit, as every result file carries them."""
    name = platform.processor() or platform.machine()
    flags = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        name, flags = fields.get("model name", name), fields.get("flags", "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": name,
        "bf16_instructions": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags.split()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }


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
