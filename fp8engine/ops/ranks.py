"""All-reduce of amaxes over ranks, once a step, so that every rank predicts the same scales.

    amax[slot] = max over ranks of the amax that each has seen        -1 where none has

A state that one rank saves alone holds that rank's amaxes, which are not joined yet.  So that a run that is resumed
from it on all ranks repeats the run that went on, bit for bit, a save decides the join that follows it: the amaxes of
the first rank that has saved, or loaded, since the last join replace those of all ranks.  The same all-reduce tells
who that is; saving itself needs no other rank.

Inside DistributedDataParallel's forward it goes over the group of that wrapper.  Elsewhere ranks may hold different
models, and a collective that only some of them call would wait for ever: there it takes a group that the user names
(fp8engine/distributed/amax.py).  Only predicted scales depend on it; ranks that scale for themselves compute correctly.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from fp8engine import _torch
from fp8engine.errors import ParallelError


def join(amax_S: torch.Tensor, name: str, saved_1: torch.Tensor) -> None:
    """Replace this rank's amaxes by the largest of all ranks'.  name: of a process group, or "" for that of DDP.

    saved_1: 1 where this rank has saved or loaded its amaxes since the last join, else 0, which it then becomes.
    Raises ParallelError for a group that is gone.
    """
    if name and not running():
        raise ParallelError(f"amaxes are joined over process group {name!r}, which was destroyed: join over another")
    group = _several(name)
    if group is None:
        return
    # Above the 32 bits of each number stands the priority of its rank, 0 where nothing was saved.  The bits of floats
    # that are not negative are ordered as the floats are, and those of -1 are below them.
    words_S = amax_S.view(torch.int32)
    ranked_S = words_S + ((dist.get_world_size(group) - dist.get_rank(group)) * saved_1 << 32)
    dist.all_reduce(ranked_S, dist.ReduceOp.MAX, group)
    words_S.copy_(ranked_S.view(torch.int32)[::2])  # the lower halves
    saved_1.zero_()


def agree(table: torch.Tensor, name: str) -> bool:
    """Replace this rank's numbers by those of the first rank of the group that `join` takes: all decide alike.

    Returns whether there are other ranks.
    """
    group = _several(name)
    if group is not None:
        dist.broadcast(table, group=group, group_src=0)
    return group is not None


def as_first(table: torch.Tensor) -> None:
    """Replace this process's numbers by those of the first of all."""
    if running():
        dist.broadcast(table, src=0)


def running() -> bool:
    """Whether this process is one of torch.distributed's."""
    return dist.is_available() and dist.is_initialized()


def first() -> bool:
    """Whether this process is the first of all, or the only one: the one that says what all ranks would say."""
    return not running() or dist.get_rank() == 0


def several(name: str) -> bool:
    """Whether `agree` would find other ranks."""
    return _several(name) is not None


def _several(name: str) -> dist.ProcessGroup | None:
    """The group of that name, or with "" of DDP, where it has other ranks."""
    if not running():
        return None
    group = named(name) if name else _of_data_parallel()
    return None if group is None or dist.get_world_size(group) == 1 else group


def named(name: str) -> dist.ProcessGroup:
    """The process group of that name.  Raises ParallelError where it is gone."""
    try:
        # What torch's functional collectives call.
        return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(name))
    except (RuntimeError, ValueError) as error:
        raise ParallelError(f"amaxes are joined over process group {name!r}, which is not there: {error}") from error


def _of_data_parallel() -> dist.ProcessGroup | None:
    """The group of the DistributedDataParallel whose forward is running; None outside of one."""
    wrapper = _torch.active_ddp()
    if wrapper is None:
        return None
    if _torch.joins_uneven_inputs(wrapper):
        warnings.warn(
            "inside join() ranks end at different steps: amaxes are not joined, each rank predicts its own scales. "
            "Torch keeps what join() sets: after it, call model.join(enable=False) on every rank (and under auto load "
            "the scaling state of one rank on all)",
            stacklevel=2,
        )
        return None
    return wrapper.process_group
