"""Every cast there is on this machine, checked bit for bit against the reference, then timed beside a copy.

    python benchmarks/quantize.py [--shapes M,K;M,K]

What is measured and how: fp8engine/bench/casts.py.  Needs torch, from a bare checkout too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import save

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from fp8engine.bench import casts


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="M,K joined by semicolons")
    options = parser.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = casts.parse(options.shapes) if options.shapes else casts.SHAPES[where.type]
    result = casts.casts(shapes, where)
    print(f"{result['what']}; a copy moves {result['limits']['copy_gb_per_s']:.4g} GB/s")
    for row in result["rows"]:
        print(casts.line(row))
    print(f"written to {save('quantize', result)}")


if __name__ == "__main__":
    main()
