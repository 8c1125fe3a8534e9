"""Models like Llama, BERT and ViT under every recipe, forward, backward and writing tokens, timed beside BF16's.

    python benchmarks/model.py

What is measured and how: fp8engine/bench/steps.py and generate.py.  Needs torch, from a bare checkout too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import save

sys.path.insert(0, str(Path(__file__).parents[1]))  # a bare checkout: fp8engine need not be installed

from fp8engine.bench import generate, steps


def main() -> None:
    """Measure, print, write the result."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = steps.steps(steps.MODELS[where.type], where)
    print(result["what"])
    for row in result["rows"]:
        print(steps.line(row))
    result["generation"] = generate.generate(generate.CASES[where.type], where)
    print(result["generation"]["what"])
    for row in result["generation"]["rows"]:
        print(generate.line(row))
    print(f"written to {save('model', result)}")


if __name__ == "__main__":
    main()
