"""Asynchronous device-to-host copy of a sampled step's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8engine import _numpy as numpy
from fp8engine.files import HostCopy
from fp8engine.ops import ranks
from fp8engine.scaling.sample import Tables
from fp8engine.scaling.table import ROLES, ScalingState


class Copied(NamedTuple):
    """Tables of a sampled step on the host.

    slots, reads, loss: as `scaling.sample.Tables`.  counts: the state's counters when the step had ended.
    rules: the state's rules then, with margins that have widened on the device.  amax_S: -1 for slots that did not run.
    """

    slots: torch.Tensor
    reads: torch.Tensor
    loss: torch.Tensor
    counts: torch.Tensor
    rules: torch.Tensor
    amax_S: torch.Tensor


@dataclass(frozen=True)
class PendingSample:
    """The statistics of one training step, being copied to the host.

    copy: of the tables of `Copied`, or of the step's amaxes alone.
    several_ranks: whether several ranks decide on these statistics, and their copies arrive at different times.
    """

    step: int
    copy: HostCopy
    several_ranks: bool = False

    @property
    def tables(self) -> Copied:
        """The copies, which hold their values once it has arrived."""
        return Copied(*self.copy.tensors)

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
    agreed = False
    for group in _groups(state):  # each of them, whatever the one before has said
        agreed |= ranks.agree(tables.slots_SL, group)
        for table in (*tables[1:], counts_CS, amax_S):
            ranks.agree(table, group)
    copy = HostCopy([*tables, counts_CS, state.rules_3S, amax_S])
    return PendingSample(step, copy, agreed and counts_CS.is_cuda)  # on a CPU the copy is there at once, on every rank


def start_look(step: int, state: ScalingState) -> PendingSample | None:
    """Start the copy of the last step's amaxes; on several ranks, of the first rank's.  None where it had none."""
    if (amax_S := state.step_amax_S) is None:
        return None
    agreed = sum(ranks.agree(amax_S, group) for group in _groups(state))
    return PendingSample(step, HostCopy([amax_S]), bool(agreed) and amax_S.is_cuda)


def several_ranks(state: ScalingState) -> bool:
    """Whether other ranks decide with this one."""
    return any(ranks.several(group) for group in _groups(state))


def _groups(state: ScalingState) -> list[str]:
    """Names of process groups that decide alike: of replicas ("": DistributedDataParallel's), of divided layers."""
    return [state.ranks, *([state.divided] if state.divided else [])]
