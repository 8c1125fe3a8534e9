"""A tensor's statistics into its row of a table, without waiting for the device: what the policy looks at later.

A look per tensor costs a tenth of one at every granularity, and as a rule says enough: the other is taken where not.

An operator, so that a compiled graph takes it whole; an effect in order, as every operator that writes a slot's row.
"""

from __future__ import annotations

import functools
import math

import torch

from fp8engine.numerics.recipe import OUTPUT, ROLES
from fp8engine.ops import library
from fp8engine.scaling.choice import groupings
from fp8engine.scaling.histogram import length, measure, measure_on_host, read
from fp8engine.scaling.prediction import HEADER, Measured

SAMPLE, CLOSELY = 16384, 65536  # elements that a look takes, beside the exact amax; a closer one, which is rare
NONFINITE = HEADER.index("nonfinite")


@functools.cache
def width() -> int:
    """Columns of a table of samples."""
    return max(length(groupings(role)) for role in (*ROLES, OUTPUT))


def observe(x_MK: torch.Tensor, table_SL: torch.Tensor, index: int, role: str) -> None:
    """Write what x [M, K] holds to row `index` of the table.

    role: "input", "weight" or "grad_output": whose granularities to look at; "": per tensor alone.
    """
    if library.direct(x_MK):
        _observe(x_MK, table_SL, index, role)
    else:
        torch.ops.fp8engine.observe.default(x_MK, table_SL, index, role)


def seen(row_L: torch.Tensor, role: str) -> Measured | None:
    """What a row on the host says, `observe`d with that role; None where nothing was."""
    asked = groupings(role) if role else ()
    found = read(row_L[: length(asked)], asked)
    return found if found.elements else None


def _observe(x_MK: torch.Tensor, table_SL: torch.Tensor, index: int, role: str) -> None:
    if not x_MK.numel():
        return
    with torch.no_grad():
        low, high = torch.aminmax(x_MK.detach())
        if not role and x_MK.device.type == "cpu":
            low, high = float(low), float(high)
            finite = math.isfinite(low) and math.isfinite(high)
            flat = measure_on_host(x_MK, SAMPLE, max(-low, high) if finite else math.inf)
            if not finite:
                flat[NONFINITE] = max(float(flat[NONFINITE]), 1.0)
            table_SL[index, : len(flat)] = flat
            return
        amax = torch.maximum(-low, high)  # of all of it: what one element does decides a scale
        flat = measure(x_MK, groupings(role) if role else (), CLOSELY if role else SAMPLE, amax)
        beyond = (amax - amax).ne(0).float()  # also where the sample missed it
        flat[NONFINITE] = torch.maximum(flat[NONFINITE], beyond)
        table_SL[index, : len(flat)].copy_(flat)


library.define(
    "observe(Tensor x, Tensor table, int index, str role) -> ()",
    _observe,
    lambda *arguments: None,
    effect=True,
)
