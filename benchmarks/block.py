"""Forward and backward of a decoder block under every recipe, checked, then timed beside BF16's.

    python -m benchmarks.block

Networks: benchmarks/networks.py.  Variants and checks: fp8engine/bench/steps.py.  Needs torch alone.
"""

from __future__ import annotations

from benchmarks.common import WHERE, parser, save, show
from benchmarks.networks import Size, case, variants
from fp8engine.bench import steps

TARGET = 1.55  # DESIGN section 9: over compiled BF16
CASES = {
    "cuda": (
        case("block", Size(4096, 14336, 32, 8), 8192, 2048, TARGET),
        case("block", Size(1024, 4096, 16, 4), 8192, 2048),
    ),
    "cpu": (case("block", Size(256, 768, 8, 4), 256, 128),),
}


def main() -> None:
    """Measure, print, write the result."""
    parser(__doc__).parse_args()
    result = steps.steps(CASES[WHERE.type], WHERE, variants(WHERE, WHERE.type == "cuda"))
    show(result)
    print(f"written to {save('block', result)}")


if __name__ == "__main__":
    main()
