"""Division of rows among experts: the first sizes[0] rows are the first expert's, the next sizes[1] the second's.

Numbers of rows that lie on a card are checked and summed there: nothing here waits for it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from fp8engine import _torch
from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.ops import device
from fp8engine.ops.reference.grouped import bounds_of

COUNTS = (torch.int32, torch.int64)


def bounds(sizes: Sequence[int] | torch.Tensor, x_TK: torch.Tensor, experts: int, name: str) -> torch.Tensor:
    """Where the rows of each expert lie, INT32 [2, E + 1] beside x: what every operation on experts takes.

    sizes: E numbers of rows, 0 allowed, that sum to T: ints, or a tensor of ints on the host or beside x.
    Raises ShapeError, UnsupportedDtype and BackendError (another card), naming the layer.  What lies on a card, or is
    known when a compiled graph runs, is checked there, without waiting: a wrong sum is then a device-side assertion.

    >>> bounds([2, 0, 1], torch.ones(3, 8), 3, "experts")[0]
    tensor([0, 2, 2, 3], dtype=torch.int32)
    """
    counts_E, checked = counted(sizes, x_TK, experts, name)
    if not checked and not counts_E.is_meta:
        right = (counts_E >= 0).all() & (counts_E.sum() == len(x_TK))
        _torch.assert_async(right, f"{name}: sizes of experts are negative, or do not sum to the number of rows")
    return bounds_of(counts_E)


def counted(
    sizes: Sequence[int] | torch.Tensor, x_TK: torch.Tensor, experts: int, name: str
) -> tuple[torch.Tensor, bool]:
    """(how many rows each expert has, [E] beside x; whether that was checked); raises as `bounds` says."""
    tensor = isinstance(sizes, torch.Tensor)
    if tensor and sizes.dtype not in COUNTS:
        raise UnsupportedDtype(f"{name}: sizes is {sizes.dtype}; numbers of rows are int32 or int64")
    if tensor and sizes.device.type != "cpu":
        device.check_one(name, x_TK, sizes=sizes)
    shape = list(sizes.shape) if tensor else [len(sizes)]
    if shape != [experts]:
        raise ShapeError(f"{name}: sizes has shape {shape}; want one number of rows for each of {experts} experts")
    if tensor and not on_host(sizes):
        return sizes.to(x_TK.device), False
    try:
        given = [operator.index(count) for count in (sizes.tolist() if tensor else sizes)]
    except TypeError as error:
        raise UnsupportedDtype(f"{name}: sizes {list(sizes)}: numbers of rows are ints") from error
    _check(given, len(x_TK), name)
    return torch.tensor(given, device=x_TK.device), True


def on_host(sizes: torch.Tensor) -> bool:
    """Whether numbers of rows can be read now without waiting for a card, or for a graph to run."""
    return sizes.device.type == "cpu" and not torch.compiler.is_compiling()


def _check(sizes: list[int], rows: int, name: str) -> None:
    if any(count < 0 for count in sizes):
        raise ShapeError(f"{name}: sizes {sizes}: a number of rows is at least 0")
    if sum(sizes) != rows:
        raise ShapeError(
            f"{name}: sizes {sizes} sum to {sum(sizes)}, and the input has {rows} rows: "
            "each row belongs to one expert, and rows of one expert lie together"
        )
