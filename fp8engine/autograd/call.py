"""The use of one layer by a fused function, whose producer may write codes of what the layer reads, or of its dy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8engine.autograd import matmuls
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import (
    GRAD_OUTPUT,
    INPUT,
    Either,
    Gradient,
    along_m,
    input_pair,
    transpose,
    transposed,
    use_of,
)
from fp8engine.autograd.ready import take
from fp8engine.ops.backends import running_on
from fp8engine.ops.reference import Operand, Store
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.operands import Kept


class Call:
    """One layer's part of a fused call: decisions made in forward and read in backward.  Arguments: as of `use_of`."""

    def __init__(
        self, numerics: Numerics, x: torch.Tensor, weight: torch.Tensor, bias_N, needs: Sequence[bool], record: bool
    ):
        self.needs_x, self.needs_w, self.needs_b = needs
        of_call = self.needs_x, self.needs_w, self.needs_b
        self.use = use = use_of(numerics, x, weight, bias_N, of_call, record)
        self.numerics, self.plan, self.record, self.compiling = numerics, use.plan, record, use.where.compiling
        self.transposes_input = self.needs_w and use.where.on_codes and use.plan.input_serves_both
        self.groups: tuple | None = None  # what an Operand has beside data and scale, of the saved input
        self.copies: Kept = {}

    def observe(self, role: str, x_MK: torch.Tensor) -> None:
        """Describe a tensor in a step that is sampled."""
        self.use.observe(role, x_MK)

    def cast_input(self, x_MK: torch.Tensor, kept: Kept) -> tuple[Either, Either | None]:
        """(X for forward, what wgrad will read).  kept: operands that another layer has made of this x."""
        a, saved, _ = input_pair(self.use, x_MK, kept)
        first, second = self.plan.forward[0], self.plan.wgrad[1]
        if a is None:
            a = first.plain(x_MK)
            saved = a if self.needs_w and second is first else saved
        if saved is None and self.needs_w:
            saved = second.plain(x_MK)
        return a, saved

    def take(self, x: Float8Tensor) -> tuple[Either, Either | None]:
        """The same of an input that is in FP8 already: wgrad transposes the codes when it reads them."""
        self.transposes_input = False
        return take(self.use, x, self.cast_again)

    def cast_again(self, x_MK: torch.Tensor, kept: Kept) -> Either:
        """What wgrad reads, of an x made a second time: under the scale it had, and counted no more."""
        use = self.use
        if not self.transposes_input:
            return along_m(use, x_MK, kept)
        return transpose(use, x_MK, self.plan.forward[0], kept, use.slots[use.first + INPUT, False, False])

    def store(self, again: bool = False) -> Store | None:
        """How a norm or an activation stores what this layer reads; None: in 16 bits, to be cast.

        again: it is made a second time, under the scale it had, and counted no more.
        """
        plan, use = self.plan, self.use
        if not (plan.forward[0].fp8 and (plan.input_serves_both or not self.needs_w)):
            return None
        transposed = self.transposes_input or (self.needs_w and plan.wgrad[1] is not plan.forward[0])
        slot = use.slots[use.first + INPUT, self.record and not again, use.count and not again]
        if slot.group and plan.forward[0].per_tensor:
            return None
        return Store(plan.forward[0].how[None], transposed, slot)

    def stored(self, q: Operand, q_t: Operand | None) -> tuple[Operand, Operand | None]:
        """(X for forward, what wgrad will read) of what was stored as `store` said."""
        if not self.needs_w:
            return q, None
        if q_t is None:
            return q, q
        return q, q_t if self.transposes_input else q_t.t()

    def forward(self, a: Either, weight_NK: torch.Tensor, bias_N, out: torch.dtype) -> tuple[torch.Tensor, tuple]:
        """(y, the weight's transpose as (codes, scale) where a graph saves it; else it waits here)."""
        y_MN, weight_KN, self.copies = matmuls.forward(self.use, a, weight_NK, bias_N, out)
        return y_MN, weight_KN

    def to_save(self, saved: Either | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(data, scale) of what wgrad will read, for save_for_backward."""
        if isinstance(saved, Operand):
            data, scale, *groups = saved
            self.groups = tuple(groups)
            return data, scale
        return saved, None

    def as_asked(self):
        """The backward's context: it runs where its forward was asked to."""
        return running_on(self.use.where.asked)

    def store_grad(self) -> Store | None:
        """How an activation's backward stores this layer's dy; None: in 16 bits, to be cast."""
        first, second, use = self.plan.dgrad[0], self.plan.wgrad[0], self.use
        slot = use.slots[use.first + GRAD_OUTPUT, True, True]
        if not first.fp8 or (first.per_tensor and slot.group):
            return None
        if self.needs_x and self.needs_w:
            serves, transposed = self.plan.grad_serves_both, second is not first or use.where.on_codes
        else:  # wgrad alone reads, and its slot counts, the cast along 0
            serves, transposed = self.needs_x or (self.needs_w and second is first), False
        return Store(first.how[None], transposed, slot) if serves else None

    def stored_grad(self, q: Operand, q_t: Operand | None, db_N: torch.Tensor) -> Gradient:
        """What was stored as `store_grad` said, and the sums of its columns."""
        return Gradient(q, q_t or (q.t() if self.needs_w else None), db_N)

    def backward(self, dy: torch.Tensor | Gradient, saved: tuple, weight: tuple, dtype: torch.dtype) -> tuple:
        """(dx [M, K] in `dtype`, dw, db), None for what is not needed.

        dy: [M, N], or what `stored_grad` gave.  saved: what `to_save` gave.  weight: the parameter, then what `forward`
        gave beside y.
        """
        data, scale = saved
        kept = None if not self.needs_w else data if self.groups is None else Operand(data, scale, *self.groups)
        if kept is not None and not self.transposes_input:
            kept = transposed(kept)
        copies: Kept = {}
        if not torch.compiler.is_compiling():
            # Taken out: a loss that the user keeps alive keeps this call alive, and with it these operands.
            copies, self.copies = self.copies, copies
        return matmuls.backward(self.use, dy, kept, (weight[0], weight[1:], copies), dtype)
