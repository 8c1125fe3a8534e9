"""Linear layer under torch.func's grad, vjp and value_and_grad, by Functions with a `setup_context`.

    forward    y = _Transformed(x, w, b)          the FP8 operands wait in a `Pending`, which no transform unwraps
    backward   dx, dw, db = _Gradients(dy)        a Function too: torch.func then gives both of them plain tensors

torch.func has no ctx.needs_input_grad in forward: all three gradients are prepared, and computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8engine.autograd.call import Call
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.refusals import no_transform


@dataclass
class Pending:
    """Arguments of one forward beside its tensors, and the gradients' function, which it leaves for its backward."""

    numerics: Numerics
    out: torch.dtype
    record: bool
    gradients: Any = None


def linear_transformed(x_MK, weight_NK, bias_N, numerics: Numerics, out: torch.dtype, record: bool) -> torch.Tensor:
    """y [M, N]; raises GradientError, naming the layer, for the transforms that it does not take."""
    return _Transformed.apply(x_MK, weight_NK, bias_N, Pending(numerics, out, record))


class _Named(torch.autograd.Function):
    """Base of Functions without a rule for vmap and forward mode: the error names the layer, of the last argument."""

    @staticmethod
    def vmap(info, in_dims, *args):
        raise no_transform(args[-1].numerics.name, "torch.func.vmap, nor what uses it (jacrev, jacfwd, hessian)")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.pending = inputs[-1]

    @staticmethod
    def jvp(ctx, *tangents):
        raise no_transform(ctx.pending.numerics.name, "forward-mode AD (torch.func.jvp, jacfwd, hessian)")


class _Transformed(_Named):
    @staticmethod
    def forward(x_MK, weight_NK, bias_N, pending: Pending):
        needs = (pending.record, pending.record, pending.record and bias_N is not None)
        call = Call(pending.numerics, x_MK, weight_NK, bias_N, needs, pending.record)
        call.apart = pending.numerics.state.on_step is not None
        a, kept = call.cast_input(x_MK, {})
        y_MN, transposed = call.forward(a, weight_NK, bias_N, pending.out)
        saved, weight, dtype = call.to_save(kept), (weight_NK, *transposed), x_MK.dtype

        def gradients(dy_MN: torch.Tensor) -> tuple:
            with call.as_asked():
                return call.backward(dy_MN, saved, weight, dtype)

        pending.gradients = gradients
        return y_MN

    @staticmethod
    def backward(ctx, dy_MN):
        return *_Gradients.apply(dy_MN, ctx.pending), None


class _Gradients(_Named):
    @staticmethod
    def forward(dy_MN, pending: Pending):
        return pending.gradients(dy_MN)

    @staticmethod
    def backward(ctx, *_):
        raise no_transform(ctx.pending.numerics.name, "a second derivative (grad of grad)")
