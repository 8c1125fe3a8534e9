"""Asynchronous device-to-host copy of a sampled step's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8engine.files import HostCopy
from fp8engine.ops import ranks
from fp8engine.scaling.table import ScalingState


class Copied(NamedTuple):
    """Tables of a sampled step on the host.

    slots, reads, loss: as `scaling.sample.Tables`.  counts: the state's counters when the step had ended.
    amax_S: -1 for slots that did not run.  rules: the state's rules then, with margins that have widened on the device.
    """

    slots: torch.Tensor
    reads: torch.Tensor
    loss: torch.Tensor
    counts: torch.Tensor
    amax_S: torch.Tensor
    rules: torch.Tensor


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

    def arrived(self, now: int) -> bool:
        """Whether the copy can be read when step `now` begins.  Several ranks wait for it, two steps after `step`."""
        if not self.several_ranks:
            return self.copy.done()
        if now > self.step + 1:
            self.copy.wait()
        return now > self.step + 1


def start_copy(
    step: int, state: ScalingState, tables: Sequence[torch.Tensor], alike: Sequence[torch.Tensor] = ()
) -> PendingSample:
    """Start the copy of tables of a step; on several ranks, of the first rank's, which the tables then hold.

    alike: tables behind those, which are the same on all ranks.
    """
    agreed = [ranks.agree(table, group) for group in _groups(state) for table in tables]  # each of them, on every rank
    copy = HostCopy([*tables, *alike])
    return PendingSample(step, copy, any(agreed) and tables[0].is_cuda)  # on a CPU it is there at once, on every rank


def several_ranks(state: ScalingState) -> bool:
    """Whether other ranks decide with this one."""
    return any(ranks.several(group) for group in _groups(state))


def _groups(state: ScalingState) -> list[str]:
    """Names of process groups that decide alike: of replicas ("": DistributedDataParallel's), of divided layers."""
    return [state.ranks, *([state.divided] if state.divided else [])]
