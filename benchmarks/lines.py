"""Lines of code of each room beside its budget: the table of docs/architecture.md, which `--write` rewrites.

    python benchmarks/lines.py           print the table and the totals
    python benchmarks/lines.py --write   write both into docs/architecture.md

Code: lines that hold a statement or part of one, imports among them; docstrings, comments and blank lines are left
out.  A budget is the most that a room may have now (tests/house/test_lines.py): it goes down with every step that
deletes, and rises only in a change that says what its lines buy.  The goal is what the redesign wants to reach.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TABLE = re.compile(r"(?<=<!-- written by benchmarks/lines.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
ENGINE = ("numerics", "ops", "scaling", "autograd", "auto", "nn", "convert")  # what computes and decides
GOALS = {"engine": 8_600, "kernels": 2_500, "package": 20_600}  # lines of code
# By room: lines of code that it may have.
BUDGET = {
    "amp": 3_107,
    "auto": 1_748,
    "autograd": 2_021,
    "bench": 796,
    "cli": 969,
    "convert": 1_755,
    "demo": 993,
    "distributed": 2_257,
    "export": 1_344,
    "integrations": 195,
    "kernels": 2_887,
    "nn": 1_425,
    "numerics": 610,
    "ops": 3_068,
    "report": 2_808,
    "scaling": 1_258,
    "top level": 440,
}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Size(NamedTuple):
    """Of one file, or of several together: lines, and lines of code."""

    lines: int
    code: int


def count(source: str) -> Size:
    """The size of a file.

    >>> count('"Doc."\\n\\n# why\\nx = [\\n    1,\\n]\\n')
    Size(lines=6, code=3)
    """
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return Size(len(source.splitlines()), len(code - docs))


def rooms(root: Path = ROOT) -> dict[str, list[Size]]:
    """The size of each file, by its room; the kernels once, where they really are."""
    package = root / "fp8engine"
    found = {path.name: _below(path) for path in package.iterdir() if path.is_dir() and not path.is_symlink()}
    found = {name: files for name, files in found.items() if files}
    found["top level"] = [count(path.read_text()) for path in package.glob("*.py")]
    return found | {"kernels": _below(root / "kernels")}


def _below(folder: Path) -> list[Size]:
    return [count(path.read_text()) for path in folder.rglob("*.py")]


def total(files: list[Size]) -> Size:
    """All files together."""
    return Size(sum(file.lines for file in files), sum(file.code for file in files))


def table(found: dict[str, list[Size]]) -> str:
    """The rooms by their lines of code, each beside its budget, and the totals beside what they are to reach."""
    lines = [
        "| room | files | lines | of them code | budget of code | longest file |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, files in sorted(found.items(), key=lambda row: -total(row[1]).code):
        size, longest = total(files), max(file.lines for file in files)
        lines.append(f"| {name} | {len(files)} | {size.lines:,} | {size.code:,} | {BUDGET[name]:,} | {longest} |")
    lines += ["", "| | lines | of them code | goal of code |", "| --- | --- | --- | --- |"]
    for name, size in totals(found).items():
        lines.append(f"| {name} | {size.lines:,} | {size.code:,} | {GOALS[name]:,} |")
    return "\n".join(lines) + "\n"


def totals(found: dict[str, list[Size]]) -> dict[str, Size]:
    """The engine's rooms, the kernels, and the whole package."""
    every = {"engine": ENGINE, "kernels": ("kernels",), "package": tuple(found)}
    return {name: total([file for room in parts for file in found[room]]) for name, parts in every.items()}


def main() -> None:
    """Print the tables, or write them into the page."""
    found = rooms()
    text = table(found)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(), count=1))
        return
    print(text)
    for name, size in totals(found).items():
        print(f"{name}: {size.lines:,} lines, {size.code:,} of them code (goal {GOALS[name]:,})")
    print(f"median file: {median(file.lines for files in found.values() for file in files):.0f} lines")


if __name__ == "__main__":
    main()
