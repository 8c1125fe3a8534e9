"""Count of the casts that `auto` chose for the matmuls of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fp8engine.auto import Controller
from fp8engine.numerics.formats import BF16
from fp8engine.numerics.recipe import MATMULS
from fp8engine.scaling.choice import Casts


def chosen(controllers: Iterable[Controller]) -> dict | None:
    """Counts of what was decided; None where nothing was: a fixed recipe, a plan that is repeated.

    matmuls: for forward, dgrad and wgrad, how many layers multiply with which casts, the most frequent first.
    not_sampled: layers that have run in no training step.
    """
    matmuls: dict[str, Counter[str]] = {matmul: Counter() for matmul in MATMULS}
    layers = sampled = 0
    for controller in controllers:
        layers += len(controller.layers)
        sampled += len(controller.choices)
        for i, choice in controller.choices.items():
            for matmul, count in matmuls.items():
                count[_name(choice.used.get((i, matmul)))] += 1
    if not sampled:
        return None
    return {
        "matmuls": {key: dict(count.most_common()) for key, count in matmuls.items()},
        "not_sampled": layers - sampled,
    }


def _name(casts: Casts | None) -> str:
    """Formats of both operands, and what a scale covers."""
    if casts is None:
        return str(BF16)
    return f"{'·'.join(dict.fromkeys(map(str, casts[1:])))}/{casts.granularity}"
