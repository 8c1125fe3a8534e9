"""The timing model against published measurements: `python -m benchmarks.published`, no card needed.

published.json has tables of other people's, each with its source, its card and what was measured.  A row that is marked
"calibration" was used to fit numerics/matmul_time.py's parameters, and is left out of every error printed here.

    error    predicted time / measured time - 1

What a kernel does that is not ours follows from what its source says: DeepGEMM's first release takes the tile width
with the fewest waves of tiles, and of these the one whose last wave is fullest; cuBLASLt is `matmul_time.library`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from fp8engine.numerics.cards import CARDS, Card
from fp8engine.numerics.matmul_time import LIBRARY, Kernel, Prediction, library, predict

TABLES = Path(__file__).with_name("published.json")
ENOUGH = 0.15  # error that the model is meant to stay below
WIDTHS = range(16, 257, 8)  # of DeepGEMM's tiles
MULTICAST_FROM = 1024  # rows from which DeepGEMM shares loads between two programs


class Row(NamedTuple):
    """One measurement beside its prediction.  measured: microseconds."""

    table: str
    shape: tuple[int, int, int]
    measured: float
    found: Prediction
    calibration: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return 1e6 * self.found.seconds / self.measured - 1


def main() -> None:
    """Print the table of errors, and with --rows every row."""
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="every row too")
    asked = parser.parse_args()
    tables = json.loads(TABLES.read_text())
    found = [row for table in tables for row in rows_of(table)]
    if asked.rows:
        for row in found:
            used = "calibration" if row.calibration else f"{row.error:+.0%}"
            print(
                f"{row.table:24s} {'x'.join(map(str, row.shape)):18s} {row.measured:9.1f} us measured "
                f"{1e6 * row.found.seconds:9.1f} predicted  {used}"
            )
    for line in summary(tables, found):
        print(line)


def summary(tables: list[dict], rows: list[Row]) -> list[str]:
    """A Markdown table: each published table, its validation rows, and the model's error on them."""
    lines = ["| published table | card | rows | median error | worst |", "| --- | --- | --- | --- | --- |"]
    for table in tables:
        errors = [abs(row.error) for row in rows if row.table == table["id"] and not row.calibration]
        card = CARDS[table["card"]]
        limit = "" if table["watts"] == card.watts else f", {table['watts']} W"
        state = "" if table["sustained"] else ", single calls"
        if errors:
            name = f"[{table['id']}]({table['url']})"
            most = f"{max(errors):.0%}" if max(errors) <= ENOUGH else f"**{max(errors):.0%}**"
            middle = statistics.median(errors)
            lines.append(f"| {name} | {card.title}{limit}{state} | {len(errors)} | {middle:.0%} | {most} |")
    errors = [abs(row.error) for row in rows if not row.calibration]
    within, used = sum(error <= ENOUGH for error in errors), sum(row.calibration for row in rows)
    lines.append(f"| all | | {len(errors)} | {statistics.median(errors):.0%} | {max(errors):.0%} |")
    return [*lines, "", f"{within} of {len(errors)} rows within {ENOUGH:.0%}; {used} other rows were fitted to."]


def rows_of(table: dict) -> list[Row]:
    """The rows of one published table, predicted."""
    card = dataclasses.replace(CARDS[table["card"]], watts=table["watts"])
    return [
        Row(
            table["id"],
            tuple(row["shape"]),
            row["us"],
            predicted(card, table["kernel"], tuple(row["shape"]), table["sustained"]),
            row.get("calibration", False),
        )
        for row in table["rows"]
    ]


def predicted(card: Card, kernel: str, shape: tuple[int, int, int], sustained: bool) -> Prediction:
    """What the model says of a kernel as published.json names it.

    "cublas SUMS BITS"; "triton fast 8", ours; "deepgemm tile MxN"; "deepgemm WIDEST", which chooses its tile.
    """
    family, *rest = kernel.split()
    if family == "cublas":
        return library(card, " ".join(rest[:-1]), int(rest[-1]), shape, sustained=sustained)
    if family == "triton":
        return predict(card, Kernel(128, 256), shape, sustained=sustained)
    block_m, block_n = map(int, rest[1].split("x")) if rest[0] == "tile" else _tile(card, shape, int(rest[0]))
    cluster = 2 if shape[0] >= MULTICAST_FROM else 1
    one = Kernel(block_m, block_n, ceiling=LIBRARY, overlapped=True, cluster=cluster)
    return predict(card, one, shape, sustained=sustained)


def _tile(card: Card, shape: tuple[int, int, int], widest: int) -> tuple[int, int]:
    """DeepGEMM's choice of a tile."""
    m, n, _ = shape
    height = 64 if m <= 64 else 128

    def rank(width: int) -> tuple[int, int]:
        tiles = math.ceil(m / height) * math.ceil(n / width)
        waves = math.ceil(tiles / card.processors)
        return waves, -(tiles - (waves - 1) * card.processors)

    return height, min((width for width in WIDTHS if width <= widest), key=rank)


if __name__ == "__main__":
    main()
