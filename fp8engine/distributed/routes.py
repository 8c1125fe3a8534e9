"""Rows of tokens on their way to the ranks that hold their experts, and back, in FP8 or as they are.

    sent        x [T, K], sorted by expert: the first rows go to rank 0, which holds the first experts, then to rank 1
    arrived     [R, K]: the rows of rank 0, then of rank 1, ..., each sorted by expert; then all sorted by expert
    a message   numbers of rows by expert, before any row moves, so that ranks know what to expect; and what has to be
                the same on all of them, so that a rank with bad input is an error everywhere and a wait nowhere

A row in FP8 (packed.py) with a scale of its own is (K + 1) / 2K of BF16's bytes; under one scale for all ranks' rows it
is half.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8engine.autograd.groups import counted
from fp8engine.distributed.packed import pack, unpack
from fp8engine.distributed.tokens import Crossing
from fp8engine.errors import ParallelError, ShapeError, UnsupportedDtype
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops.reference import Slot
from fp8engine.ops.tensor import Float8Tensor

REFUSED, KIND = -2, -1  # what a message says behind the numbers of rows
LENGTH = 2


class Route:
    """Where the rows of one call go.  Making one is a collective: every rank of the group makes its own.

    x_TK, sizes: this rank's rows, sorted by expert, and how many each of all experts has (as `GroupedLinear` takes).
    shape: (experts on all ranks, columns of x).  kind: what all ranks have to agree on, in words.
    sizes of the result: how many rows each expert of this rank has.
    Raises ShapeError, UnsupportedDtype for what this rank was given; ParallelError on all other ranks then, and on
    every rank where their kinds differ.
    """

    def __init__(
        self, x_TK: torch.Tensor, sizes: Any, shape: tuple[int, int], group: dist.ProcessGroup, kind: str, name: str
    ):
        self.group, ranks, where = group, group.size(), x_TK.device
        experts, columns = shape
        counts_E, problem = torch.zeros(experts, dtype=torch.int64, device=where), None
        refused = counts_E.new_zeros(())
        try:
            counts_E, refused = _counted(x_TK, sizes, experts, columns, name)
        except Exception as error:  # whatever it is, the other ranks wait for the message
            problem, refused = error, refused + 1
        said = torch.stack([refused, refused.new_tensor(zlib.crc32(kind.encode()))]).expand(ranks, LENGTH)
        sent = torch.cat([counts_E.view(ranks, -1), said], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        own, others = torch.stack([sent, received]).tolist()  # the one wait for a card: numbers of rows are sizes here
        _check(own[0], others, problem, name, kind)
        self.sent = [sum(row[:-LENGTH]) for row in own]
        self.received = [sum(row[:-LENGTH]) for row in others]
        self.sizes = [sum(column) for column in zip(*(row[:-LENGTH] for row in others), strict=True)]
        # The expert of each row as it arrives, and so the order that brings the rows of each together.
        of_here = torch.arange(len(self.sizes), device=where).repeat(ranks)
        counts = received[:, :-LENGTH].flatten()
        experts_R = of_here.repeat_interleave(counts, output_size=sum(self.received))
        self.order_R = experts_R.argsort(stable=True)
        self.back_R = self.order_R.argsort()

    def move(self, x: torch.Tensor, to_experts: bool, cast: Cast | None, slot: Slot | None = None) -> torch.Tensor:
        """This rank's rows [T, K] as its experts have them, [R, K], sorted by expert; or those back, in the order of x.

        A Float8Tensor where a cast is given.  slot: where the amax of this rank's rows is entered.
        """
        message, scale = x, None
        if cast is not None:  # one scale is that of all ranks' rows together
            message, scale = pack(x, cast, None if slot is None else slot._replace(group=self.group.group_name))
        if to_experts:
            message = self._exchange(message, self.sent, self.received)[self.order_R]
        else:
            message = self._exchange(message[self.back_R], self.received, self.sent)
        return message if cast is None else unpack(message, x.shape[1], cast, x.dtype, scale)

    def _exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out


def crossed(
    x: torch.Tensor, route: Route, to_experts: bool, casts: tuple[Cast | None, Cast | None], slot: Slot | None = None
) -> Any:
    """x moved by the route, whose gradient moves the other way.

    casts: of x and of its gradient, None in their own dtype.  Only what goes to the experts in forward stays codes.
    """
    cast, cast_back = casts

    def there(x: torch.Tensor) -> torch.Tensor:
        moved = route.move(x, to_experts, cast, slot)
        return moved if to_experts else _plain(moved)

    return Crossing.apply(x, there, lambda dx: _plain(route.move(_plain(dx), not to_experts, cast_back)))


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.values() if isinstance(x, Float8Tensor) else x


def _counted(x_TK, sizes, experts: int, columns: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of rows, int64 [E] beside x; 1 where they are wrong and only a card knows it, else 0)."""
    if x_TK.dtype not in FLOATS:
        raise UnsupportedDtype(
            f"{name}: input is {x_TK.dtype}; FP8 casts take float32, bfloat16 or float16: convert it"
        )
    if x_TK.dim() != 2 or x_TK.shape[1] != columns:
        raise ShapeError(f"{name}: input is {list(x_TK.shape)}; want [T, {columns}], the rows of each expert together")
    counts_E, checked = counted(sizes, x_TK, experts, name)
    if checked:
        return counts_E, counts_E.new_zeros(())
    counts_E = counts_E.long()
    wrong = (counts_E < 0).any() | (counts_E.sum() != len(x_TK))
    return counts_E.clamp(min=0), wrong.long()


def _check(
    own: Sequence[int], others: Sequence[Sequence[int]], problem: Exception | None, name: str, kind: str
) -> None:
    """Raise on every rank where one of them refused its input, or differs.  own, others: messages."""
    if problem is not None:
        raise problem
    if own[REFUSED]:
        raise ShapeError(
            f"{name}: sizes of experts are negative, or do not sum to the number of rows: an index of an expert that "
            "is not there?"
        )
    refused = [rank for rank, said in enumerate(others) if said[REFUSED]]
    if refused:
        raise ParallelError(
            f"{name}: rank {refused[0]} of the group refused its input, and its own error says why; no row was sent"
        )
    for rank, said in enumerate(others):
        if said[KIND] != own[KIND]:
            raise ParallelError(
                f"{name}: {kind} on this rank, and otherwise on rank {rank} of the group: run the same dtype, recipes "
                "and options everywhere (under auto: in DistributedDataParallel, or with reduce_amax, all decide alike)"
            )
