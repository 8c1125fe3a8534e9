"""Attention with FP8 products as an autograd Function.

    o = softmax(scale q k^T) v       forward: q k^T and P v in FP8; backward: dO V^T in FP8, the others in 16 bits

Saved: q, k and v; neither o nor statistics, which the backward finds anew (ops/reference/attention_backward.py).
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from fp8engine.autograd.refusals import BATCH, batched
from fp8engine.errors import GradientError
from fp8engine.ops import attention
from fp8engine.ops.backends import asked, running_on
from fp8engine.ops.reference.attention import Form


def fp8_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
    """[B, H, T, D] of q [B, H, T, D] and k, v [B, heads of k, S, D], with gradients; in q's dtype.

    form: the scale of the scores; which keys a query sees; whether q and k are rotated before their cast.
    Raises ShapeError for what `fp8engine.ops.attention.unsupported` names.

    >>> q = torch.randn(1, 2, 5, 64, requires_grad=True)
    >>> o = fp8_attention(q, q, q, Form(0.125, causal=True))
    >>> o.sum().backward()
    >>> o.shape, q.grad.shape
    (torch.Size([1, 2, 5, 64]), torch.Size([1, 2, 5, 64]))
    """
    return _Attention.apply(q, k, v, form).transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.form, ctx.asked = form, None if torch.compiler.is_compiling() else asked()
        return attention.attention(q, k, v, form)

    @staticmethod
    @once_differentiable
    def backward(ctx, do: torch.Tensor):
        if not torch.compiler.is_compiling() and batched(do):
            raise GradientError(
                f"attention in FP8 does not take {BATCH}: fe.Heads(..., softmax='16 bits'), or fe.convert without "
                "attention=, leaves it in 16 bits"
            )
        with running_on(ctx.asked):
            q, k, v = ctx.saved_tensors
            found = attention.attention_backward(do.to(q.dtype).transpose(1, 2), q, k, v, ctx.form)
        return *(x.transpose(1, 2) for x in found), None
