"""`make gpu`: everything that needs a CUDA card, in one script and under nine minutes: correctness, then timing.

    python3 benchmarks/gpu.py [--minutes 9] [--out FOLDER] [--only checks|tests|bench]

Needs torch with CUDA and Triton, and nothing installed beside them: it runs from a bare checkout.  Where pytest is
there, the tests marked gpu run as well.  Results go to benchmarks/results/<card>/, or to FOLDER; the last lines are a
short table.  Without a card it says "not measured" and exits with 0; a check that fails makes it exit with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  after the path, which makes a bare checkout importable

from benchmarks import checks  # noqa: E402
from fp8engine.bench import cases, casts, gemm, generate, harness, linear, steps  # noqa: E402
from fp8engine.ops import device  # noqa: E402

SHARE_OF_BENCH = 0.55  # of the time, kept for the benchmark: the checks stop before


def main() -> int:
    """Check, measure, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    parser.add_argument("--out", type=Path, help="folder of the results; default: benchmarks/results/<card>")
    parser.add_argument("--only", choices=("checks", "tests", "bench"), help="one part")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured: torch finds no CUDA device on this machine")
        return 0
    where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(where)
    end = time.perf_counter() + 60 * asked.minutes
    machine = harness.machine(where)
    print(" ".join(f"{key}={value}" for key, value in machine.items() if value is not None), flush=True)
    folder = asked.out or ROOT / "benchmarks" / "results" / _slug(machine["card"])
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    if asked.only in (None, "checks"):
        stop = end if asked.only else end - SHARE_OF_BENCH * 60 * asked.minutes
        failed = _check(where, stop)
        _save(folder, machine, "checks", {"machine": machine, "failed": failed})
    if asked.only in (None, "tests"):
        failed += _tests(end)
    if asked.only in (None, "bench"):
        _layers(where, folder, machine, end)
        _bench(where, folder, machine, end)
    for line in failed:
        print(f"FAILED {line}")
    return bool(failed)


def _check(where: torch.device, stop: float) -> list[str]:
    """Run the checks until `stop`; what failed.  A check not reached in time counts as failed."""
    failed, passed, late = [], 0, 0
    every = list(checks.checks(where, more=True)) if device.has_fp8(where) else []
    every += list(checks.card_checks(where)) if device.has_fp8(where) else []
    if not every:
        print(f"{device.name(where)} has no FP8 Tensor Cores: its kernels are not checked")
    for name, one in every:
        if time.perf_counter() > stop:
            late += 1
            continue
        start = time.perf_counter()
        try:
            wrong = one()
            torch.cuda.synchronize(where)
        except Exception as error:  # any: one that fails must not hide the others
            wrong = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(f"{time.perf_counter() - start:6.1f} s  {name}: {wrong or 'ok'}", flush=True)
        if wrong:
            failed.append(f"{name}: {wrong}")
        passed += not wrong
    print(f"{passed} checks passed, {len(failed)} failed, {late} not reached in time")
    return failed + ([f"{late} checks were not reached in time"] if late else [])


def _tests(end: float) -> list[str]:
    """The suite's tests that need a card, where pytest is installed."""
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed here: the checks above are what was tested")
        return []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=max(end - time.perf_counter(), 1))
    except subprocess.TimeoutExpired:
        return ["pytest -m gpu ran out of time"]
    return [] if done.returncode in (0, 5) else [f"pytest -m gpu: exit status {done.returncode}"]


def _layers(where: torch.device, folder: Path, machine: dict, end: float) -> None:
    """Casts and a Linear's forward and backward, at most a third of what is left: matmuls come after."""
    stop = time.perf_counter() + (end - time.perf_counter()) / 3
    for what, shapes, measured, line in (
        ("quantize", casts.SHAPES["cuda"], casts.casts, casts.line),
        ("linear", linear.SHAPES["cuda"], linear.linear, linear.line),
        ("block", steps.CASES["cuda"], steps.steps, steps.line),
        ("generate", generate.CASES["cuda"], generate.generate, generate.line),
        ("model", steps.MODELS["cuda"], steps.steps, steps.line),
    ):
        rows = []
        for shape in shapes:
            if time.perf_counter() > stop:
                print(f"out of time: {what} {tuple(map(str, shape))} and what comes after it not measured")
                break
            found = measured([shape], where)
            rows += found["rows"]
            _save(folder, machine, what, {**found, "rows": rows})
            for row in found["rows"]:
                print(line(row), flush=True)


def _bench(where: torch.device, folder: Path, machine: dict, end: float) -> None:
    """Shape by shape while there is time; each is saved before the next begins."""
    rows, shapes = [], list(dict.fromkeys([*cases.LISTS["square"], *cases.LISTS["llm"]]))
    limits = None
    print(gemm.HEADINGS)
    for shape in shapes:
        if time.perf_counter() > end - 20:
            print(f"out of time: {shape} and the shapes after it not measured")
            break
        found = gemm.gemm([shape], where, limits=limits)
        limits = limits or gemm.limits_of(found)
        rows += found["rows"]
        result = {**found, "rows": rows, "summary": gemm.summary(rows)}
        _save(folder, machine, "gemm", result)
        for row in found["rows"]:
            print(gemm.line(row), flush=True)
    if rows:
        for name, found in gemm.summary(rows).items():
            print(f"{name}: {json.dumps(found)}")


def _save(folder: Path, machine: dict, what: str, result: dict) -> None:
    path = folder / f"{machine['date']}-{what}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def _slug(card: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in card.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
