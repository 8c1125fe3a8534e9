"""Forward and backward of a decoder block under every recipe, checked, then timed beside BF16's.

    python -m benchmarks.block

Variants and checks: fp8engine/bench/steps.py.  Needs torch, from a bare checkout too.
"""

from __future__ import annotations

from benchmarks.common import WHERE, parser, save, show
from fp8engine.bench import steps
from fp8engine.bench.networks import Size

CASES = {
    "cuda": (("block", steps.BIG, 8192, 2048), ("block", Size(1024, 4096, 16, 4), 8192, 2048)),
    "cpu": (("block", Size(256, 768, 8, 4), 256, 128),),
}


def main() -> None:
    """Measure, print, write the result."""
    parser(__doc__).parse_args()
    result = steps.steps(CASES[WHERE.type], WHERE)
    show(result, steps.line)
    print(f"written to {save('block', result)}")


if __name__ == "__main__":
    main()
