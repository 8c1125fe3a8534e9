"""Asynchronous device-to-host copy of a sampled step's statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8engine.errors import StateError
from fp8engine.files import HostCopy
from fp8engine.ops import ranks
from fp8engine.scaling.table import ScalingState


@dataclass(frozen=True)
class PendingSample:
    """The statistics of one training step, being copied to the host.

    copy: of the tables `samples`, `counts` and `rules`.  detailed_layers: those sampled at every granularity.
    several_ranks: whether several ranks decide on these statistics, and their copies arrive at different times.
    """

    step: int
    copy: HostCopy
    detailed_layers: frozenset[int]
    several_ranks: bool = False

    @property
    def samples(self) -> torch.Tensor:
        """A row for each slot, as `scaling.sample` writes it."""
        return self.copy.tensors[0]

    @property
    def counts(self) -> torch.Tensor:
        """The state's counters when the step had ended."""
        return self.copy.tensors[1]

    @property
    def rules(self) -> torch.Tensor:
        """The state's rules then: margins that have widened on the device are among them."""
        return self.copy.tensors[2]

    def arrived(self, just_started: bool) -> bool:
        """Whether the copy can be read.  Several ranks wait for it one step after its start, all at the same step."""
        if not self.several_ranks:
            return self.copy.done()
        if not just_started:
            self.copy.wait()
        return not just_started


def start_copy(step: int, state: ScalingState) -> PendingSample:
    """Start the copy of what a step has left in the tables; on several ranks, of what the first rank's step has."""
    if state.samples is None:
        raise StateError("no step was sampled, so there is nothing to copy")
    counts_CS = state.counts_CS.clone()
    groups = [state.ranks, *([state.divided] if state.divided else [])]  # ranks that divide layers, and their replicas
    agreed = False
    for group in groups:  # each of them, whatever the one before has said
        agreed |= ranks.agree(state.samples, group)
        ranks.agree(counts_CS, group)
    copy = HostCopy([state.samples, counts_CS, state.rules_3S])
    several_ranks = agreed and state.samples.is_cuda  # on a CPU the copy is there at once, on every rank
    return PendingSample(step, copy, state.detailed_layers, several_ranks)
