"""What a watched step left, on its way from the device to the host; in a training step nobody waits for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.errors import StateError
from fp8engine.ops import ranks
from fp8engine.scaling.table import ScalingState


class Arriving(NamedTuple):
    """What a watched step left, on its way to the host.  event: says that it arrived; None: it has.

    closely: layers that were looked at under every granularity.  together: several ranks decide on it.
    """

    step: int
    samples: torch.Tensor
    counts: torch.Tensor
    rules: torch.Tensor
    closely: frozenset[int]
    event: torch.cuda.Event | None = None
    together: bool = False


def send(step: int, state: ScalingState) -> Arriving:
    """Start the copy of what a step left in the tables; several ranks send the first one's."""
    if state.samples is None:
        raise StateError("nothing was watched, so nothing can be sent")
    counts_CS = state.counts_CS.clone()
    together = ranks.agree(state.samples, state.ranks)
    ranks.agree(counts_CS, state.ranks)
    samples, counts, rules = (_to_host(table) for table in (state.samples, counts_CS, state.rules_3S))
    return Arriving(step, samples, counts, rules, state.detailed_layers, _event(state.device), together)


def arrived(look: Arriving, just_sent: bool) -> bool:
    """Whether a look is on the host; several ranks wait for it one step later, and then alike."""
    if look.event is None:
        return True
    if not look.together:
        return look.event.query()
    if not just_sent:
        look.event.synchronize()
    return not just_sent


def _to_host(table: torch.Tensor) -> torch.Tensor:
    """A copy on the host; from a card it is only started."""
    if table.device.type == "cpu":
        return table.clone()
    return torch.empty_like(table, device="cpu", pin_memory=True).copy_(table, non_blocking=True)


def _event(where: torch.device) -> torch.cuda.Event | None:
    """What says that everything up to here has happened on a card."""
    if where.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(where))
    return event
