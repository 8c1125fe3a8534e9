"""Which tests find the bugs that are planted in the kernels: `make mutants`.

    python -m benchmarks.mutants [interpreter | emulated] [--only WORD] [--new]

Prints a line a mutant: the test that failed first, or "SURVIVED", or why no test sees it.  Exits with 1 where one
survived without a reason, or was killed with one.  Writes results.json beside this file, and from it the table in
tests/emulator/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import triton

from benchmarks.mutants.planted import Mutant, mutants
from benchmarks.mutants.table import write_table
from benchmarks.mutants.trials import WAYS, Copy, Outcome, ways_of

RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Try every mutant every way; the exit status."""
    parser = argparse.ArgumentParser(description="Which tests find the bugs that are planted in the kernels.")
    parser.add_argument("ways", nargs="*", choices=[[], *WAYS], help="default: all")
    parser.add_argument("--only", default="", help="mutants whose file or sentence has this in it")
    parser.add_argument("--new", action="store_true", help="mutants without a result")
    asked = parser.parse_args()
    chosen = [mutant for mutant in mutants() if asked.only in mutant.file or asked.only in mutant.wrong]
    for way in asked.ways or WAYS:
        old = {mutant for mutant, outcomes in known().items() if outcomes[way]} if asked.new else set()
        tried([mutant for mutant in chosen if mutant not in old], way)
    write_table(known())
    bad = [mutant for mutant in chosen if not as_expected(mutant, known()[mutant])]
    for mutant in bad:
        print(f"FAILED {mutant.file}: {'killed' if mutant.equal or mutant.missed else 'survived'}: {mutant.wrong}")
    return bool(bad)


def as_expected(mutant: Mutant, outcomes: dict[str, dict | None]) -> bool:
    """Whether some way killed it, or none did and it says why.  outcomes: as results.json has them."""
    killed = any(outcome["test"] for outcome in outcomes.values() if outcome)
    return killed != bool(mutant.equal or mutant.missed)


def tried(chosen: list[Mutant], way: str) -> None:
    """Try each mutant that there are tests for this way (Gluon and machine code have no interpreter)."""
    outcomes = {}
    chosen = [mutant for mutant in chosen if way in ways_of(mutant)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), way)
        suite = None
        for mutant in chosen:
            if WAYS[way][mutant.file] != suite:
                suite = WAYS[way][mutant.file]
                print(f"{way}: {mutant.file} without a mutant: {copy.unmutated(mutant.file).seconds:.0f} s", flush=True)
            outcome = outcomes[mutant] = copy.trial(mutant)
            print(f"{outcome.seconds:4.0f} s  {mutant.file:24} {mutant.wrong}", flush=True)
            print(f"{'':8}{verdict(mutant, outcome)}", flush=True)
            write(way, outcomes)  # at once: a run that is stopped has lost nothing
        copy.close()
    killed = sum(bool(outcome.test) for outcome in outcomes.values())
    print(f"{way}: {killed} of {len(chosen)} killed in {sum(outcome.seconds for outcome in outcomes.values()):.0f} s")


def verdict(mutant: Mutant, outcome: Outcome) -> str:
    """One line of what became of a mutant."""
    if outcome.test:
        return f"{outcome.test.removeprefix('tests/')}: {outcome.why}"
    if mutant.equal:
        return f"equal: {mutant.equal}"
    return f"not caught: {mutant.missed}" if mutant.missed else "SURVIVED"


def known() -> dict[Mutant, dict[str, dict | None]]:
    """What results.json says of each mutant, by way: the test and the seconds, or None where it was not yet run."""
    rows = {_bug(row): row for row in json.loads(RESULTS.read_text())["mutants"]}
    return {mutant: {way: rows.get(_bug(mutant._asdict()), {}).get(way) for way in WAYS} for mutant in mutants()}


def _bug(row: dict) -> tuple:
    """What tells mutants apart: what is said of one may change without a new run."""
    return tuple(row.get(key) for key in ("file", "old", "new", "kernel"))


def write(way: str, outcomes: dict[Mutant, Outcome]) -> None:
    """results.json, a mutant a line: what was run now, and of the others what was known (null: not yet run)."""
    rows = []
    for mutant, before in known().items():
        row = mutant._asdict() | before
        if mutant in outcomes:
            row[way] = {"test": outcomes[mutant].test, "seconds": round(outcomes[mutant].seconds)}
        rows.append(f"  {json.dumps(row)}")
    head = {"command": "python -m benchmarks.mutants", "torch": torch.__version__, "triton": triton.__version__}
    lines = ",\n".join(rows)
    RESULTS.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "mutants": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
