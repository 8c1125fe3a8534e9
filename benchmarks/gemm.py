"""Every matmul there is on this machine, checked against float64, then timed beside torch's own in the same run.

On a card: torch in 16 bits, torch's scaled matmul and our Triton kernels.  On a CPU, where FP8 is emulated: torch and
the reference.  Variants and checks: fp8engine/bench/gemm.py and cases.py.  Needs torch, from a bare checkout too.

    python -m benchmarks.gemm [--shapes llm|square|M,N,K;...] [--turns 30] [--json]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.common import WHERE, parser, save
from fp8engine.bench import cases, gemm, harness

HEADINGS = f"{'':40s} {'ms':>9s} {'spread':>7s} {'TFLOP/s':>9s} {'of max':>7s} {'x same':>7s} {'x 16 bits':>9s}"


def line(row: Mapping[str, Any]) -> str:
    """A row as plain text, under HEADINGS; no number but the error for a wrong one."""
    ratios = {key: "" if row.get(key) is None else f"{row[key]:.2f}" for key in ("over_peer", "over_16_bits")}
    return harness.line(
        f"{row['name']:26s} {'x'.join(map(str, row['shape'])):13s}",
        {**row, **ratios},
        ("ms", "{:9.3f}"),
        ("spread", " {:7.0%}"),
        ("tflops", " {:9.4g}"),
        ("of_16_bit_rate", " {:7.0%}"),
        ("over_peer", " {:>7s}"),
        ("over_16_bits", " {:>9s}"),
    )


def show(result: dict) -> None:
    """Print the result as a table."""
    m, most = result["machine"], result["limits"]
    print(f"{m['card'] or m['cpu']}, {m['threads']} threads, torch {m['torch']}, commit {m['commit']}, {m['date']}")
    print(result["what"])
    print(f"limits: {most['matmul_16_bits_tflops']:.3g} TFLOP/s in 16 bits, {most['copy_gb_per_s']:.4g} GB/s copied")
    print(f"\n{HEADINGS}")
    for row in result["rows"]:
        print(line(row))
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
    options = parser(__doc__)
    options.add_argument("--shapes", default=None, help="default: llm and square on a card, small on a CPU")
    options.add_argument("--turns", type=int, default=None, help="rounds that count, for each shape")
    options.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    asked = options.parse_args()
    shapes = cases.parse(asked.shapes or ("llm;square" if WHERE.type == "cuda" else "small"))
    result = gemm.gemm(shapes, WHERE, turns=asked.turns)
    path = save("gemm", result)
    if asked.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
