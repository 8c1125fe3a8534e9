"""Models like Llama, BERT and ViT under every recipe, forward, backward and generation, timed beside BF16's.

    python -m benchmarks.model

Variants and checks: fp8engine/bench/steps.py, benchmarks/networks.py and generate.py.  Needs torch alone.
"""

from __future__ import annotations

from benchmarks import generate
from benchmarks.common import WHERE, parser, save, show
from benchmarks.networks import Size, case, variants
from fp8engine.bench import steps

NAMES = ("llama", "bert", "vit")
CASES = {
    "cuda": [case(name, Size(2048, 5632, 16, 4, 12, 32000), 8192, 1024) for name in NAMES],
    "cpu": [case(name, Size(128, 384, 4, 2, 2), 128, 64) for name in NAMES],
}


def main() -> None:
    """Measure, print, write the result."""
    parser(__doc__).parse_args()
    result = steps.steps(CASES[WHERE.type], WHERE, variants(WHERE, WHERE.type == "cuda"))
    show(result)
    result["generation"] = generate.generate(generate.CASES[WHERE.type], WHERE)
    show(result["generation"])
    print(f"written to {save('model', result)}")


if __name__ == "__main__":
    main()
