"""The table of tests/emulator/README.md: which kinds of bugs are caught in which family of kernels, and by what."""

from __future__ import annotations

import re

from benchmarks.mutants.planted import FAMILIES, KINDS, ROOT, Mutant

PAGE = ROOT / "tests" / "emulator" / "README.md"
TABLE = re.compile(r"<!-- mutants -->\n.*?\n<!-- /mutants -->", re.DOTALL)
Known = dict[Mutant, dict[str, dict | None]]


def write_table(known: Known) -> None:
    """Put the table of these results into the page."""
    PAGE.write_text(TABLE.sub(lambda _: table(known), PAGE.read_text()))


def table(known: Known) -> str:
    """The lines between the two marks, the marks included.  known: of each mutant what a way's tests said."""
    rows = [["kind", *FAMILIES], ["---"] * (len(FAMILIES) + 1)]
    for kind, what in KINDS.items():
        cells = [[mutant for mutant in known if (mutant.kind, mutant.family) == (kind, name)] for name in FAMILIES]
        rows.append([f"{kind}: {what}", *(cell(mutants, known) for mutants in cells)])
    rows.append(["all", *(cell([each for each in known if each.family == name], known) for name in FAMILIES)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    missed = [f"- {each.family}, {each.kind}. {each.wrong} {each.missed}" for each in known if each.missed]
    return "\n".join(["<!-- mutants -->", *lines, "", "Not caught:", "", *missed, "<!-- /mutants -->"])


def cell(found: list[Mutant], known: Known) -> str:
    """How many bugs, and of them how many are caught in the interpreter, on the card, are equal, are not caught."""
    counts = {
        "i": sum(bool(_test(known[each], "interpreter")) for each in found),
        "c": sum(bool(_test(known[each], "emulated")) for each in found),
        "=": sum(bool(each.equal) for each in found),
        "!": sum(bool(each.missed) for each in found),
    }
    return " ".join([str(len(found)) if found else "", *(f"{way}{count}" for way, count in counts.items() if count)])


def _test(outcomes: dict[str, dict | None], way: str) -> str:
    outcome = outcomes[way]
    return outcome["test"] if outcome else ""
