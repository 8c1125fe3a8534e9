"""The timing model against published measurements: `python -m benchmarks.published [--rows] [--write]`, no card needed.

published.json has tables of other people's matmuls, each with its source, its card and what was measured; speed-ups of
whole layers and models are published_layers.py's.  --write puts the table of errors into benchmarks/README.md.

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
import json
import math
import statistics
import zlib
from pathlib import Path
from typing import NamedTuple

from benchmarks import published_layers
from benchmarks.published_layers import Layers, card_of
from fp8engine.numerics import matmul_time
from fp8engine.numerics.cards import Card
from fp8engine.numerics.matmul_time import Kernel, Prediction, library, predict

TABLES = Path(__file__).with_name("published.json")
WIDTHS = range(16, 257, 8)  # of DeepGEMM's tiles
DOCS = Path(__file__).parent / "README.md"
MARKS = ("<!-- benchmarks.published -->", "<!-- end of benchmarks.published -->")
KINDS = {"cublas 16": "cuBLAS, 16 bits", "cublas 8": "cuBLAS, FP8", "deepgemm": "DeepGEMM", "triton": "Triton"}
ALL = "all matmuls"
# Median and worst error of the model of commit cb0a6f9 on the rows that are kept aside: seven parameters, fitted to 13
# rows, L2 for each multiprocessor alone.
BEFORE = {
    "cuBLAS, 16 bits": (0.079, 0.33),
    "cuBLAS, FP8": (0.072, 0.17),
    "DeepGEMM": (0.117, 0.50),
    "Triton": (0.083, 0.14),
    ALL: (0.086, 0.50),
    published_layers.KINDS["layer"]: (0.085, 0.31),
    published_layers.KINDS["model"]: (0.066, 0.13),
}


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
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md too")
    asked = parser.parse_args()
    matmuls, layers = rows(), published_layers.rows()
    if asked.rows:
        for row in (*matmuls, *layers):
            shapes = " + ".join("x".join(map(str, shape)) for shape in row.shapes)
            numbers = f"{row.measured:9.2f} measured {row.predicted:9.2f} predicted {row.error:+4.0%}"
            fitted = "fitted" if isinstance(row, Row) and row.fitted else ""
            print(f"{row.table:30s} {numbers} {fitted:6s} {shapes}")
    lines = summary(matmuls, layers)
    print("\n".join(lines))
    if asked.write:
        text = DOCS.read_text()
        start, end = (text.index(mark) for mark in MARKS)
        DOCS.write_text(f"{text[: start + len(MARKS[0])]}\n" + "\n".join(lines) + f"\n{text[end:]}")


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


def summary(matmuls: list[Row], layers: list[Layers]) -> list[str]:
    """A Markdown table: median and worst error by kind of row, fitted and kept aside."""
    lines = [
        "| rows | kept aside | median | worst | before the fit | worst | fitted to | median | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, (median, worst) in BEFORE.items():
        of_kind = [row for row in matmuls if kind in (row.kind, ALL)]
        fitted = [row.error for row in of_kind if row.fitted]
        aside = [row.error for row in of_kind if not row.fitted] + [row.error for row in layers if row.kind == kind]
        lines.append(f"| {kind} | {_of(aside)} | {median:.1%} | {worst:.0%} | {_of(fitted)} |")
    return lines


def _of(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{len(sizes)} | {statistics.median(sizes):.1%} | {max(sizes):.0%}" if sizes else "0 | | "


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
