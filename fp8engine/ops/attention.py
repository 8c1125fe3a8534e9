"""Attention in FP8 as operations, forward and backward.

Signatures and results are those of the twins in reference/.  The kernels run where casts run on Triton (`choose` in
casts.py); elsewhere the twin does, which is exact and slow.

>>> q, v = torch.zeros(1, 1, 1, 64), torch.eye(64)[None, None, :2]
>>> attention(q, v, v, Form(0.125))[0, 0, 0, :3]
tensor([0.5000, 0.5000, 0.0000])
"""

from __future__ import annotations

import torch

from fp8engine.errors import ShapeError
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops import device
from fp8engine.ops.casts import twin
from fp8engine.ops.library import operation, refuse_gradient
from fp8engine.ops.reference.attention import HEAD_DIMS, TINY, Form
from fp8engine.ops.reference.attention_backward import Gradients

__all__ = ["attention", "attention_backward", "unsupported"]


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> str | None:
    """Why these are not multiplied in FP8 with that scale of the scores, or None when they are.

    >>> unsupported(*[torch.ones(1, 1, 2, 80)] * 3, scale=0.1)
    'heads of 80 columns; FP8 attention takes 64, 96 or 128'
    """
    if q.is_nested or k.is_nested or v.is_nested:
        return "nested tensors; FP8 attention takes plain ones"
    shapes = [list(x.shape) for x in (q, k, v)]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return f"q, k and v are {shapes}; FP8 attention takes [batch, heads, T, D]"
    if q.shape[3] not in HEAD_DIMS:
        return f"heads of {q.shape[3]} columns; FP8 attention takes 64, 96 or 128"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1):
        return f"q, k and v are {shapes}; FP8 attention takes one head dim, and heads that share those of k evenly"
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        return (
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; FP8 attention takes one of float32, bfloat16, float16"
        )
    if not TINY <= scale <= 1 / TINY:  # 0 and Inf make NaN of a masked score's -Inf, a sign +Inf
        return f"a scale of {scale:g} for the scores; FP8 attention takes 2^-126 to 2^126"
    return None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
    """softmax(q k^T) v [B, T, H, D] in q's dtype, of q [B, H, T, D] and k, v [B, heads of k, S, D] cast to E4M3.

    A query that sees no key gives zeros.  Raises ShapeError for what `unsupported` names, BackendError for tensors on
    several devices.  Sources: arXiv 2407.08608, section 3.3.
    """
    if reason := unsupported(q, k, v, form.scale):
        raise ShapeError(f"attention: {reason}; use torch's scaled_dot_product_attention")
    device.check_one("attention", q, k=k, v=v)
    return _attention(q, k, v, *form)


def attention_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> Gradients:
    """Gradients of `attention`: dq [B, T, H, D], dk and dv [B, S, heads of k, D].  do [B, H, T, D].

    do v^T is in FP8, the other products in 16 bits (FP32 is rounded to BF16).  Of what `attention` has taken, and do of
    q's shape and dtype: a Function calls it (autograd/fp8_attention.py).
    """
    return Gradients(*_backward(do, q, k, v, *form))


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Memory of a result [B, T, H, D] for an x [B, H, T, D]."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3])


FORM = "float scale, bool causal, SymInt window, SymInt offset, bool rotated"


@operation(f"attention(Tensor q, Tensor k, Tensor v, {FORM}) -> Tensor", lambda q, *rest: _turned(q))
def _attention(q, k, v, *form):
    if not q.numel() or not k.numel():  # no query, or none that sees a key
        return _turned(q).zero_()
    return twin(q.device).attention(q, k, v, Form(*form))


@operation(
    f"attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, {FORM}) -> (Tensor, Tensor, Tensor)",
    lambda do, q, k, v, *form: tuple(map(_turned, (q, k, v))),
)
def _backward(do, q, k, v, *form):
    if not q.numel() or not k.numel():
        return tuple(_turned(x).zero_() for x in (q, k, v))
    return tuple(twin(q.device).attention_backward(do, q, k, v, Form(*form)))


refuse_gradient("attention", "attention_backward")
