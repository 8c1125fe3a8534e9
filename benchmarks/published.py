"""The timing model against published measurements: `python -m benchmarks.published [--rows] [--write]`, no card needed.

published.json has tables of other people's, each with its source, its card and what was measured; whole layers and
models are published_layers.py's.

    error     predicted time / measured time - 1
    fitted    rows that benchmarks/fit.py adjusted numerics/matmul_time.py's parameters to: where the CRC-32 of the
              table's name and the row's shapes is even.  All others are kept aside

What a kernel does that is not ours follows from what its source says:

    cuBLASLt                 `matmul_time.library`, and vLLM's CUTLASS kernel too
    DeepGEMM, first          tiles up to 128 wide: the fewest waves of tiles, then the fullest last wave, then the
                             narrowest.  Waits for a tile's store before the next tile (fp8_gemm.cuh at 93c92c2)
    DeepGEMM, later          from tiles of 64, 128 and 256 rows (`get_best_configs`, spring of 2025); does not wait

Meta's cards have 500 W and 2.4 TB/s (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md); that a row is of one of
them is assumed where its watts are 500.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import zlib
from pathlib import Path
from typing import NamedTuple

from fp8engine.numerics import matmul_time
from fp8engine.numerics.cards import CARDS, Card
from fp8engine.numerics.matmul_time import Kernel, Prediction, library, predict

TABLES = Path(__file__).with_name("published.json")
WIDTHS = range(16, 257, 8)  # of DeepGEMM's tiles
KINDS = {"cublas 16": "cuBLAS, 16 bits", "cublas 8": "cuBLAS, FP8", "deepgemm": "DeepGEMM", "triton": "Triton"}


class Row(NamedTuple):
    """One measurement beside its prediction.  shapes: of matmuls that were timed together.  Microseconds."""

    table: str
    kind: str
    shapes: tuple[tuple[int, int, int], ...]
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def main() -> None:
    """Print the table of errors, and with --rows every row."""
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="every row too")
    asked = parser.parse_args()
    found = rows()
    if asked.rows:
        for row in found:
            shapes = " + ".join("x".join(map(str, shape)) for shape in row.shapes)
            print(
                f"{row.table:24s} {row.measured:9.1f} us measured {row.predicted:9.1f} predicted {row.error:+4.0%} "
                f"{'fitted' if row.fitted else '      '} {shapes}"
            )
    for line in summary(found):
        print(line)


def rows() -> list[Row]:
    """Every row of published.json, predicted."""
    return [row for table in json.loads(TABLES.read_text()) for row in rows_of(table)]


def rows_of(table: dict) -> list[Row]:
    """The rows of one published table, predicted."""
    card = card_of(table)
    family, *rest = table["kernel"].split()
    kind = KINDS[f"{family} {rest[-1]}" if family == "cublas" else family]
    made = []
    for row in table["rows"]:
        shapes = tuple(tuple(shape) for shape in row.get("shapes", [row.get("shape")]))
        sustained = row.get("sustained", table["sustained"])
        seconds = sum(predicted(card, table["kernel"], shape, sustained).seconds for shape in shapes)
        made.append(Row(table["id"], kind, shapes, row["us"], 1e6 * seconds, is_fitted(table["id"], shapes)))
    return made


def is_fitted(table: str, shapes: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether parameters were fitted to a row: decided by its name and shapes, never by its error."""
    return zlib.crc32(f"{table} {list(shapes)}".encode()) % 2 == 0


def card_of(table: dict) -> Card:
    """The card of a published table, with the limits that the table names."""
    card = CARDS[table["card"]]
    return dataclasses.replace(card, watts=table["watts"], memory=table.get("memory", card.memory))


def summary(found: list[Row]) -> list[str]:
    """A Markdown table: median and worst error by kind of row, fitted and kept aside."""
    lines = [
        "| kind of row | fitted to | median | worst | kept aside | median | worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind in (*KINDS.values(), "all"):
        errors = (
            [abs(row.error) for row in found if row.fitted == f and kind in (row.kind, "all")] for f in (True, False)
        )
        lines.append(f"| {kind} | {' | '.join(map(_of, errors))} |")
    return lines


def _of(errors: list[float]) -> str:
    return f"{len(errors)} | {statistics.median(errors):.1%} | {max(errors):.0%}" if errors else "0 | | "


def predicted(card: Card, kernel: str, shape: tuple[int, int, int], sustained: bool) -> Prediction:
    """What the model says of a kernel as published.json names it.

    "cublas SUMS BITS"; "triton fast 8"; "deepgemm first MxN", "deepgemm first WIDEST", "deepgemm later".
    """
    family, *rest = kernel.split()
    if family == "cublas":
        return library(card, " ".join(rest[:-1]), int(rest[-1]), shape, sustained=sustained)
    if family == "triton":
        return predict(card, Kernel(128, 256), shape, sustained=sustained)
    first = rest[0] == "first"
    tile = _later_tile(card, shape) if not first else _first_tile(card, shape, rest[1])
    one = Kernel(
        *tile,
        ceiling=matmul_time.LIBRARY,
        overlapped=not first,
        cluster=2 if shape[0] >= (1024 if first else 512) else 1,
    )
    return predict(card, one, shape, sustained=sustained)


def _first_tile(card: Card, shape: tuple[int, int, int], said: str) -> tuple[int, int]:
    """said: the tile itself, or how wide it may be."""
    if "x" in said:
        height, width = map(int, said.split("x"))
        return height, width
    height = 64 if shape[0] <= 64 else 128
    widths = [width for width in WIDTHS if width <= int(said)]
    return height, min(widths, key=lambda width: _waves(card, shape, height, width))


def _later_tile(card: Card, shape: tuple[int, int, int]) -> tuple[int, int]:
    best, best_waves = (0, 0), (math.inf, 0.0)
    for height in (64, 128, 256):
        for width in (*range(16, 129, 8), 144, 160):
            if height > 128 and width > 128:
                continue
            waves = _waves(card, shape, height, width)
            smaller = (height == best[0] and width < best[1]) or (width == best[1] and height < best[0])
            if waves < best_waves or (waves == best_waves and (smaller or (height != best[0] and width > best[1]))):
                best, best_waves = (height, width), waves
    return best


def _waves(card: Card, shape: tuple[int, int, int], height: int, width: int) -> tuple[float, float]:
    """(waves of tiles, less the tiles of the last one)."""
    tiles = math.ceil(shape[0] / height) * math.ceil(shape[1] / width)
    waves = math.ceil(tiles / card.processors)
    return waves, -(tiles - (waves - 1) * card.processors)


if __name__ == "__main__":
    main()
