"""Sampling of a tensor: its statistics are written to a row of a table on its device, which `auto` reads later.

Statistics per tensor cost a tenth of those at every granularity, and usually suffice; the others are taken of layers
for which they do not.  `observe` is an operator, so that a compiled graph takes it whole, and an ordered effect, as
every operator that writes a slot's row.
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

SAMPLE, DETAILED = 16384, 65536  # elements sampled beside the exact amax; for all granularities, which is rarely asked
NONFINITE = HEADER.index("nonfinite")


@functools.cache
def width() -> int:
    """Columns of a table of samples."""
    return max(length(groupings(role)) for role in (*ROLES, OUTPUT))


def observe(x_MK: torch.Tensor, table_SL: torch.Tensor, index: int, role: str) -> None:
    """Write the statistics of x [M, K] to row `index` of the table.

    role: "input", "weight" or "grad_output": take its granularities; "": per tensor alone.
    """
    if library.direct(x_MK):
        _observe(x_MK, table_SL, index, role)
    else:
        torch.ops.fp8engine.observe.default(x_MK, table_SL, index, role)


def read_row(row_L: torch.Tensor, role: str) -> Measured | None:
    """The statistics in a row on the host, `observe`d with that role; None where none were written."""
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
        amax = torch.maximum(-low, high)  # of the whole tensor: one element decides a scale
        flat = measure(x_MK, groupings(role) if role else (), DETAILED if role else SAMPLE, amax)
        beyond = (amax - amax).ne(0).float()  # also where no element of the sample is
        flat[NONFINITE] = torch.maximum(flat[NONFINITE], beyond)
        table_SL[index, : len(flat)].copy_(flat)


library.define(
    "observe(Tensor x, Tensor table, int index, str role) -> ()",
    _observe,
    lambda *arguments: None,
    effect=True,
)
