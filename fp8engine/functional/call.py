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

import torch

from fp8engine import ops
from fp8engine.dispatch import asked, inherited
from fp8engine.errors import GradientError
from fp8engine.functional.numerics import Numerics, both, holding, operand, plain, transpose
from fp8engine.reference import Operand, column_sums
from fp8engine.scaling import Kept

ON_CODES = ("triton", "cublas")  # backends that multiply FP8 codes, both operands lying along what is summed
Either = Operand | torch.Tensor  # FP8, or the tensor itself where a recipe leaves a matmul in 16 bits
NOTHING = (None, None)


def graphs_run_on(where: torch.device) -> str | None:
    """A backend of the kind that a compiled graph, which chooses when it runs, will choose there; None: any."""
    return "cublas" if where.type == "cuda" else None


class Call:
    """What one call of a layer decides in forward and reads in backward, beside the tensors that are saved.

    x: its input, for its device.  needs: whether input, weight and bias want gradients.  record: whether amaxes enter
    the history.
    """

    def __init__(self, numerics: Numerics, x: torch.Tensor, bias_N, needs: Sequence[bool], record: bool):
        self.numerics, self.record = numerics, record
        self.needs_x, self.needs_w, self.needs_b = needs
        self.compiling = torch.compiler.is_compiling()
        self.backend = graphs_run_on(x.device) if self.compiling else numerics.ran
        self.asked = None if self.compiling else asked()
        on_codes = self.backend in ON_CODES
        self.turned_input = self.needs_w and on_codes and numerics.plan.input_serves_both
        self.turned_weight = on_codes and numerics.plan.weight_serves_both
        self.turned_grad = self.needs_x and self.needs_w and on_codes and numerics.plan.grad_serves_both
        self.bias_dtype = None if bias_N is None else bias_N.dtype
        self.groups: list | None = None  # what an Operand has beside data and scale, of the saved input
        self.weights: Kept = {}

    def cast_input(self, x_MK: torch.Tensor, kept: Kept) -> tuple[Either, Either | None]:
        """(X for forward, what wgrad will read).  kept: operands that another layer has made of this x."""
        plan, numerics = self.numerics.plan, self.numerics
        first, to_save, slot = plan.forward[0], plan.wgrad[1], numerics.slot("input", self.record)
        if self.turned_input:
            return both(x_MK, first, kept, slot)
        serves = self.needs_w and to_save is first
        a = operand(x_MK, first, kept, slot, None if serves else holding(x_MK, self.backend))
        if serves or not self.needs_w:
            return a, a if serves else None
        return a, operand(x_MK, to_save, kept, numerics.slot("input", False, count=False))

    def forward(self, a: Either, weight_NK: torch.Tensor, bias_N, out: torch.dtype) -> tuple[torch.Tensor, tuple]:
        """(y, the weight's transpose as (codes, scale) where a graph saves it; else it waits here)."""
        numerics, second = self.numerics, self.numerics.plan.forward[1]
        weights = numerics.kept_of_weight(weight_NK, self.record)
        slot, hold = numerics.slot("weight", self.record), holding(weight_NK, self.backend)
        holds = self.needs_x and (numerics.weight.holds if plain(weight_NK) else self.compiling)
        turned = NOTHING
        if self.turned_weight and holds:
            b, b_t = both(weight_NK, second, weights, slot)
            turned = b_t[:2] if self.compiling else turned
        else:
            b = operand(weight_NK, second, weights, slot, hold)
        y_MN = self._multiply(a, b, bias_N, out, "forward")
        if not self.compiling:
            if self.turned_weight or second is not numerics.plan.dgrad[1]:
                numerics.weight.after_forward(weights, second.how.get(hold))
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

    def backward(self, dy_MN: torch.Tensor, saved: tuple, weight: tuple, dtype: torch.dtype) -> tuple:
        """(dx [M, K] in `dtype`, dw, db), None for what is not needed.

        saved: what `to_save` gave.  weight: the parameter, then what `forward` gave beside y.
        """
        numerics, compiling = self.numerics, torch.compiler.is_compiling()
        if not compiling:
            numerics.state.backward_seen = True
            numerics.weight.after_backward()
            if torch.is_grad_enabled():
                raise GradientError(
                    f"{numerics.name}: the gradient of an FP8 matmul has no gradient of its own; "
                    'for create_graph=True leave this layer in 16 bits (overrides={"name": "bf16"})'
                )
        hold, made, slot = holding(dy_MN, self.backend), {}, numerics.slot("grad_output", record=True)
        dx_MK = dw_NK = db_N = turned = None
        first, again = numerics.plan.dgrad[0], numerics.plan.wgrad[0]
        if self.needs_x:
            if self.turned_grad and self.needs_b:
                a, turned, db_N = ops.cast_transpose(dy_MN, first.how[None], slot, sums=True)
            elif self.turned_grad:
                a, turned = ops.cast_transpose(dy_MN, first.how[None], slot)
            else:
                a = operand(dy_MN, first, made, slot, hold)
            dx_MK = self._multiply(a, self._weight_for_dgrad(*weight), None, dtype, "dgrad")
            slot = numerics.slot("grad_output", False, count=False)
        if self.needs_w:
            a = operand(dy_MN, again, made, slot, hold).t() if turned is None else turned
            data, scale = saved
            b = data if self.groups is None else Operand(data, scale, *self.groups)
            dw_NK = self._multiply(a, b if self.turned_input else b.t(), None, weight[0].dtype, "wgrad")
        if self.needs_b:
            if db_N is None:
                db_N = dy_MN.sum(0, dtype=torch.float32) if compiling else column_sums(dy_MN)
            if db_N.dtype != self.bias_dtype:
                db_N = db_N.to(self.bias_dtype)
        return dx_MK, dw_NK, db_N

    def _weight_for_dgrad(self, weight_NK: torch.Tensor, codes, scale) -> Either:
        """The weight's transpose [K, N]: from forward where it waits, else cast now."""
        numerics = self.numerics
        slot = numerics.slot("weight", False, count=False)
        forward, dgrad = numerics.plan.forward[1], numerics.plan.dgrad[1]
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

    def _multiply(self, a, b, bias_N, out: torch.dtype, matmul: str) -> torch.Tensor:
        """One of the three matmuls, in FP8 where its operands are."""
        if isinstance(a, Operand):
            plan = self.numerics.plan
            return ops.matmul(a, b, bias_N, out, "exact" if plan.exact else plan.precision[matmul])
        y_MN = ops.matmul_fp16(a, b.to(a.dtype)).to(out)
        return y_MN if bias_N is None else y_MN + bias_N
