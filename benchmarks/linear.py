"""A Linear's forward and backward under every recipe, checked against float64, then timed beside nn.Linear in BF16.

    python -m benchmarks.linear [--shapes M,N,K;M,N,K]

Cases, variants and checks: fp8engine/bench/linear.py.  Needs torch, from a bare checkout too; torchao joins where it
is.
"""

from __future__ import annotations

from benchmarks.common import WHERE, parser, save, show
from fp8engine.bench import cases, linear


def main() -> None:
    """Measure, print, write the result."""
    options = parser(__doc__)
    options.add_argument("--shapes", help="M,N,K joined by semicolons")
    asked = options.parse_args().shapes
    result = linear.linear(cases.parse(asked) if asked else linear.SHAPES[WHERE.type], WHERE)
    show(result)
    print(f"written to {save('linear', result)}")


if __name__ == "__main__":
    main()
