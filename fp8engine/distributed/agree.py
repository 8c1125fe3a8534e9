"""Check that all ranks of a group were given the same, before a collective waits for one that was not."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from fp8engine.errors import ParallelError


def check_alike(caller: str, described: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Raise ParallelError on every rank where the descriptions of two ranks differ; it names the first difference.

    described: by name, anything that pickles and compares.  All ranks of the group have to call it.
    In a group of torch's "fake" backend nothing is checked.
    """
    if dist.get_backend(group) == "fake":  # one process stands for all ranks (planner.py): nobody else to ask
        return
    everyone: list[Mapping[str, object]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(described), group)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        different = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if different:
            key = different[0]
            raise ParallelError(
                f"{caller}: ranks differ in {len(different)} things; {key} is {first.get(key, 'missing')} on rank 0 "
                f"of the group and {other.get(key, 'missing')} on rank {rank}: call it with the same model and options "
                "on every rank"
            )
