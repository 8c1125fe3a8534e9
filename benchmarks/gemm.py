"""Every matmul there is on this machine, checked against float64, then timed beside torch's own in the same run.

On a card: torch in 16 bits, torch's scaled matmul and our Triton kernels.  On a CPU, where FP8 is emulated: torch and
the reference.  Variants and checks: fp8engine/bench/gemm.py and cases.py.  Needs torch, from a bare checkout too.

    python -m benchmarks.gemm [--shapes llm|square|M,N,K;...] [--turns 30] [--json]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.common import WHERE, parser, save
from fp8engine.bench import cases, gemm, harness
from fp8engine.bench.harness import Row, Timer

TARGETS = {  # variant -> (geometric mean, minimum) of over_peer on a Hopper card over LLM shapes; None: no target
    "triton fp8 tensor fast": (1.00, 0.95),
    "triton fp8 row fast": (1.00, 0.95),
    "triton fp8 tensor promoted": (0.90, None),
    "triton fp8 row promoted": (0.90, None),
    "triton 16 bits": (0.95, None),
}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Each variant of TARGETS against torch's over all shapes, and the highest rate.

    "llm": over the LLM shapes among them, for which the targets are.
    """
    llm = [row for row in rows if tuple(row.get("shape", ())) in cases.LLM]
    found: dict[str, Any] = {}
    for name, (mean, least) in TARGETS.items():
        target = {"geometric_mean": mean, "minimum": least}
        found[name] = {**gemm.mean(rows, name), "llm": gemm.mean(llm, name), "target": target}
    timed = [row for row in rows if "tflops" in row and row["name"].startswith("triton fp8")]
    best = max(timed, key=lambda row: row["tflops"], default=None)
    return found | {"best_tflops": best and {key: best[key] for key in ("name", "shape", "tflops")}}


def show(result: dict) -> None:
    """Print the result as a table."""
    m, most = result["machine"], result["limits"]
    print(f"{m['card'] or m['cpu']}, {m['threads']} threads, torch {m['torch']}, commit {m['commit']}, {m['date']}")
    print(result["what"])
    print(f"limits: {most['matmul_16_bits_tflops']:.3g} TFLOP/s in 16 bits, {most['copy_gb_per_s']:.4g} GB/s copied\n")
    for row in result["rows"]:
        print(harness.line(row))
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
    result = gemm.gemm(shapes, WHERE, timer=asked.turns and Timer.of(WHERE, asked.turns, asked.turns))
    result["summary"] = summary(result["rows"])
    path = save("gemm", result)
    if asked.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
