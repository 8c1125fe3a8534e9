"""Lines of each room of the library, as docs/architecture.md states them: `python benchmarks/lines.py`."""

from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
ENGINE = ("numerics", "ops", "scaling", "autograd", "auto", "nn", "convert")  # what computes and decides
TARGETS = {"engine": 12_000, "kernels": 3_000, "package": 22_000}


def lines_of(folder: Path) -> list[int]:
    """Lines of every Python file below a folder, links not followed."""
    files = (path for path in folder.rglob("*.py") if "kernels" not in path.relative_to(ROOT / "fp8engine").parts)
    return [len(path.read_text().splitlines()) for path in files]


def main() -> None:
    """Print a table of rooms, then the totals beside their targets."""
    package = ROOT / "fp8engine"
    rooms = {path.name: lines_of(path) for path in package.iterdir() if path.is_dir() and not path.is_symlink()}
    rooms = {name: lines for name, lines in rooms.items() if lines}
    rooms["top level"] = [len(path.read_text().splitlines()) for path in package.glob("*.py")]
    rooms["kernels"] = [len(path.read_text().splitlines()) for path in (ROOT / "kernels").rglob("*.py")]
    print("| room | files | lines | longest |\n| --- | --- | --- | --- |")
    for name, lines in sorted(rooms.items(), key=lambda row: -sum(row[1])):
        print(f"| {name} | {len(lines)} | {sum(lines):,} | {max(lines)} |")
    every = [n for lines in rooms.values() for n in lines]
    totals = {
        "engine": sum(sum(rooms[name]) for name in ENGINE),
        "kernels": sum(rooms["kernels"]),
        "package": sum(every),
    }
    for name, found in totals.items():
        print(f"{name}: {found:,} lines (target {TARGETS[name]:,})")
    print(f"median file: {median(every):.0f} lines")


if __name__ == "__main__":
    main()
