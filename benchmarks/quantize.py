"""Every cast there is on this machine, checked bit for bit against the reference, then timed beside a copy.

    python benchmarks/quantize.py [--shapes M,K;M,K]

Cases, variants and checks: fp8engine/bench/casts.py.  Needs torch, from a bare checkout too.
"""

from __future__ import annotations

from common import WHERE, parser, save, show

from fp8engine.bench import casts


def main() -> None:
    """Measure, print, write the result."""
    options = parser(__doc__)
    options.add_argument("--shapes", help="M,K joined by semicolons")
    asked = options.parse_args().shapes
    result = casts.casts(casts.parse(asked) if asked else casts.SHAPES[WHERE.type], WHERE)
    print(f"a copy moves {result['limits']['copy_gb_per_s']:.4g} GB/s")
    show(result, casts.line)
    print(f"written to {save('quantize', result)}")


if __name__ == "__main__":
    main()
