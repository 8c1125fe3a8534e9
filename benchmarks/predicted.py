"""By kernel, the static ceiling and the predicted time, before and after: `python -m benchmarks.predicted [--write]`.

    before   predicted_before.json: the baseline's rows as of commit 36576bc, the matmuls of sm_90 alone
    after    the baseline of the Triton that development runs (machine_code/baselines.py)

Of each kind of matmul the configuration that is predicted to be the fastest at a shape stands for it.  Ceilings are
those of the machine code (machine_code/sass.py), times those of numerics/matmul_time.py for a card that multiplies
without pause.  Nothing is measured, and no card is needed.  Rows whose names say another thing than sizes and options
are listed, not guessed.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine_code import baselines
from fp8engine.numerics.cards import CARDS, Card
from fp8engine.numerics.matmul_time import CEILINGS, Kernel, predict

HERE = Path(__file__).parent
BEFORE, AFTER = HERE / "predicted_before.json", baselines.path(baselines.DEVELOPED)
SHAPES = ((8192, 4096, 4096), (8192, 4096, 1024), (64, 4096, 4096), (64, 1024, 8192))
DOCS = HERE.parent / "docs" / "performance.md"
MARKS = ("<!-- benchmarks.predicted -->", "<!-- end -->")
KINDS = {  # by what its main loop does with the sums -> as the table calls it
    "fast": "one scale per tensor or row, fast",
    "promoted": "the same, promoted every 128 of K",
    "block": "blocks 1x128 by 128x128 (forward, dgrad)",
    "block by block": "blocks 1x128 by 1x128 (wgrad)",
    "16 bits": "BF16, FP16",
}
NAME = re.compile(
    r"^(?P<what>matmul_.+?) sm_90 (?P<tile>\d+x\d+x\d+) g(?P<group>\d+) w\d+ s\d+ p\d+ (?P<means>\w+)(?P<rest>.*)$"
)
ODD = ("odd K", "odd N", "across K")  # not the machine code of aligned operands


class Found(NamedTuple):
    """One row of a baseline as the model takes it.  sums: a key of KINDS."""

    name: str
    sums: str
    means: str
    kernel: Kernel


def main() -> None:
    """Print the table as Markdown, and what in it does not fit the package's own constants."""
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--card", default="h100-sxm", choices=CARDS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md too")
    asked = parser.parse_args()
    before, after = (json.loads(path.read_text())["kernels"] for path in (BEFORE, AFTER))
    lines = table(before, after, CARDS[asked.card])
    print("\n".join(lines))
    if asked.write:
        text = DOCS.read_text()
        start, end = (text.index(mark) for mark in MARKS)
        made = "\n".join(line for line in lines if line.startswith("|"))
        DOCS.write_text(f"{text[: start + len(MARKS[0])]}\n{made}\n{text[end:]}")


def table(before: dict[str, Any], after: dict[str, Any], card: Card) -> list[str]:
    """The Markdown table, and below it what could not be predicted."""
    old, new = ([_read(name, row) for name, row in rows.items()] for rows in (before, after))
    lines = [
        "| matmul | M x N x K | before: kernel | ceiling | us | after: kernel | ceiling | us | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for sums, title in KINDS.items():
        for shape in SHAPES:
            best = [_fastest(rows, sums, shape, card, more) for rows, more in ((old, False), (new, True))]
            cells = [cell for one in best for cell in _cells(one)]
            gain = f"{best[0][1] / best[1][1]:.2f}x" if best[0] and best[1] else ""
            lines.append(f"| {title} | {'x'.join(map(str, shape))} | {' | '.join(cells)} | {gain} |")
    left = [name for name in after if name.startswith("matmul") and " sm_90 " in name and not NAME.match(name)]
    lines += [f"not predicted, its name is not understood: {name}" for name in left]
    return lines + stale(after)


def stale(rows: dict[str, Any]) -> list[str]:
    """Where the machine code's best ceiling is no longer the constant in numerics/matmul_time.py."""
    lines = []
    for family, sums in (("triton", "promoted"), ("triton", "block"), ("triton", "block by block"), *GLUON):
        found = [one.kernel.ceiling for one in map(_read_row, rows.items()) if one and _is(one, family, sums)]
        said = CEILINGS[family][sums]
        if found and not said - 0.005 <= max(found) <= said + ROOM:  # wider tiles may allow a little more
            lines.append(f"numerics/matmul_time.py: CEILINGS of {family}, {sums} is {said}; machine code {max(found)}")
    return lines


GLUON = tuple(("gluon", sums) for sums in ("promoted", "block", "block by block"))
ROOM = 0.03


def _is(one: Found, family: str, sums: str) -> bool:
    return one.sums == sums and (one.means == "gluon") == (family == "gluon")


def _read_row(item: tuple[str, dict[str, Any]]) -> Found | None:
    return _read(*item)


def _read(name: str, row: dict[str, Any]) -> Found | None:
    """A row with aligned operands and a plain epilogue; None for others."""
    found = NAME.match(name)
    if found is None or any(odd in name for odd in ODD) or found["means"] == "ptr" or not row["ceiling"]:
        return None
    ends = [word for word in found["rest"].split() if word != "flat" and not word.startswith("k/")]
    if ends not in ([], ["plain"]):
        return None
    what, rest = found["what"], found["rest"]
    by_block = "block" if "1x128 128x128" in what else "block by block" if "1x128 1x128" in what else ""
    sums = by_block or ("16 bits" if "fp16" in what else "promoted" if "promoted" in what else "fast")
    split = re.search(r" k/(\d+)", rest)
    kernel = Kernel(
        *map(int, found["tile"].split("x")),
        ceiling=row["ceiling"] / 100,
        group_m=int(found["group"]),
        programs=row["programs"],
        bits=16 if sums == "16 bits" else 8,
        overlapped=found["means"] == "gluon" or " flat" in rest,
        split=int(split[1]) if split else 1,
    )
    return Found(f"{found['tile']} {found['means']}{rest.replace(' plain', '')}", sums, found["means"], kernel)


def _fastest(rows: list[Found | None], sums: str, shape: tuple[int, int, int], card: Card, many: bool):
    """(row, its predicted seconds); None where there is no such kernel.

    many: whether the launchers start as many programs as fit, which they did not at first.
    """
    found = []
    for one in rows:
        if one is not None and one.sums == sums:
            kernel = one.kernel if many else replace(one.kernel, programs=1)
            found.append((one, predict(card, kernel, shape).seconds))
    return min(found, key=lambda pair: (pair[1], -pair[0].kernel.ceiling), default=None)  # L2 may make several equal


def _cells(best: tuple[Found, float] | None) -> tuple[str, str, str]:
    if best is None:
        return "-", "-", "-"
    return best[0].name, f"{best[0].kernel.ceiling:.0%}", f"{1e6 * best[1]:.0f}"


if __name__ == "__main__":
    main()
