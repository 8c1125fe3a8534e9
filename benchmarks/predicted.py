"""What docs/performance.md and kernels/README.md print of the timing model: `python -m benchmarks.predicted [--write]`.

    speedups   of layers under each recipe, ops/cost.py
    kernels    by matmul, the configuration that is predicted to be the fastest: its static ceiling and predicted time
    launches   of a layer's forward and backward, ops/launches.py

Configurations and their ceilings are those of the baseline of the Triton that development runs
(machine_code/baselines.py); times are for a card that multiplies without pause.  Nothing is measured, and no card is
needed.  Rows whose names say another thing than sizes and options are listed, not guessed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine_code import baselines
from fp8engine.numerics.cards import H100_SXM, H200
from fp8engine.numerics.matmul_time import CEILINGS, REACHED, Kernel, predict
from fp8engine.numerics.recipe import ROWS
from fp8engine.ops import cost
from fp8engine.ops.launches import Launch, Step, backward, forward

DOCS = [Path(__file__).parents[1] / page for page in ("docs/performance.md", "kernels/README.md")]
PART = re.compile(r"(?<=<!-- benchmarks.predicted: )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)
SHAPES = ((8192, 4096, 4096), (8192, 4096, 1024), (64, 4096, 4096), (64, 1024, 8192))
LAYERS = ((8192, 14336, 4096), (8192, 4096, 4096), (8192, 1024, 1024), (2048, 1024, 1024))
KINDS = {  # by what its main loop does with the sums -> as the tables call it
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
    """Print the tables as Markdown, and what in them does not fit the package's own constants."""
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into both pages too")
    asked = parser.parse_args()
    for name, make in TABLES.items():
        print("\n".join([f"{name}:", *make(), ""]))
    print("\n".join(unknown(baseline()) + stale(baseline())))
    if asked.write:
        for page in DOCS:
            page.write_text(written(page.read_text()))


def baseline() -> dict[str, Any]:
    """The kernels of the committed baseline."""
    return json.loads(baselines.path(baselines.DEVELOPED).read_text())["kernels"]


def written(page: str) -> str:
    """The page with its tables as they are computed now."""
    return PART.sub(lambda part: "\n".join([f"{part[1]} -->", *TABLES[part[1]](), ""]), page)


def speedups() -> list[str]:
    """Predicted speed of layers beside BF16 on an H200."""
    names = [name for name, recipe in ROWS.items() if recipe.is_fp8]
    lines = _heading("tokens x inputs x outputs", *(f"`{name}`" for name in names))
    for m, n, k in LAYERS:
        found = (cost.speedup(ROWS[name], m, n, k, H200) for name in names)
        lines.append(_row(f"{m} x {k} x {n}", *(f"{ratio:.2f}" for ratio in found)))
    return lines


def kernels(rows: dict[str, Any] | None = None) -> list[str]:
    """Of each kind of matmul and size, the configuration that is predicted to be the fastest on an H100 SXM.

    rows: those of the baseline.
    """
    found = [_read(name, row) for name, row in (baseline() if rows is None else rows).items()]
    lines = _heading("matmul", "M x N x K", "kernel", "ceiling", "us")
    for sums, title in KINDS.items():
        for shape in SHAPES:
            lines.append(_row(title, "x".join(map(str, shape)), *_cells(found, sums, shape)))
    return lines


def launches() -> list[str]:
    """Of a layer with a bias whose matmuls are ours: those of Triton's kernels, and of torch's."""
    heading = ("forward, weight's FP8 copies valid", "forward, weight cast", "backward, copies valid", "backward")
    lines = _heading("recipe", *heading)
    for name, recipe in ROWS.items():
        if name != "fp32":
            step = Step(recipe, *SHAPES[0], bias=True)
            parts = (part(step, copies) for part in (forward, backward) for copies in (True, False))
            lines.append(_row(f"`{name}`", *map(_counts, parts)))
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "speedups": speedups,
    "launches": launches,
    "kernels": kernels,
}


def _counts(found: list[Launch]) -> str:
    torchs = sum(launch.kernel.startswith("torch") for launch in found)
    return f"{len(found) - torchs}" + f" + {torchs}" * bool(torchs)


def _heading(*titles: str) -> list[str]:
    return [_row(*titles), _row(*["---"] * len(titles))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def unknown(rows: dict[str, Any]) -> list[str]:
    """The rows that are not predicted."""
    left = [name for name in rows if name.startswith("matmul") and " sm_90 " in name and not NAME.match(name)]
    return [f"not predicted, its name is not understood: {name}" for name in left]


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
    return one.sums == sums and family == _family(one)


def _family(one: Found) -> str:
    return "gluon" if one.means == "gluon" else "triton"


def _reached(one: Found) -> Kernel:
    """The kernel with what its main loop reaches of its ceiling on a card."""
    share = REACHED[_family(one)].get(one.sums, 1.0)  # of 16 bits it was not measured
    return replace(one.kernel, ceiling=one.kernel.ceiling * share)


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


def _cells(rows: list[Found | None], sums: str, shape: tuple[int, int, int]) -> tuple[str, ...]:
    """(kernel, its ceiling, its predicted microseconds) of the fastest; L2 may make several equal."""
    known = [
        (predict(H100_SXM, _reached(one), shape).seconds, one) for one in rows if one is not None and one.sums == sums
    ]
    if not known:
        return "-", "-", "-"
    seconds, best = min(known, key=lambda pair: (pair[0], -pair[1].kernel.ceiling))
    return best.name, f"{best.kernel.ceiling:.0%}", f"{1e6 * seconds:.0f}"


if __name__ == "__main__":
    main()
