"""examples/hf_finetune.py over three seeds and every test sentence: are the example's claims true?

Targets: mean cosine of embeddings to fp32 at least 0.997 (current, blockwise) and 0.9965 (rowwise); accuracy after
fine-tuning within 1 point of fp32.

    python benchmarks/finetune.py [--seeds 3] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

from common import machine, save

EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_finetune.py"
COSINE = {"current": 0.997, "rowwise": 0.9965, "blockwise": 0.997}
POINTS = 1.0


def main() -> None:
    """Run, print what was reached, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", help="some only; the result is saved under another name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    chosen = options.precisions
    plan = dataclasses.replace(example.FULL, seeds=options.seeds)
    plan = dataclasses.replace(plan, precisions=tuple(chosen)) if chosen else plan
    result = {"machine": machine(), **example.summary(example.run(plan), plan)}
    result["reached"] = reached(result["rows"])
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for what, yes in result["reached"].items():
            print(f"{what}: {'reached' if yes else 'MISSED'}")
    print(f"written to {save('hf_finetune' + ''.join(f'_{name}' for name in chosen or ()), result)}")


def reached(rows: list[dict]) -> dict[str, bool]:
    """Each target in words, and whether it was reached."""
    found = {}
    for row in rows:
        name = row["precision"]
        if name in COSINE:
            found[f"{name}: cosine {row['cosine']:.5f} >= {COSINE[name]}"] = row["cosine"] >= COSINE[name]
        if name != "fp32":
            points = row["points_to_fp32"]
            found[f"{name}: accuracy {points:+.2f} points, within {POINTS:g}"] = abs(points) <= POINTS
    return found


if __name__ == "__main__":
    main()
