"""The harness that all benchmarks share: a variant's result is checked, then all that are right are timed in turns.

    compare   one case: a row a variant, with time and ratios only where the result is right
    result    rows beside a description of the machine, as plain values for JSON
    limits    what the machine reaches at most, measured, to hold a rate against
    line      a row as text

A row has "name", "correct" (None: it could not run) and, unless that is True, "why"; then "seconds", "spread" and what
the driver derives from them.  A variant whose result is wrong has what was found wrong and no time and no ratio.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp8engine.bench import timing
from fp8engine.bench.timing import Clock
from fp8engine.ops import device

Row = dict[str, Any]
Call = Callable[[int], object]  # takes the number of its turn
# Fills a row with what was found, "correct" with it, and returns what is then timed; may raise anything.
Check = Callable[[Row], Call]
# (variant, its median in seconds, a function from a variant to its time over this one's or None) -> more of the row
Derive = Callable[[str, float, Callable[[str | None], float | None]], Row]

NOT_MEASURED = "not measured"
WRONG = "wrong result: no time, no ratio"
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matmul that gives the rate
COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes copied: more than any cache holds


class Timer(NamedTuple):
    """A clock, and how many turns count."""

    clock: Clock
    turns: int

    @staticmethod
    def of(where: torch.device, clock: Clock | None, turns: int | None, usual: tuple[int, int]) -> Timer:
        """Those given, or else the device's clock and the usual turns, (on a card, on a CPU)."""
        turns = usual[where.type != "cuda"] if turns is None else turns
        return Timer(timing.clock(where) if clock is None else clock, turns)


def compare(
    common: Row, checks: Mapping[str, Check], derive: Derive, timer: Timer, forget: Callable[[], None] | None = None
) -> list[Row]:
    """One case's rows, in the order of `checks`.

    common: what all of them say.  forget: drops what the checks compared with before the timing; it may be gigabytes.
    """
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    for name, check in checks.items():
        row = rows[name] = {"name": name, **common, "correct": None}
        try:
            call = check(row)
        except Exception as error:  # any: a kernel, a compiler, a driver or a peer that does not take this
            row |= {"correct": None, "why": reason(error)}
            continue
        if row["correct"]:
            calls[name] = call
        else:
            row.setdefault("why", WRONG)
    if forget is not None:
        forget()
    gc.collect()
    times = timing.measure(calls, timer.clock, timer.turns) if calls else {}
    for name, found in times.items():
        over = lambda peer, own=found.median: times[peer].median / own if peer in times else None  # noqa: E731
        rows[name] |= {"seconds": found.median, "spread": found.spread, **derive(name, found.median, over)}
    return list(rows.values())


def reason(error: Exception) -> str:
    """An error in one line.

    >>> reason(LookupError("no such key\\nand more"))
    'LookupError: no such key'
    """
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def result(where: torch.device, what: str, rows: Sequence[Row], **more: Any) -> dict[str, Any]:
    """A benchmark's result, in plain values."""
    return {"machine": machine(where), "what": what, **more, "rows": list(rows)}


def training_on(where: torch.device, what: str = "forward and backward") -> str:
    """What was measured, with a remark where FP8 is emulated."""
    return what + ("" if device.has_fp8(where) else "; FP8 emulated: values, not speed")


def line(label: str, row: Mapping[str, Any], *numbers: tuple[str, str]) -> str:
    """A row as plain text: its label, and its numbers where it is right, else why not.

    numbers: (key, format); left out where the row has None or nothing under the key.  "ms" is the time in ms.

    >>> line("a", {"correct": True, "seconds": 0.25, "over": None}, ("ms", "{:.0f} ms"), ("over", "{:.2f}x"))
    'a 250 ms'
    """
    if row["correct"]:
        found = {**row, "ms": 1e3 * row["seconds"]}
        return f"{label} " + "".join(text.format(found[key]) for key, text in numbers if found.get(key) is not None)
    if row["correct"] is None:
        return f"{label} {'' if row['why'].startswith(NOT_MEASURED) else 'cannot run: '}{row['why']}"
    error = row.get("error")
    return f"{label} WRONG{'' if error is None else f', error {error:.1e}'}: {row['why']}"


class Limits(NamedTuple):
    """Highest rates of a machine, per second.  flops: of a 16-bit matmul.  bytes: read and written by a copy."""

    flops: float
    bytes: float


def half(where: torch.device) -> torch.dtype:
    """The 16-bit format that the device multiplies fast: FP16 on a card before sm_80, else BF16."""
    return torch.float16 if where.type == "cuda" and device.capability(where) < (8, 0) else torch.bfloat16


def limits(where: torch.device, clock: Clock, side: int | None = None, copied: int | None = None) -> Limits:
    """Measure them, in one run.  side: of the square matmul.  copied: bytes of the copy's source."""
    n, size = side or SIDE[where.type], copied or COPIED[where.type]
    # Two sets, so that no call finds its operands where the call before left them.
    sets = [[torch.randn(n, n, device=where).to(half(where)) for _ in range(2)] for _ in range(2)]
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "matmul": lambda turn: sets[turn % 2][0] @ sets[turn % 2][1].t(),
        "copy": lambda turn: target.copy_(source),
    }
    times = timing.measure(calls, clock, 20 if where.type == "cuda" else 5)
    return Limits(2 * n**3 / times["matmul"].median, 2 * size / times["copy"].median)


def machine(where: torch.device) -> dict[str, Any]:
    """The card or CPU, versions, date and commit, as every result carries them; None for what is not there."""
    cuda = where.type == "cuda"
    return {
        "device": where.type,
        "card": torch.cuda.get_device_name(where) if cuda else None,
        "capability": "sm_{}{}".format(*device.capability(where)) if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The first line that a program prints; None where it fails or is not there."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0].strip() or None
