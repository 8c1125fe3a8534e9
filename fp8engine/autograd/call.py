"""The three matmuls of one call of a layer, for every autograd Function that holds some.

    forward   y[M, N]  = X[M, K]  @ W[N, K]^T + b        X, W reduced along -1
    dgrad     dx[M, K] = DY[M, N] @ (W^T)[K, N]^T        W cast along 0
    wgrad     dw[N, K] = (DY^T)[N, M] @ (X^T)[K, M]^T    DY, X cast along 0;  db = sum of dy over rows

Saved for backward: X as FP8 codes in the orientation wgrad reads (or in 16 bits where wgrad is), its scale, and the
parameter itself.  What the 16-bit alternative keeps, x, is not.  A weight that needs no gradient saves no X; an x that
needs none spends no dgrad.

A matmul on FP8 codes reads both operands along what is summed.  So x is transposed for wgrad, dy for wgrad and the
weight for dgrad in the pass that casts them, and the sums of dy's columns are db.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8engine.autograd import stored
from fp8engine.autograd.numerics import Numerics, both, holding, operand, transpose
from fp8engine.autograd.refusals import no_transform
from fp8engine.autograd.weight import Copies
from fp8engine.ops import casts, matmul
from fp8engine.ops.backends import asked, inherited
from fp8engine.ops.reference import Operand, Store, column_sums
from fp8engine.scaling.shared_input import Kept

ON_CODES = ("triton", "cublas")  # backends that multiply FP8 codes, both operands lying along what is summed
Either = Operand | torch.Tensor  # FP8, or the tensor itself where a recipe leaves a matmul in 16 bits
NOTHING = (None, None)


def graphs_run_on(where: torch.device) -> str | None:
    """A backend of the kind that a compiled graph, which chooses when it runs, will choose there; None: any."""
    return "cublas" if where.type == "cuda" else None


class Gradient(NamedTuple):
    """dy as the matmuls read it: for dgrad, transposed for wgrad, and the sums of its columns before it was rounded."""

    q: Either | None = None
    q_t: Either | None = None
    db_N: torch.Tensor | None = None


class Call:
    """What one call of a layer decides in forward and reads in backward, beside the tensors that are saved.

    x, weight: its input and its weight [..., N, K], for their device and sizes.  needs: whether input, weight and bias
    want gradients.  record: whether amaxes enter the history.
    """

    def __init__(
        self, numerics: Numerics, x: torch.Tensor, weight: torch.Tensor, bias_N, needs: Sequence[bool], record: bool
    ):
        self.numerics, self.record = numerics, record
        self.plan = numerics.plan  # as it is now: another step may begin, under another, before this one's backward
        self.needs_x, self.needs_w, self.needs_b = needs
        self.compiling = torch.compiler.is_compiling()
        if self.compiling:
            self.backend = graphs_run_on(x.device)
        else:
            rows = x.numel() // max(x.shape[-1], 1)
            self.backend = numerics.ran = matmul.choose(x.device, self.plan.by_block, (rows, weight.shape[-2]))
        self.asked = None if self.compiling else asked()
        on_codes = self.backend in ON_CODES
        self.turned_input = self.needs_w and on_codes and self.plan.input_serves_both
        self.turned_weight = on_codes and self.plan.weight_serves_both
        self.turned_grad = self.needs_x and self.needs_w and on_codes and self.plan.grad_serves_both
        self.bias_dtype = None if bias_N is None else bias_N.dtype
        self.groups: list | None = None  # what an Operand has beside data and scale, of the saved input
        self.weights: Kept = {}

    def observe(self, role: str, x_MK: torch.Tensor) -> None:
        """Show a tensor to whoever looks at this step."""
        if self.record:
            self.numerics.observe(role, x_MK)

    def cast_input(self, x_MK: torch.Tensor, kept: Kept) -> tuple[Either, Either | None]:
        """(X for forward, what wgrad will read).  kept: operands that another layer has made of this x."""
        plan, numerics = self.plan, self.numerics
        first, to_save, slot = plan.forward[0], plan.wgrad[1], numerics.slot("input", self.record)
        self.observe("input", x_MK)
        if self.turned_input:
            return both(x_MK, first, kept, slot)
        serves = self.needs_w and to_save is first
        a = operand(x_MK, first, kept, slot, None if serves else holding(x_MK, self.backend))
        if serves or not self.needs_w:
            return a, a if serves else None
        return a, operand(x_MK, to_save, kept, numerics.slot("input", False, count=False))

    def cast_again(self, x_MK: torch.Tensor, kept: Kept) -> Either:
        """What wgrad reads, of an x made a second time: under the scale it had, and counted no more."""
        plan, slot = self.plan, self.numerics.slot("input", False, count=False)
        if self.turned_input:
            return transpose(x_MK, plan.forward[0], kept, slot)
        return operand(x_MK, plan.wgrad[1], kept, slot)

    def store(self, again: bool = False) -> Store | None:
        """How a producer stores what this layer reads, so that nothing is cast again; None: in 16 bits, to be cast.

        again: it is made a second time, under the scale it had, and counted no more.
        """
        plan = self.plan
        if not (plan.forward[0].fp8 and (plan.input_serves_both or not self.needs_w)):
            return None
        how = plan.forward[0].how[None]
        turned = self.turned_input or (self.needs_w and plan.wgrad[1] is not plan.forward[0])
        return Store(how, turned, self.numerics.slot("input", self.record and not again, count=not again))

    def stored(self, q: Operand, q_t: Operand | None) -> tuple[Operand, Operand | None]:
        """(X for forward, what wgrad will read) of what a producer stored as `store` said."""
        if not self.needs_w:
            return q, None
        if q_t is None:
            return q, q
        return q, q_t if self.turned_input else q_t.t()

    def forward(
        self, a: Either, weight_NK: torch.Tensor, bias_N, out: torch.dtype, fp8: bool = False
    ) -> tuple[torch.Tensor, tuple]:
        """(y, the weight's transpose as (codes, scale) where a graph saves it; else it waits here).

        fp8: y may be a Float8Tensor, where the recipe stores it so.
        """
        numerics, second = self.numerics, self.plan.forward[1]
        self.observe("weight", weight_NK)
        weights = numerics.kept_of_weight(weight_NK, self.record)
        slot, hold = numerics.slot("weight", self.record), holding(weight_NK, self.backend)
        copies = weights if isinstance(weights, Copies) else None  # None: nothing outlives the call
        holds = self.needs_x and (self.compiling or (copies is not None and copies.held))
        turned = NOTHING
        if self.turned_weight and holds:
            b, b_t = both(weight_NK, second, weights, slot)
            turned = b_t[:2] if self.compiling else turned
        else:
            b = operand(weight_NK, second, weights, slot, hold)
        if fp8 and self.plan.stored is not None and not self.compiling:
            y_MN = stored.multiply(self, a, b, bias_N, out)
        else:
            y_MN = self._multiply(a, b, bias_N, out, "forward")
            if fp8 and self.record and numerics.looks_at_output:
                self.observe("output", y_MN)
        if not self.compiling:
            if copies is not None and (self.turned_weight or second is not self.plan.dgrad[1]):
                copies.after_forward(second.how.get(hold))
            self.weights = weights if holds else {}
        return y_MN, turned

    def to_save(self, saved: Either | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(data, scale) of what wgrad will read, for save_for_backward."""
        if isinstance(saved, Operand):
            data, scale, *self.groups = saved
            return data, scale
        return saved, None

    def as_asked(self):
        """The backward's context: it runs where its forward was asked to."""
        return contextlib.nullcontext() if self.asked is None else inherited(self.asked)

    def store_grad(self) -> Store | None:
        """How a producer stores this layer's dy, so that nothing is cast again; None: in 16 bits, to be cast."""
        first, again = self.plan.dgrad[0], self.plan.wgrad[0]
        if not first.fp8:
            return None
        if self.needs_x and self.needs_w:
            serves, turned = self.plan.grad_serves_both, self.turned_grad or again is not first
        else:  # wgrad alone reads, and its slot counts, the cast along 0
            serves, turned = self.needs_x or (self.needs_w and again is first), False
        return Store(first.how[None], turned, self.numerics.slot("grad_output", record=True)) if serves else None

    def stored_grad(self, q: Operand, q_t: Operand | None, db_N: torch.Tensor) -> Gradient:
        """What a producer stored as `store_grad` said, and the sums of its columns."""
        return Gradient(q, q_t or (q.t() if self.needs_w else None), db_N)

    def backward(self, dy: torch.Tensor | Gradient, saved: tuple, weight: tuple, dtype: torch.dtype) -> tuple:
        """(dx [M, K] in `dtype`, dw, db), None for what is not needed.

        dy: [M, N], or what `stored_grad` gave.  saved: what `to_save` gave.  weight: the parameter, then what `forward`
        gave beside y.
        """
        numerics, compiling = self.numerics, torch.compiler.is_compiling()
        if not compiling:
            numerics.state.backward_seen = True
            numerics.weight.after_backward()
            if torch.is_grad_enabled():
                raise no_transform(numerics.name, "create_graph=True: its gradient has no gradient of its own")
        made, again = {}, self.plan.wgrad[0]
        if isinstance(dy, torch.Tensor):
            self.observe("grad_output", dy)
        dx_MK = dw_NK = db_N = None
        a, turned, db_N = self._cast_gradient(dy, made) if isinstance(dy, torch.Tensor) else dy
        if self.needs_x:
            dx_MK = self._multiply(a, self._weight_for_dgrad(*weight), None, dtype, "dgrad")
        if self.needs_w:
            if turned is None and isinstance(dy, torch.Tensor):
                slot = numerics.slot("grad_output", not self.needs_x, count=not self.needs_x)
                turned = operand(dy, again, made, slot, holding(dy, self.backend)).t()
            data, scale = saved
            b = data if self.groups is None else Operand(data, scale, *self.groups)
            dw_NK = self._multiply(turned, b if self.turned_input else b.t(), None, weight[0].dtype, "wgrad")
        if not self.needs_b:
            return dx_MK, dw_NK, None
        if db_N is None and isinstance(dy, torch.Tensor):
            db_N = dy.sum(0, dtype=torch.float32) if compiling else column_sums(dy)
        return dx_MK, dw_NK, db_N if db_N is None or db_N.dtype == self.bias_dtype else db_N.to(self.bias_dtype)

    def _cast_gradient(self, dy_MN: torch.Tensor, made: Kept) -> Gradient:
        """dy for dgrad, with what the same pass gives."""
        if not self.needs_x:
            return Gradient()
        first, slot = self.plan.dgrad[0], self.numerics.slot("grad_output", record=True)
        if self.turned_grad and self.needs_b:
            return Gradient(*casts.cast_transpose(dy_MN, first.how[None], slot, sums=True))
        if self.turned_grad:
            return Gradient(*casts.cast_transpose(dy_MN, first.how[None], slot))
        return Gradient(operand(dy_MN, first, made, slot, holding(dy_MN, self.backend)))

    def _weight_for_dgrad(self, weight_NK: torch.Tensor, codes, scale) -> Either:
        """The weight's transpose [K, N]: from forward where it waits, else cast now."""
        numerics = self.numerics
        slot = numerics.slot("weight", False, count=False)
        forward, dgrad = self.plan.forward[1], self.plan.dgrad[1]
        if codes is not None:
            how = forward.how[None]
            return Operand(codes, scale, how.rows, how.cols, how.power_of_2)
        weights: Kept = {}
        if not torch.compiler.is_compiling():
            # Taken out: a loss that the user still holds holds this call, and would hold what waits here.
            weights, self.weights = self.weights, weights
        if self.turned_weight:
            return transpose(weight_NK, forward, weights, slot)
        return operand(weight_NK, dgrad, weights, slot, holding(weight_NK, self.backend)).t()

    def _multiply(self, a, b, bias_N, out: torch.dtype, which: str) -> torch.Tensor:
        """One of the three matmuls, in FP8 where its operands are."""
        if isinstance(a, Operand):
            plan = self.plan
            return matmul.matmul(a, b, bias_N, out, "exact" if plan.exact else plan.precision[which])
        y_MN = matmul.matmul_fp16(a, b.to(a.dtype)).to(out)
        return y_MN if bias_N is None else y_MN + bias_N
