"""Asynchronous device-to-host copy of a sampled step's statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8engine import _numpy as numpy
from fp8engine.files import HostCopy
from fp8engine.ops import ranks
from fp8engine.scaling.sample import Tables
from fp8engine.scaling.table import ROLES, ScalingState


@dataclass(frozen=True)
class PendingSample:
    """The statistics of one training step, being copied to the host.

    copy: of the tables that the properties name.
    several_ranks: whether several ranks decide on these statistics, and their copies arrive at different times.
    """

    step: int
    copy: HostCopy
    several_ranks: bool = False

    @property
    def slots(self) -> torch.Tensor:
        """A row for each slot, as `scaling.sample` writes it."""
        return self.copy.tensors[0]

    @property
    def reads(self) -> torch.Tensor:
        """What the casts that were tried have done, [layers, 6, 5, 5]."""
        return self.copy.tensors[1]

    @property
    def loss(self) -> torch.Tensor:
        """The loss, one number; NaN where it was not seen."""
        return self.copy.tensors[2]

    @property
    def counts(self) -> torch.Tensor:
        """The state's counters when the step had ended."""
        return self.copy.tensors[3]

    @property
    def rules(self) -> torch.Tensor:
        """The state's rules then: margins that have widened on the device are among them."""
        return self.copy.tensors[4]

    @property
    def amax_S(self) -> torch.Tensor:
        """The amaxes of all slots in that step, -1 for those that did not run."""
        return self.copy.tensors[5]

    def arrived(self, just_started: bool) -> bool:
        """Whether the copy can be read.  Several ranks wait for it one step after its start, all at the same step."""
        if not self.several_ranks:
            return self.copy.done()
        if not just_started:
            self.copy.wait()
        return not just_started


def amaxes_of(amax_S: torch.Tensor, layers: int) -> numpy.ndarray:
    """The amaxes of the operands of each layer, [layers, 3]."""
    return amax_S[: len(ROLES) * layers].view(layers, len(ROLES)).double().numpy()


def start_copy(step: int, state: ScalingState, tables: Tables) -> PendingSample:
    """Start the copy of what a step has left in the tables; on several ranks, of what the first rank's step has."""
    counts_CS = state.counts_CS.clone()
    amax_S = state.live_2S[0].clone() if state.step_amax_S is None else state.step_amax_S
    groups = [state.ranks, *([state.divided] if state.divided else [])]  # ranks that divide layers, and their replicas
    agreed = False
    for group in groups:  # each of them, whatever the one before has said
        agreed |= ranks.agree(tables.slots_SL, group)
        for table in (*tables[1:], counts_CS, amax_S):
            ranks.agree(table, group)
    copy = HostCopy([*tables, counts_CS, state.rules_3S, amax_S])
    several_ranks = agreed and counts_CS.is_cuda  # on a CPU the copy is there at once, on every rank
    return PendingSample(step, copy, several_ranks)
