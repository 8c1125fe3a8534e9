"""What a card's sweep of configurations says: `python -m benchmarks.sweep FILE [--reached] [--write]`, no card needed.

FILE is a file of `make gpu` (benchmarks/card/sweep.py made its rows).  For each operation and shape class:

    best        the configuration with the highest geometric mean of cuBLASLt's time over its own, all shapes and kinds
                of scales of the class taken together; "least" is the lowest of these ratios
    committed   the same of kernels/tuning.json's row
    predicted   the timing model's time over the measured one, the geometric mean: 1 where the model is right

--reached prints what numerics/matmul_time.py's REACHED has to be: for each kernel and what it does with its sums, the
share of its static ceiling at which the model's median error is 0 over the shapes whose CRC-32 is even.  The errors,
before with a share of 1 and after, are the means of |log(predicted / measured)| over the others.

--write puts the committed configuration's least ratio, rounded down, into kernels/tuning.json, with the card that it
was measured on.  Where ours is faster in the mean but not at each shape the ratio stays null: the card's own trials
then decide by shape.  A better configuration is put in by hand: `make codegen-all` has to compile it with every Triton.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.card import records
from benchmarks.tuning_table import dump, merged
from fp8engine.kernels import limits, tuning
from fp8engine.kernels.tuning import PROCESSORS, Config
from fp8engine.numerics.cards import Card, card_of
from fp8engine.numerics.matmul_time import CEILINGS, predict
from fp8engine.ops import predicted

ARCHITECTURE = "sm_90"
SHARES = [share / 100 for share in range(40, 101)]


class Measured(NamedTuple):
    """A configuration over the shapes of its class.  Lists of cuBLASLt's time over ours, of predicted over measured."""

    config: Config
    ratios: list[float]
    predicted: list[float]

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios)


def main() -> None:
    """Print the table, and write the tuning table if asked to."""
    options = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    options.add_argument("file", type=Path)
    options.add_argument("--reached", action="store_true", help="print the timing model's REACHED, and nothing else")
    options.add_argument("--write", action="store_true", help="replace the rows of kernels/tuning.json")
    asked = options.parse_args()
    every, _ = records.read(asked.file)
    measured = timed(every)
    machine = next(record for record in every if record["kind"] == "machine")
    if asked.reached:
        for (family, sums), fit in reached(measured, card_of(machine["card"], PROCESSORS)).items():
            print(
                f"{family:15s} {sums:15s} {fit.share:.2f}, error {fit.before:.2f} -> {fit.after:.2f}, {fit.rows} rows"
            )
        return
    found = classes(measured)
    for (operation, name), configs in found.items():
        print("\n".join(lines(operation, name, configs)))
    if asked.write:
        content = json.loads(tuning.TABLE.read_text())
        tuning.TABLE.write_text(dump(merged(content, ARCHITECTURE, rows(found), machine)))


def timed(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sweep's rows of a file's records, less those of tiles that are no more: Gluon's of 256 rows or columns."""
    rows = [record["row"] for record in every if record.get("bench") == "sweep"]
    return [row for row in rows if "config" not in row or not _went(Config(*row["config"]))]


def _went(config: Config) -> bool:
    return config.kernel == "gluon" and (config.block_m, config.block_n, config.block_k) != limits.TILE


def classes(measured: list[dict[str, Any]]) -> dict[tuple[str, str], list[Measured]]:
    """(operation, class) -> what ran at every shape of the class, under every kind of scales; the best first."""
    library = {_place(row): row["seconds"] for row in measured if row["name"] == "cublas"}
    found: dict[tuple[str, str], dict[str, Measured]] = defaultdict(dict)
    places: dict[tuple[str, str], set] = defaultdict(set)
    for row in measured:
        if "config" in row:
            group = row["operation"], tuning.shape_class(*row["shape"][:2])
            places[group].add(_place(row))
            one = found[group].setdefault(row["name"], Measured(Config(*row["config"]), [], []))
            one.ratios.append(library[_place(row)] / row["seconds"])
            one.predicted.append(row["predicted"] / row["seconds"])
    return {
        group: sorted(
            (one for one in each.values() if len(one.ratios) == len(places[group])), key=lambda one: -one.mean
        )
        for group, each in found.items()
    }


def lines(operation: str, name: str, configs: list[Measured]) -> list[str]:
    """The best three, and the committed one."""
    committed = str(tuning.table()[operation][ARCHITECTURE][name]._replace(ratio=None))
    shown = [*configs[:3], *(one for one in configs[3:] if str(one.config) == committed)]
    made = [f"{operation} {name}: {len(configs[0].ratios)} matmuls"]
    for one in shown:
        mark = " (committed)" if str(one.config) == committed else ""
        model = statistics.geometric_mean(one.predicted)
        made.append(f"  {one.mean:.3f} least {min(one.ratios):.3f} predicted {model:.2f} {one.config}{mark}")
    return made


def rows(found: dict[tuple[str, str], list[Measured]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the tuning table: what is committed, with its ratio."""
    made = {}
    for (operation, name), configs in found.items():
        committed = tuning.table()[operation][ARCHITECTURE][name]._replace(ratio=None)
        for one in configs:
            if one.config == committed:
                everywhere = min(one.ratios) >= 1 or one.mean <= 1
                ratio = math.floor(1000 * min(one.ratios)) / 1000 if everywhere else None
                made[operation, name] = committed._replace(ratio=ratio)._asdict()
    return made


class Fit(NamedTuple):
    """share: of the ceiling.  before, after: mean errors on the rows that were not fitted.  rows: their number."""

    share: float
    before: float
    after: float
    rows: int


def reached(measured: list[dict[str, Any]], card: Card) -> dict[tuple[str, str], Fit]:
    """(family, what it does with its sums) -> what a card reached of its ceiling."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in measured:
        if "config" in row:
            sums = row["kind"] if row["operation"] == "matmul_block" else predicted.SUMS[row["operation"]]
            groups[predicted.family_of(Config(*row["config"])), sums].append(row)
    found = {}
    for (family, sums), rows in groups.items():
        kept = [row for row in rows if zlib.crc32(str(row["shape"]).encode()) % 2]
        fitted = [row for row in rows if row not in kept]
        share = min(SHARES, key=lambda share: abs(statistics.median(_errors(fitted, card, family, sums, share))))
        before, after = (statistics.fmean(map(abs, _errors(kept, card, family, sums, each))) for each in (1.0, share))
        found[family, sums] = Fit(share, before, after, len(kept))
    return found


def _errors(rows: list[dict[str, Any]], card: Card, family: str, sums: str, share: float) -> list[float]:
    """log(predicted / measured) of each row."""
    errors = []
    for row in rows:
        kernel = predicted.kernel_of(row["operation"], Config(*row["config"]), sums)
        kernel = replace(kernel, ceiling=CEILINGS[family][sums] * share)
        seconds = predict(card, kernel, tuple(row["shape"]), sustained=False).seconds
        errors.append(math.log(seconds / row["seconds"]))
    return errors


def _place(row: dict[str, Any]) -> tuple:
    return row["operation"], row["kind"], *row["shape"]


if __name__ == "__main__":
    main()
