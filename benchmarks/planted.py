"""What `fe.auto` and the fixed recipes lose to planted trouble: the table of docs/auto.md.

    python benchmarks/planted.py          from a checkout with the dev extra; 1 min

dB of the matmul's result that the worst read falls short of the best single cast of each step; median over the steps
after the first, the worst in brackets.  The scenes, and how they are measured: tests/helpers/troubled.py and
tests/auto/test_planted.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

from common import machine, save

TESTS = Path(__file__).parents[1] / "tests"


def main() -> None:
    """Train every scene under every recipe, print, write the result."""
    sys.path[:0] = [str(TESTS / "helpers"), str(TESTS)]
    planted = SimpleNamespace(**runpy.run_path(str(TESTS / "auto" / "test_planted.py")))
    calm = planted.Planted(planted.channel(lambda step: 1e3), 20)
    moving = planted.Planted(planted.Scene(planted.scaled, None, planted.OF_GRADIENT), 40)
    scenes = {"a, x1000": calm, **planted.SCENES, "e": moving}
    rows = []
    for name, scene in scenes.items():
        row: dict = {"scene": name}
        for recipe in ("auto", *planted.FIXED):
            asked = planted.fe.auto(interval=scene.interval) if recipe == "auto" else recipe
            short = scene.short(asked)[1]
            row[recipe] = {"median": planted.typical(short), "worst": max(short)}
        rows.append(row)
        cells = "".join(f"  {key} {row[key]['median']:5.1f} ({row[key]['worst']:.1f})" for key in list(row)[1:])
        print(f"{name:12s}{cells}", flush=True)
    print(f"written to {save('planted', {'machine': machine(), 'rows': rows})}")


if __name__ == "__main__":
    main()
