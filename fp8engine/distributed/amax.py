"""Amaxes of a converted model over processes: fe.distributed.reduce_amax, and what a checkpoint joins before it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fp8engine.errors import ParallelError
from fp8engine.nn.linear import float8_modules
from fp8engine.ops import ranks
from fp8engine.scaling.table import ScalingState


def states_of(model: nn.Module) -> list[ScalingState]:
    """The scaling states of a model's converted layers, each once."""
    return list({id(layer.numerics.state): layer.numerics.state for layer in float8_modules(model)}.values())


def join_now(model: nn.Module) -> None:
    """Join this step's amaxes, where scales are predicted and a group is named: what ranks save is alike then."""
    for state in states_of(model):
        if state.ranks and state.delayed:
            ranks.join(state.live_2S[0], state.ranks, torch.zeros_like(state.saved_1))


def reduce_amax(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Join the amaxes of `model` over `group` (None: all processes), in one all-reduce at the start of every step.

    For ranks that hold the same converted layers and call forward together: FSDP, a gradient reduction of your own.
    Under DistributedDataParallel nothing needs to be called.  Every rank of the group has to call it.
    Raises ParallelError where torch.distributed is not initialised, or the model is not converted.
    """
    if not ranks.running():
        raise ParallelError("reduce_amax: torch.distributed is not initialised; call init_process_group first")
    states = states_of(model)
    if not states:
        raise ParallelError(f"reduce_amax: {type(model).__name__} has no converted layers; call fe.convert first")
    for state in states:
        state.ranks = (group or dist.distributed_c10d._get_default_group()).group_name
