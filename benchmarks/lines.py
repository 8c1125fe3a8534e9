"""Lines of each room of the library, as docs/architecture.md states them: `python benchmarks/lines.py`.

Code: lines that hold a statement or part of one; docstrings, comments and blank lines are left out.
"""

import ast
import io
import tokenize
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ENGINE = ("numerics", "ops", "scaling", "autograd", "auto", "nn", "convert")  # what computes and decides
TARGETS = {"engine": 12_000, "kernels": 3_000, "package": 22_000}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(source: str) -> tuple[int, int]:
    """(lines, lines of code) of a file.

    >>> count('"Doc."\\n\\n# why\\nx = [\\n    1,\\n]\\n')
    (6, 3)
    """
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(source.splitlines()), len(code - docs)


def files_of(folder: Path) -> list[tuple[int, int]]:
    """The counts of every Python file below a folder, links not followed."""
    found = [path for path in folder.rglob("*.py") if "kernels" not in path.relative_to(ROOT / "fp8engine").parts]
    return [count(path.read_text()) for path in found]


def main() -> None:
    """Print a table of rooms, then the totals beside their targets."""
    package = ROOT / "fp8engine"
    rooms = {path.name: files_of(path) for path in package.iterdir() if path.is_dir() and not path.is_symlink()}
    rooms = {name: files for name, files in rooms.items() if files}
    rooms["top level"] = [count(path.read_text()) for path in package.glob("*.py")]
    rooms["kernels"] = [count(path.read_text()) for path in (ROOT / "kernels").rglob("*.py")]
    print("| room | files | lines | of them code | longest file |\n| --- | --- | --- | --- | --- |")
    for name, files in sorted(rooms.items(), key=lambda row: -sum(lines for lines, _ in row[1])):
        lines, code = (sum(column) for column in zip(*files, strict=True))
        print(f"| {name} | {len(files)} | {lines:,} | {code:,} | {max(n for n, _ in files)} |")
    every = [file for files in rooms.values() for file in files]
    engine = [file for name in ENGINE for file in rooms[name]]
    for name, files in {"engine": engine, "kernels": rooms["kernels"], "package": every}.items():
        lines, code = (sum(column) for column in zip(*files, strict=True))
        print(f"{name}: {lines:,} lines, {code:,} of them code (target {TARGETS[name]:,} lines)")
    print(f"median file: {median(lines for lines, _ in every):.0f} lines")


if __name__ == "__main__":
    main()
