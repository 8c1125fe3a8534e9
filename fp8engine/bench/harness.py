"""The harness that all benchmarks share: a variant's result is checked, then all that are right are timed in turns.

    compare   one case: a row a variant, with time and ratios only where the result is right
    result    all cases' rows beside a description of the machine, as plain values for JSON
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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
ABOUT = ("network", "size", "case", "shape")  # keys that say what was measured
WRONG = "wrong result: no time, no ratio"
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matmul that gives the rate
COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes copied: more than any cache holds


class Timer(NamedTuple):
    """A clock, and how many turns count."""

    clock: Clock
    turns: int

    @staticmethod
    def of(where: torch.device, on_card: int, on_cpu: int) -> Timer:
        """The device's clock, and as many turns as are usual there."""
        return Timer(timing.clock(where), on_card if where.type == "cuda" else on_cpu)


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
        else:
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


def result(where: torch.device, what: str, rows: Iterable[Row]) -> dict[str, Any]:
    """A benchmark's result, in plain values; of what was measured, with a remark where FP8 is emulated."""
    emulated = "" if device.has_fp8(where) else "; FP8 emulated: values, not speed"
    return {"machine": machine(where), "what": what + emulated, "rows": list(rows)}


def _decibels(found: float | Sequence[float]) -> str:
    each = found if isinstance(found, Sequence) else [found]
    return "   " + ("", "y/dw ", "y/dx/dw ")[len(each) - 1] + "/".join(f"{one:.0f}" for one in each) + " dB"


# What a line shows of a row that is right, in this order; a row has some of them.
NUMBERS: dict[str, Callable[[Any], str]] = {
    "seconds": lambda seconds: f"{1e3 * seconds:9.3f} ms",
    "spread": " {:5.0%}".format,
    "tflops": " {:8.3g} TFLOP/s".format,
    "of_16_bit_rate": " {:4.0%} of 16-bit rate".format,
    "gb_per_s": " {:9.1f} GB/s".format,
    "of_copy": " {:6.1%} of copy".format,
    "tokens_per_s": " {:9.0f} tokens/s".format,
    "over_bf16": " {:6.2f}x bf16".format,
    "over_compiled": " {:6.2f}x compiled".format,
    "over_eager": " {:6.2f}x eager".format,
    "over_16_bits": " {:6.2f}x torch 16 bits".format,
    "over_peer": " {:6.2f}x torch's same".format,
    "error": "   error {:.1e}".format,
    "sqnr": _decibels,
    "host_us": "   host {:.0f} us a forward".format,
    "activations": lambda size: f"   saved {size / 2**20:.1f} MiB",
    "weights": lambda size: f"   weights {size / 2**20:.1f} MiB",
    "peak_bytes": lambda size: f"   peak {size / 2**30:.2f} GiB",
    "launches": ", {} launches".format,
    "target": "   target {:.2f}".format,
    "predicted": "   predicted {:.2f}".format,
}


def line(row: Mapping[str, Any]) -> str:
    """A row as plain text: what it is of, and its numbers where it is right, else why not.

    >>> line({"name": "a", "shape": [64, 32], "correct": True, "seconds": 0.25, "over_bf16": None}).split()
    ['a', '64x32', '250.000', 'ms']
    """
    name = row["name"] + (" (emulated)" if row.get("emulated") else "")
    about = {"x".join(map(str, row[key])) if key == "shape" else row[key]: None for key in ABOUT if key in row}
    label = f"{name:31s} {' '.join(about):17s} "
    if row["correct"]:
        return label + "".join(show(row[key]) for key, show in NUMBERS.items() if row.get(key) is not None)
    if row["correct"] is None:
        return f"{label}{'' if row['why'].startswith(NOT_MEASURED) else 'cannot run: '}{row['why']}"
    error = row.get("error")
    return f"{label}WRONG{'' if error is None else f', error {error:.1e}'}: {row['why']}"


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
