"""Every matmul there is on this machine, checked against float64, then timed beside torch's own in the same run.

On a card: torch in 16 bits, torch's scaled matmul and our Triton kernels.  On a CPU, where FP8 is emulated: torch and
the reference.  What is measured and how: fp8engine/bench/run.py and timing.py.  Needs torch, from a bare checkout too.

    python benchmarks/gemm.py [--shapes llm|square|M,N,K;...] [--turns 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from common import save

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from fp8engine.bench import cases, run


def show(result: dict) -> None:
    """The table a person reads."""
    m, most = result["machine"], result["limits"]
    print(f"{m['card'] or m['cpu']}, {m['threads']} threads, torch {m['torch']}, commit {m['commit']}, {m['date']}")
    print(result["what"])
    print(f"limits: {most['matmul_16_bits_tflops']:.3g} TFLOP/s in 16 bits, {most['copy_gb_per_s']:.4g} GB/s copied")
    print(f"\n{run.HEADINGS}")
    for row in result["rows"]:
        print(run.line(row))
    print("\nspeed over torch's, geometric mean and least over the shapes")
    for name, found in result["summary"].items():
        if name == "best_tflops":
            print(f"highest FP8 rate: {'not measured' if found is None else found}")
        elif found["geometric_mean"] is None:
            print(f"{name:28s} {found['note']}")
        else:
            print(f"{name:28s} {found['geometric_mean']:.3f} {found['minimum']:.3f}   targets {found['target']}")


def main() -> None:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=None, help="default: llm and square on a card, small on a CPU")
    parser.add_argument("--turns", type=int, default=None, help="rounds that count, for each shape")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    options = parser.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = cases.parse(options.shapes or ("llm;square" if where.type == "cuda" else "small"))
    result = run.gemm(shapes, where, turns=options.turns)
    path = save("gemm", result)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
