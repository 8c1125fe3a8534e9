"""FP16 training in every classic way: time and accuracy on the digits, per variant and per launcher.

    python benchmarks/amp.py [--quick]

What is measured and how: fp8engine/bench/amp.py.  Needs torch and scikit-learn, from a bare checkout too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import save

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from fp8engine.bench import amp


def main() -> None:
    """Measure, print, write the result; a quick one is only printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two epochs; accuracy is not judged")
    options = parser.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = amp.amp(where, options.quick, note=lambda text: print(text, file=sys.stderr))
    print("\n".join([result["what"], *result["head"], *map(amp.line, result["rows"])]))
    if not options.quick:
        print(f"written to {save('amp', result)}")


if __name__ == "__main__":
    main()
