"""A Linear's forward and backward under every recipe, checked against float64, then timed beside nn.Linear in BF16.

    python benchmarks/linear.py [--shapes M,N,K;M,N,K]

What is measured and how: fp8engine/bench/linear.py.  Needs torch, from a bare checkout too; torchao joins where it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import save

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from fp8engine.bench import cases, linear


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="M,N,K joined by semicolons")
    options = parser.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = cases.parse(options.shapes) if options.shapes else linear.SHAPES[where.type]
    result = linear.linear(shapes, where)
    print(result["what"])
    for row in result["rows"]:
        print(linear.line(row))
    print(f"written to {save('linear', result)}")


if __name__ == "__main__":
    main()
