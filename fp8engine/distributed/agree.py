"""Checks of what ranks were given: an error on every rank of a group, or on none; and a mesh of one dimension."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from fp8engine.errors import Fp8EngineError, ParallelError
from fp8engine.nn.linear import Float8Module

SAME = "call it with the same model and options on every rank"


def agree(
    caller: str,
    said: Mapping[str, object],
    group: dist.ProcessGroup | None = None,
    problem: Exception | str | None = None,
    *,
    remedy: str = SAME,
    error: type[Fp8EngineError] = ParallelError,
) -> None:
    """Raise on every rank where one of them has a problem, or where what two of them say differs.

    All ranks of the group have to call it, before a collective that would wait for a rank that has given up; without
    a process group the one process is all.  In a group of torch's "fake" backend nothing is compared.
    said: by name, anything that pickles and compares; the first difference is named.  problem: of this rank, a sentence
    or an exception, of which the first rank's that has one is named.
    """
    if isinstance(problem, Exception):
        problem_text = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}; {remedy}"
    else:
        problem_text = problem
    mine = (dict(said), problem_text)
    everyone = [mine]
    # One process stands for all ranks of a fake group (planner.py): there is nobody else to ask.
    if dist.is_available() and dist.is_initialized() and dist.get_backend(group) != "fake":
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group)
    wrong = [rank for rank, (_, problem_there) in enumerate(everyone) if problem_there]
    if wrong:
        ranks = "" if len(wrong) == len(everyone) else f" (on ranks {wrong})"
        cause = problem if isinstance(problem, Exception) else None
        raise error(f"{caller}{ranks}: {everyone[wrong[0]][1]}") from cause
    first = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        different = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if different:
            key = different[0]
            raise error(
                f"{caller}: ranks differ in {len(different)} things; {key} is {first.get(key, 'missing')} on rank 0 "
                f"of the group and {other.get(key, 'missing')} on rank {rank}: {remedy}"
            )


def check_one_dimension(here: str, mesh: dist.DeviceMesh, one: str) -> None:
    """Raise ParallelError for a mesh of several dimensions.  one: how a dimension is named instead."""
    if mesh.ndim != 1:
        raise ParallelError(
            f"{here}: a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: pass one of them, such as {one}"
        )


def layers_of(model: nn.Module) -> dict[str, object]:
    """The converted layers of a model, their sizes and recipes, as ranks compare them."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Float8Module):
            recipe, shapes = module.numerics.recipe, [tuple(p.shape) for p in module.parameters(recurse=False)]
            found[f"layer {name}"] = shapes, str(recipe), recipe.to_json()  # what the text leaves out is in the second
    return found
