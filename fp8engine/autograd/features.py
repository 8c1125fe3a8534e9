"""Features that run round a layer's matmuls where they are switched on, and which a layer cannot have together.

A layer has one feature at most, `Numerics.feature`, whose `run` its module calls in place of `autograd.linear`.

    fe.smooth               autograd/smooth.py: outliers of the input's channels are shared with the weight's columns
    a division over ranks   distributed/shard.py: weights are DTensors, tokens are gathered and scattered
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

SMOOTH, RANKS, SUMS, STORED = "fe.smooth", "a division over ranks", "results summed over ranks", "results stored in FP8"
EXCLUDED = {
    (SMOOTH, RANKS): (
        "each rank would choose scales of its own",
        "leave the layer out of the plan of tensor_parallel, or switch fe.smooth off",
    ),
    (SUMS, STORED): ("codes of partial sums are not summed", "give it Recipe(stored=None), in fe.convert's overrides"),
}


class Feature(Protocol):
    """What runs round a layer's matmuls.

    name: a key of the table above.  ranks: whether ranks divide the layer, and so cast together.
    product: whether what is cast is the weight times other numbers at every call.
    """

    name: str
    ranks: bool
    product: bool

    def run(self, x: Any, weight_NK: Any, bias_N: Any, numerics: Any) -> torch.Tensor:
        """In place of `autograd.linear`, with its arguments and errors."""
        ...


def why_excluded(name: str, has: str, wanted: str) -> str | None:
    """Why the layer of that name cannot have what is wanted beside what it has, with the remedy; None where it can.

    >>> print(why_excluded("down", SMOOTH, RANKS))
    down: it has fe.smooth, and cannot have a division over ranks beside it: each rank would choose scales of its own; \
leave the layer out of the plan of tensor_parallel, or switch fe.smooth off
    >>> why_excluded("down", STORED, RANKS) is None
    True
    """
    found = EXCLUDED.get((has, wanted)) or EXCLUDED.get((wanted, has))
    if found is None:
        return None
    rule, remedy = found
    return f"{name}: it has {has}, and cannot have {wanted} beside it: {rule}; {remedy}"
