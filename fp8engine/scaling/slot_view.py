"""SlotView, one slot of the scaling table as a report prints it, and its numbers for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fp8engine.numerics.formats import Format
from fp8engine.numerics.recipe import Cast
from fp8engine.ops.reference.operand import COUNTERS


@dataclass(frozen=True)
class SlotView:
    """One slot of the table, copied out (reading it waits for the device).

    scale: x ≈ q * scale, last used or predicted for the next step; 1 before the first use.
    amax: largest finite magnitude of the latest step.  history: of earlier steps, newest first.
    elements, saturated, nonfinite, recasts: counts since the start; `saturated` were beyond a predicted scale and
    made the tensor be cast again; an output's stayed so, and widened `margin`, the powers of two that are kept free.
    underflowed: out of `sampled` elements, those that became zero; an output's are not counted.
    """

    name: str
    format: Format
    cast: Cast
    scale: torch.Tensor
    amax: torch.Tensor
    history: torch.Tensor
    calls: torch.Tensor
    elements: torch.Tensor
    sampled: torch.Tensor
    saturated: torch.Tensor
    underflowed: torch.Tensor
    nonfinite: torch.Tensor
    recasts: torch.Tensor
    margin: int = 0

    def to_dict(self) -> dict:
        """Plain numbers, for JSON; shares of the elements that were sampled."""
        counted = {key: int(getattr(self, key)) for key in COUNTERS}
        return numbers_of(self.cast, float(self.scale), float(self.amax), counted, self.margin)


def numbers_of(cast: Cast, scale: float | None, amax: float | None, counted: Mapping[str, int], margin: int) -> dict:
    """A slot in types that JSON knows; shares of the elements that were sampled."""
    elements, sampled = max(counted["elements"], 1), max(counted["sampled"], 1)
    return {
        "cast": str(cast),
        "format": cast.format.name,
        "scale": scale,
        "amax": amax,
        "calls": counted["calls"],
        "elements": counted["elements"],
        "saturated": counted["saturated"] / elements,
        "underflowed": counted["underflowed"] / sampled,
        "sampled": counted["sampled"] / elements,
        "nonfinite": counted["nonfinite"],
        "recasts": counted["recasts"],
        "margin": margin,
    }
