"""Which tests find the bugs that are planted in the kernels: `make mutants`.

    python -m benchmarks.mutants [interpreter | emulated] [--only WORD]

Prints a line a mutant: the test that failed first, or "SURVIVED", or why no test can see it.  Exits with 1 where one
survived without a reason, or was killed with one.  Writes results.json beside this file.
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
from benchmarks.mutants.trials import WAYS, Copy, Outcome

RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    """Try every mutant every way; the exit status."""
    parser = argparse.ArgumentParser(description="Which tests find the bugs that are planted in the kernels.")
    parser.add_argument("ways", nargs="*", choices=[[], *WAYS], help="default: all")
    parser.add_argument("--only", default="", help="mutants whose file or sentence has this in it")
    asked = parser.parse_args()
    chosen = [mutant for mutant in mutants() if asked.only in mutant.file or asked.only in mutant.wrong]
    found = {way: tried(chosen, way) for way in asked.ways or WAYS}
    bad = [
        mutant for mutant in chosen if not as_expected(mutant, [now[mutant] for now in found.values() if mutant in now])
    ]
    for mutant in bad:
        print(f"FAILED {mutant.file}: {'killed, and called equal' if mutant.equal else 'survived'}: {mutant.wrong}")
    return bool(bad)


def as_expected(mutant: Mutant, outcomes: list[Outcome]) -> bool:
    """Whether some way killed it, or none did and it says why."""
    return any(outcome.test for outcome in outcomes) != bool(mutant.equal)


def tried(chosen: list[Mutant], way: str) -> dict[Mutant, Outcome]:
    """The outcome of each mutant whose file has tests this way (Gluon has no interpreter)."""
    outcomes = {}
    chosen = [mutant for mutant in chosen if mutant.file in WAYS[way]]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), way)
        for file in dict.fromkeys(mutant.file for mutant in chosen):
            print(f"{way}: {file} without a mutant passes in {copy.unmutated(file).seconds:.0f} s", flush=True)
        for mutant in chosen:
            outcome = outcomes[mutant] = copy.trial(mutant)
            print(f"{outcome.seconds:4.0f} s  {mutant.file:24} {mutant.wrong}", flush=True)
            print(f"{'':8}{verdict(mutant, outcome)}", flush=True)
            write(way, outcomes)  # at once: a run that is stopped has lost nothing
    killed = sum(bool(outcome.test) for outcome in outcomes.values())
    print(f"{way}: {killed} of {len(chosen)} killed in {sum(outcome.seconds for outcome in outcomes.values()):.0f} s")
    return outcomes


def verdict(mutant: Mutant, outcome: Outcome) -> str:
    """One line of what became of a mutant."""
    if outcome.test:
        return f"{outcome.test.removeprefix('tests/')}: {outcome.why}"
    return f"equal: {mutant.equal}" if mutant.equal else "SURVIVED"


def write(way: str, outcomes: dict[Mutant, Outcome]) -> None:
    """results.json, a mutant a line: what was run now, and of the others what was known (null: not yet run)."""
    known = {tuple(row[key] for key in Mutant._fields): row for row in json.loads(RESULTS.read_text())["mutants"]}
    rows = []
    for mutant in mutants():
        row = mutant._asdict() | {each: known.get(mutant, {}).get(each) for each in WAYS}
        if mutant in outcomes:
            row[way] = {"test": outcomes[mutant].test, "seconds": round(outcomes[mutant].seconds)}
        rows.append(f"  {json.dumps(row)}")
    head = {"command": "python -m benchmarks.mutants", "torch": torch.__version__, "triton": triton.__version__}
    lines = ",\n".join(rows)
    RESULTS.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "mutants": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
