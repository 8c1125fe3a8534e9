"""Differentiable moves of tokens between the ranks of a layer that is divided: what is gathered crosses as FP8.

    gather       [.., T/w, ..] to [.., T, ..]             backward: sums over ranks, each rank keeps its tokens
    scatter      sums over ranks, each keeps its tokens   backward: gathers dy
    copy         as it is                                 backward: sums over ranks
    total        sums over ranks                          backward: as it is

A tensor that is gathered is cast first, as the layer that reads it would cast it: a byte an element crosses instead of
two.  A scale per tensor is joined beforehand; scales per row or block travel behind their row's codes (packed.py).
Sums cross in their own dtype.
Source of the four: Megatron-LM's mappings, arXiv 2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8engine import _torch
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import matrix
from fp8engine.autograd.ready import GatheredTensor
from fp8engine.distributed.packed import pack, unpack
from fp8engine.errors import ParallelError
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import column_sums


class Tokens(NamedTuple):
    """Which ranks divide the tokens, and along which dimension of a tensor.  name: of the layer, for errors."""

    group: dist.ProcessGroup
    dim: int
    name: str

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return self.group.size()

    def check_gather(self, x: torch.Tensor) -> None:
        """Raise ParallelError on every rank where ranks hold different shapes.  A card is not waited for: no check.

        Nor is one made in a plan of cards, on tensors without memory.
        """
        if x.device.type != "cpu" or isinstance(x, _torch.FakeTensor):
            return
        sizes = torch.tensor([[size, -size] for size in (x.dim(), *x.shape[:3])], dtype=torch.int32)
        sizes = torch.nn.functional.pad(sizes, (0, 0, 0, 4 - len(sizes)))  # the same for any number of dimensions
        dist.all_reduce(sizes, dist.ReduceOp.MAX, self.group)
        if not torch.equal(sizes[:, 0], -sizes[:, 1]):
            raise ParallelError(
                f"{self.name}: ranks hold different numbers of tokens, or other tensors, up to {sizes[1:, 0].tolist()} "
                f"and from {(-sizes[1:, 1]).tolist()} on: give every rank an equal part of dimension {self.dim}, padded"
            )

    def check_scatter(self, y: torch.Tensor) -> None:
        """Raise ParallelError for tokens that the ranks do not divide."""
        if y.shape[self.dim] % self.ranks:
            raise ParallelError(
                f"{self.name}: dimension {self.dim} of its output {list(y.shape)} is not divisible by {self.ranks} "
                "ranks, and output_layouts divides it: pad the tokens, or take output_layouts=Replicate()"
            )

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' parts of a tensor of any dtype that the collectives take."""
        whole = x.new_empty(self.ranks * x.numel())
        _torch.all_gather(whole, x.contiguous().view(-1), self.group)
        parts = whole.view(self.ranks, *x.shape).movedim(0, self.dim)
        return parts.reshape(*x.shape[: self.dim], self.ranks * x.shape[self.dim], *x.shape[self.dim + 1 :])

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of the sum of all ranks' tensors."""
        parts = y.unflatten(self.dim, (self.ranks, -1)).movedim(self.dim, 0).contiguous()
        mine = torch.empty_like(parts[0])
        _torch.reduce_scatter(mine.view(-1), parts.view(-1), self.group)
        return mine

    def gather_codes(self, x: torch.Tensor, cast: Cast, numerics: Numerics, role: str, record: bool) -> GatheredTensor:
        """All ranks' parts of a tensor as FP8 codes, counted in the layer's slot of `role` by what this rank casts."""
        slot = numerics.slot(role, record)._replace(group=self.group.group_name)
        if record:
            numerics.observe(role, matrix(x))
        message, scale = pack(matrix(x), cast, slot)
        whole = self.gather(message.view(*x.shape[:-1], message.shape[-1]))
        found = unpack(whole, x.shape[-1], cast, x.dtype, scale, GatheredTensor)
        found.source = slot
        return found


def wire_cast(first: Cast, second: Cast, second_reads: bool) -> Cast | None:
    """The cast under which a tensor crosses, which `first` and, transposed, `second` read; None: in 16 bits.

    Codes serve `second` where it reads the same ones, or where both scale by powers of two: then casting them again
    the other way rounds a number a second time only where its scale there is too large for it.
    second_reads: whether it reads the tensor at all (a frozen weight has no wgrad).
    """
    if not first.is_fp8:
        return None
    if not second_reads:
        # A layer reads no codes whose scales change along a row and are not powers of two (autograd/ready.py).
        return first if first.per_tensor or (first.rows == 1 and (first.cols == -1 or first.power_of_2)) else None
    if first.per_tensor:
        return first if second == first else None
    if not second.is_fp8 or second.per_tensor or first.rows != 1 or first.dtype != second.dtype:
        return None
    return first if first.power_of_2 and second.power_of_2 else None


class Crossing(torch.autograd.Function):
    """apply(x, there, back): there(x), whose gradient is moved by `back`."""

    @staticmethod
    def forward(ctx, x, there: Callable[[torch.Tensor], Any], back: Callable[[torch.Tensor], Any]):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dx) -> Any:
        return ctx.back(dx), None, None


def gathered(x: torch.Tensor, tokens: Tokens, numerics: Numerics, cast: Cast | None, record: bool) -> Any:
    """All ranks' tokens; dx is summed over ranks, each of which keeps its tokens.  cast: of `wire_cast`."""

    def there(x: torch.Tensor) -> torch.Tensor:
        tokens.check_gather(x)
        return tokens.gather(x) if cast is None else tokens.gather_codes(x, cast, numerics, "input", record)

    return Crossing.apply(x, there, tokens.scatter)


def scattered(y: torch.Tensor, tokens: Tokens, numerics: Numerics, needs_w: bool) -> Any:
    """This rank's tokens of the sum over ranks; dy is gathered.  needs_w: whether the layer that made y has a wgrad."""
    tokens.check_scatter(y)
    cast = wire_cast(numerics.recipe.dgrad[0], numerics.recipe.wgrad[0], needs_w)  # as it is now, not in backward

    def back(dy: torch.Tensor) -> torch.Tensor:
        return tokens.gather(dy) if cast is None else tokens.gather_codes(dy, cast, numerics, "grad_output", True)

    return Crossing.apply(y, tokens.scatter, back)


def copied(x: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """x, whose gradient is summed over ranks."""
    return Crossing.apply(x, lambda x: x.view_as(x), lambda dx: _sum(dx, group))


def total(y: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """The sum over ranks, whose gradient is as it comes."""
    return Crossing.apply(y, lambda y: _sum(y, group), lambda dy: dy)


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # a gradient may be read elsewhere
    dist.all_reduce(x, group=group)
    return x


class AddBias(torch.autograd.Function):
    """apply(y, bias [N], group): y + bias, after the sum over ranks.  group: whose ranks hold other tokens, or None."""

    @staticmethod
    def forward(ctx, y, bias_N, group: dist.ProcessGroup | None):
        ctx.group, ctx.dtype = group, bias_N.dtype
        return y + bias_N.to(y.dtype)

    @staticmethod
    def backward(ctx, dy) -> Any:
        db_N = None
        if ctx.needs_input_grad[1]:
            db_N = column_sums(matrix(dy))  # in FP32
            if ctx.group is not None:
                dist.all_reduce(db_N, group=ctx.group)
            db_N = db_N.to(ctx.dtype)
        return dy, db_N, None
