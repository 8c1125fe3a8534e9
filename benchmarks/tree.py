"""The tree of all files, each with the first sentence of its docstring: `python benchmarks/tree.py` prints it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMN, WIDTH = 30, 150  # where what a file is begins, and where a long sentence is cut


def tree(root: Path = ROOT) -> str:
    """Every Python file of fp8engine/ and kernels/, a line each: its name, and the first sentence of its docstring."""
    return "".join(_lines(root / "fp8engine", 0)) + "".join(_lines(root / "kernels", 0))


def _lines(folder: Path, depth: int) -> list[str]:
    start = folder / "__init__.py"
    lines = [_line(f"{folder.name}/", depth, start if start.exists() else None)]
    rooms = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and any(path.glob("*.py"))]
    files = (path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py")
    lines.extend(_line(path.name, depth + 1, path) for path in files)
    for room in sorted(rooms):
        lines += _lines(room, depth + 1)
    return lines


def _line(name: str, depth: int, file: Path | None) -> str:
    text = (file and ast.get_docstring(ast.parse(file.read_text()))) or ""
    what = re.split(r"(?<=[^.\d])\.(?=\s|$)|\n\n|:\s", text, maxsplit=1)[0].replace("\n", " ")
    return (f"{'  ' * depth}{name}".ljust(COLUMN) + f" {what}")[:WIDTH].rstrip() + "\n"


if __name__ == "__main__":
    print(tree(), end="")
