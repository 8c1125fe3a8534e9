"""Forward and backward of a decoder block under every recipe, checked, then timed beside BF16's.

    python benchmarks/block.py

Cases, variants and checks: fp8engine/bench/steps.py.  Needs torch, from a bare checkout too.
"""

from __future__ import annotations

from common import WHERE, parser, save, show

from fp8engine.bench import steps


def main() -> None:
    """Measure, print, write the result."""
    parser(__doc__).parse_args()
    result = steps.steps(steps.CASES[WHERE.type], WHERE)
    show(result, steps.line)
    print(f"written to {save('block', result)}")


if __name__ == "__main__":
    main()
