"""Features of a layer: what runs round its matmuls where it is switched on, and which a layer cannot have together.

A layer has one feature round its matmuls at most, `Numerics.feature`, whose `run` its module calls in place of
`autograd.linear`:

    fe.smooth               autograd/smooth.py: outliers of the input's channels are shared with the weight's columns
    a division over ranks   distributed/shard.py: weights are DTensors, tokens are gathered and scattered

Its recipe may add that results are stored in FP8 (products.py), and its class says what its weight is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

SMOOTH, RANKS, SUMS, STORED = "fe.smooth", "a division over ranks", "results summed over ranks", "results stored in FP8"
FROZEN, EXPERTS, CONV1D = "a weight of FP8 codes", "the weights of several experts", "a weight stored as [in, out]"
NAMES = (SMOOTH, RANKS, SUMS, STORED, FROZEN, EXPERTS, CONV1D)

LEFT_OUT = "leave the layer out of the plan of tensor_parallel"
UNSMOOTHED = "name other gated MLPs for fe.smooth"
UNSTORED = "give it Recipe(stored=None), in fe.convert's overrides"
# Pairs that a layer cannot have, and for each the rule and the remedy.
EXCLUDED = {
    (SMOOTH, RANKS): ("each rank would choose scales of its own", f"{LEFT_OUT}, or switch fe.smooth off"),
    (SUMS, STORED): ("codes of partial sums are not summed", UNSTORED),
    (FROZEN, SMOOTH): ("codes are not cast again at every call", f"{UNSMOOTHED}, or fe.revert the model"),
    (FROZEN, RANKS): ("codes are not distributed", f"{LEFT_OUT}, or fe.revert the model"),
    (FROZEN, STORED): ("it has no training step that would predict the result's scale", UNSTORED),
    (EXPERTS, SMOOTH): ("the tokens of each expert would need scales of their own", UNSMOOTHED),
    (EXPERTS, RANKS): ("a plan divides matrices", f"{LEFT_OUT}, and call fe.distributed.ExpertParallel"),
    (EXPERTS, STORED): ("what reads its rows next has other scales", UNSTORED),
    (CONV1D, RANKS): ("a plan divides weights stored as [out, in]", LEFT_OUT),
}
ONE = "one feature runs round a layer's matmuls", "switch off the one that it has"


class Feature(Protocol):
    """What runs round a layer's matmuls."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the table above."""
        ...

    def run(self, x: Any, weight_NK: Any, bias_N: Any, numerics: Any) -> torch.Tensor:
        """In place of `autograd.linear`, with its arguments and errors."""
        ...


def why_excluded(name: str, has: Iterable[str], *wanted: str, every: bool = False) -> str | None:
    """Why the layer of that name cannot have what is wanted beside what it has, with the remedy; None where it can.

    every: a pair that is not in the table is excluded too, as two features round the matmuls are.

    >>> print(why_excluded("down", [SMOOTH], RANKS))
    down: it has fe.smooth, and cannot have a division over ranks beside it: each rank would choose scales of its own; \
leave the layer out of the plan of tensor_parallel, or switch fe.smooth off
    >>> why_excluded("down", [STORED], RANKS) is None
    True
    """
    for one in has:
        for other in wanted:
            if (found := EXCLUDED.get((one, other)) or EXCLUDED.get((other, one))) is not None or every:
                rule, remedy = found or ONE
                return f"{name}: it has {one}, and cannot have {other} beside it: {rule}; {remedy}"
    return None
