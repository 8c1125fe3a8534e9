"""fe.distributed.reduce_amax, which joins a model's amaxes over processes outside DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from fp8engine.errors import ParallelError
from fp8engine.nn.linear import float8_modules


def reduce_amax(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Join the amaxes of `model` over `group` (None: all processes), in one all-reduce at the start of every step.

    For ranks that hold the same converted layers and call forward together: FSDP, a gradient reduction of your own.
    Under DistributedDataParallel nothing needs to be called.  Every rank of the group has to call it.
    Raises ParallelError where torch.distributed is not initialised, or the model is not converted.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ParallelError("reduce_amax: torch.distributed is not initialised; call init_process_group first")
    states = {id(layer.numerics.state): layer.numerics.state for layer in float8_modules(model)}
    if not states:
        raise ParallelError(f"reduce_amax: {type(model).__name__} has no converted layers; call fe.convert first")
    for state in states.values():
        state.ranks = (group or dist.distributed_c10d._get_default_group()).group_name
