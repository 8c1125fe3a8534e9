"""Cast of a tensor that is divided over ranks, under one scale for all of it: what one process would find.

    amax = max over ranks of each rank's finite amax        one all-reduce of three numbers a cast
    s    = MAX / amax, or the predicted one, if under it no rank's part saturates

A rank whose part saturated alone would cast again under a scale of its own, and codes of several scales could not be
gathered.  So predicted scales are joined too: they save no pass over a divided tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fp8engine._torch import FakeTensor
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops import ranks
from fp8engine.ops.reference import Operand, Slot
from fp8engine.ops.reference.quantize import SATURATES, largest
from fp8engine.ops.reference.scale import scale_factor


def under_one_scale(run: Callable, x_MK: torch.Tensor, cast: Cast, slot: Slot) -> Any:
    """run(x_MK, cast, slot) under the scale of all ranks' parts, which enters the slot with the joined amax.

    run: a cast per tensor.  Every rank of the slot's group has to call it.  Raises ParallelError for a group that is
    gone.
    """
    live, counts = slot.live_2S, slot.counts_CS
    predicted = live[1, slot.index] if cast.delayed else live.new_zeros(())
    amax, s, nonfinite = _join(x_MK, predicted, slot.group)
    measured = scale_factor(amax[None], Format.of(cast.dtype).max, cast.power_of_2)[0]
    limit = Format.of(cast.dtype).max * SATURATES
    over = (amax * s > limit) & (s > 0)
    s = torch.where(over | (s == 0), measured, s)
    # The cast finds s where it would find a predicted one, in a table of its own, and counts in a copy of its column.
    own = Slot(
        torch.stack([-torch.ones_like(s), s])[:, None], counts[:, slot.index, None].clone(), 0, False, slot.count
    )
    found = run(x_MK, replace(cast, scaling="delayed"), own)
    if slot.count:
        counts[:, slot.index] = own.counts_CS[:, 0]
        if cast.delayed:
            beyond = (torch.where(torch.isfinite(x_MK), x_MK, 0).abs().float() * predicted > limit).sum()
            counts[3, slot.index] += torch.where(over, beyond, 0)
            counts[6, slot.index] += over
    if slot.record:
        live[0, slot.index] = torch.where(nonfinite, live[0, slot.index], torch.maximum(live[0, slot.index], amax))
        if not cast.delayed:
            live[1, slot.index] = torch.where(nonfinite, live[1, slot.index], s)
    return found if x_MK.numel() else _under(found, torch.ones_like(s) / s)


def _under(found: Any, scale: torch.Tensor) -> Any:
    """What was cast of nothing, whose own scale is 1, under the scale of other ranks' codes, which arrive here."""
    if isinstance(found, Operand):
        return Operand(found.data, scale, *found[2:])
    return tuple(_under(each, scale) for each in found) if isinstance(found, tuple) else found


def _join(x_MK: torch.Tensor, predicted: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(amax of all ranks' finite elements, the smallest of their predicted s, whether any element is not finite)."""
    amax, nonfinite = predicted.new_zeros(()), predicted.new_zeros(())
    if x_MK.numel():
        whole = Cast.parse("e4m3")
        found = largest(x_MK, whole).view(())
        if x_MK.device.type != "cpu" or isinstance(x_MK, FakeTensor) or not found.isfinite():  # no wait
            nonfinite = (~found.isfinite()).float()
            found = largest(torch.where(torch.isfinite(x_MK), x_MK, 0), whole).view(())
        amax = found
    numbers = torch.stack([amax, -predicted, nonfinite])
    dist.all_reduce(numbers, dist.ReduceOp.MAX, ranks.named(group))
    return numbers[0], -numbers[1], numbers[2] > 0
