"""Models like Llama, BERT and ViT under every recipe, forward, backward and generation, timed beside BF16's.

    python -m benchmarks.model

Cases, variants and checks: fp8engine/bench/steps.py and benchmarks/generate.py.  Needs torch, from a bare checkout too.
"""

from __future__ import annotations

from benchmarks import generate
from benchmarks.common import WHERE, parser, save, show
from fp8engine.bench import steps


def main() -> None:
    """Measure, print, write the result."""
    parser(__doc__).parse_args()
    result = steps.steps(steps.MODELS[WHERE.type], WHERE)
    show(result, steps.line)
    result["generation"] = generate.generate(generate.CASES[WHERE.type], WHERE)
    show(result["generation"], generate.line)
    print(f"written to {save('model', result)}")


if __name__ == "__main__":
    main()
