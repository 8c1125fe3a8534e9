"""`make codegen`: compile every committed kernel configuration for the card it is meant for; judge the machine code.

    python benchmarks/codegen.py [--jobs N] [--only WORD] [--changed] [--update | --keys | --ceilings] [--baseline FILE]

Prints a table with each kernel's ceilings on an H200 (machine_code/ceilings.py: by issue slots, L2 and loads on their
way; the least, and which it is), and exits with 1 on a spill, too much shared memory, serialised or missing Tensor Core
instructions, or a loss against the baseline of the Triton that is installed, machine_code/baselines/<version>.json; a
fault for which machine_code/reasons.py has a reason is printed with it.  --changed compiles what has another key than
it has there (machine_code/keys.py), which alone can have become worse.  --update writes the rows of what was compiled,
and their keys; --keys writes keys and compiles nothing, where a change is known to leave every row as it is; --ceilings
compiles nothing either and prints those of the baseline.
Needs Triton, not a GPU.  codegen_all.py compiles with every Triton of the range.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from benchmarks.machine_code import baselines, ceilings, judge, keys, launches, reasons
from fp8engine.numerics.cards import H200

BASELINE = baselines.path(triton.__version__)
HEADER = (
    f"{'kernel':84s} {'regs':>4s} {'spill':>5s} {'shared':>6s} {'prog':>4s} {'loop':>4s} {'mma':>3s} {'shape':16s} "
    f"{'mma clk':>7s} {'issue':>6s} {'B/clk':>5s} {ceilings.HEADER} widest load, store; notes"
)


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, judge; the exit status.  arguments: the command line's by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="processes")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    parser.add_argument("--changed", action="store_true", help="only kernels whose key is not the baseline's")
    parser.add_argument("--update", action="store_true", help="write the baseline anew")
    parser.add_argument("--keys", action="store_true", help="write anew the keys that there are; compile nothing")
    parser.add_argument("--ceilings", action="store_true", help="print the baseline's ceilings; compile nothing")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="default: of this Triton")
    asked = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        baseline = baselines.load(asked.baseline, triton.__version__, new=asked.update)
    except baselines.NoBaseline as error:
        print(f"FAILED {error}")
        return 1
    kernels, known = baseline["kernels"], baseline["keys"]
    if asked.ceilings:
        print(*ceilings.table({name: row for name, row in kernels.items() if asked.only in name}, H200), sep="\n")
        return 0
    asked_for = {case.name: keys.of(case) for case in launches.cases() if asked.only in case.name}
    if asked.keys:
        found = {name: key for key_of in asked_for.values() for name, key in key_of.items() if name in known}
        return _write(asked.baseline, kernels, known | found)
    names = [name for name, key_of in asked_for.items() if not (asked.changed and _unchanged(key_of, known))]
    rows, broken = _table(names, asked.jobs)
    failures = {row.name: judge.failures(row) for row in rows}
    if asked.update:
        for name in names:
            sound = {row: key for row, key in asked_for[name].items() if failures.get(row) == []}
            known = {row: key for row, key in known.items() if row not in asked_for[name]} | sound
        kernels = _kept(kernels, names) | judge.baseline_of(rows)
        _write(asked.baseline, kernels, known)
    excused = [(row, found) for row in rows if (found := reasons.of_spill(triton.__version__, row.name, row.spills))]
    for row, reason in excused:
        failures[row.name] = [why for why in failures[row.name] if why != judge.spilled(row.spills)]
        print(f"allowed {row.name}: {judge.spilled(row.spills)}: {reason.why}")
    broken += [f"{name}: {why}" for name, found in failures.items() for why in found]
    broken += _against_baseline(rows, kernels)
    if asked.changed:
        print(f"{len(asked_for) - len(names)} of {len(asked_for)} launches not compiled: their keys are the baseline's")
    print(f"{len(rows)} kernels compiled with Triton {triton.__version__} in {time.perf_counter() - start:.0f} s")
    for line in broken:
        print(f"FAILED {line}")
    return bool(broken)


def _unchanged(key_of: dict[str, str], known: dict[str, str]) -> bool:
    """Whether all kernels of a launch have the baseline's keys."""
    return all(known.get(name) == key for name, key in key_of.items())


def _table(names: list[str], jobs: int) -> tuple[list[judge.Row], list[str]]:
    """The cases of these names compiled and printed: (rows, what did not compile)."""
    rows, broken = [], []
    with contextlib.ExitStack() as stack:
        each = map
        if min(jobs, len(names)) > 1:
            each = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs)).imap
        print(HEADER)
        for name, found, error in each(_compiled, names):
            if error:
                broken.append(f"{name}: {error}")
                print(f"{name:84s} FAILED {error}")
            rows += found
            for row in found:
                print(_line(row), flush=True)
    return rows, broken


def _write(path: Path, kernels: dict, known: dict[str, str]) -> int:
    baselines.write(path, triton.__version__, kernels, known)
    print(f"wrote {path}")
    return 0


def _kept(kernels: dict, compiled: list[str]) -> dict:
    """The rows of a baseline whose cases there still are, and were not compiled now."""
    kept = {case.name for case in launches.cases()} - set(compiled)
    return {name: row for name, row in kernels.items() if name.partition(": ")[0] in kept}


def _compiled(name: str):
    """(name, rows, error) of one case; found by name, because a launch does not travel between processes."""
    case = next(case for case in launches.cases() if case.name == name)
    try:
        return name, judge.compile_case(case), None
    except Exception as error:  # whatever the compiler raises is a line of the table
        return name, [], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _against_baseline(rows: list[judge.Row], known: dict) -> list[str]:
    new = [f"{row.name}: not in the baseline; make codegen UPDATE=1" for row in rows if row.name not in known]
    return new + [
        f"{row.name}: {why}" for row in rows if row.name in known for why in judge.losses(row, known[row.name])
    ]


def _line(row: judge.Row) -> str:
    widest, notes = f"{_widest(row.accesses, 'ld')}, {_widest(row.accesses, 'st')}", " ".join(row.notes)
    shares = ceilings.line(ceilings.of(row.name, asdict(row), H200))
    return (
        f"{row.name:84s} {row.registers:4d} {row.spills:5d} {row.shared:6d} {row.programs:4d} {row.loop:4d} "
        f"{row.products:3d} {row.shape:16s} {row.tensor_cycles:7.0f} {row.issue_cycles:6.0f} "
        f"{row.bytes_per_clock:5.0f} {shares} {widest}; {notes or '-'}"
    )


def _widest(accesses: tuple[str, ...], way: str) -> str:
    """The widest access to global memory in one direction, in a word."""
    tma = [access for access in accesses if access.startswith("cp.async.bulk.tensor")]
    to_shared = [access for access in tma if "shared::cluster.global" in access or "mbarrier" in access]
    if (way == "ld" and to_shared) or (way == "st" and len(tma) > len(to_shared)):
        return "TMA"
    if way == "ld" and any(access.startswith("cp.async.c") for access in accesses):
        return "cp.async"
    plain = [access.split("global")[1].lstrip(".") for access in accesses if access.startswith(way)]
    return max(plain, key=_bits, default="-")


def _bits(access: str) -> int:
    vector = next((int(part[1:]) for part in access.split(".") if part[:1] == "v" and part[1:].isdigit()), 1)
    return vector * next((int(part[1:]) for part in access.split(".") if part[:1] == "b" and part[1:].isdigit()), 0)


if __name__ == "__main__":
    sys.exit(main())
