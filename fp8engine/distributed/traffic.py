"""Bytes that this rank sends in collectives, counted as they are called: what a way of sharding costs on the wire.

A ring algorithm's counts for a group of w ranks, from each collective's tensors:

    all-gather       (w - 1) * input          all-reduce    2 * (w - 1) / w * input
    reduce-scatter   (w - 1) / w * input      all-to-all    what is addressed to other ranks

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from fp8engine import _torch
from fp8engine.numerics.formats import word

KINDS = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("allreduce", "all_reduce"),
    "all-to-all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}


class Traffic(_torch.TorchDispatchMode):
    """Counts what this rank's collectives send, inside a `with` block.

    bytes, calls: by kind of collective and dtype, as ("all-gather", "uint8").  Reading them waits for nothing.
    inputs: bytes that each call was given, in order, by the same.
    groups: {name of a process group: word}, for groups to be counted apart: as ("tp all-gather", "uint8").
    As under any mode, torch.compile leaves a module in eager code that is called inside the block, from then on.

    >>> with Traffic() as traffic:
    ...     _ = torch.ones(4) + 1
    >>> traffic.total(), dict(traffic.calls)
    (0, {})
    """

    def __init__(self, groups: Mapping[str, str] | None = None):
        super().__init__()
        self.groups = groups or {}
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.inputs: defaultdict[tuple[str, str], list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for kind, names in KINDS.items() if any(name in func.name() for name in names)), None)
            if kind is not None:
                self._count(kind, func, args, kwargs or {}, result)
        return result

    def total(self, *kinds: str) -> int:
        """Bytes of these kinds of collectives, of all where none is named."""
        return sum(size for (kind, _), size in self.bytes.items() if not kinds or kind in kinds)

    def to_dict(self) -> dict:
        """Plain numbers, for JSON: bytes and calls by "kind dtype"."""
        return {
            f"{kind} {dtype}": {"bytes": size, "calls": self.calls[kind, dtype]}
            for (kind, dtype), size in sorted(self.bytes.items())
        }

    def _count(self, kind: str, func, args, kwargs, result) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        inputs = _first(given, "input_tensors", "input_tensor", "inputs", "input", "tensors")
        size = sum(x.numel() * x.itemsize for x in inputs)
        group = _torch.group_of_collective(given)
        ranks, rank = group.size(), group.rank()
        if kind == "all-gather":
            sent = (ranks - 1) * size
        elif kind == "all-reduce":
            sent = 2 * (ranks - 1) * size // ranks
        elif kind == "all-to-all":
            sent = size - _own_share(inputs, given.get("input_split_sizes"), ranks, rank)
        else:
            sent = (ranks - 1) * size // ranks
        named = self.groups.get(group.group_name)
        key = f"{named} {kind}" if named else kind, word(inputs[0].dtype)
        self.bytes[key] += sent
        self.calls[key] += 1
        self.inputs[key].append(size)


def _first(given: dict, *names: str) -> list[torch.Tensor]:
    """The tensors of the first argument that the collective has, out of lists of any depth."""
    return _torch.tree_leaves(next(given[name] for name in names if name in given))


def _own_share(inputs: list[torch.Tensor], splits: list[int] | None, ranks: int, rank: int) -> int:
    """Bytes of an all-to-all that a rank addresses to itself."""
    if len(inputs) > 1:  # a list of one tensor for each rank
        return inputs[rank].numel() * inputs[rank].itemsize
    (x,) = inputs
    if not splits:
        return x.numel() * x.itemsize // ranks
    return splits[rank] * (x.numel() // max(len(x), 1)) * x.itemsize
