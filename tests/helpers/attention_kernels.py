"""Attention in FP8 by its kernels, from queries, keys and values: casts, then forward or backward."""

import torch

from fp8engine.kernels.attention import attention
from fp8engine.kernels.attention_backward import attention_backward
from fp8engine.kernels.attention_cast import attention_cast
from fp8engine.ops.reference.attention import LOG2_E, Form, factor_of, halved, rotation_of, width_of


def cast(x: torch.Tensor, rotated: bool, transposed: bool = False):
    """(codes, scale) of x [batch, heads, rows, D]."""
    width = width_of(x.shape[-1])
    rotation = rotation_of(width, halved(x[:0]).dtype, x.device) if rotated else None
    return attention_cast(x, rotation, width, transposed)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
    """The result."""
    d = q.shape[-1]
    parts = cast(q, form.rotated), cast(k, form.rotated), cast(v, False, True)
    return attention(*parts, form, factor_of(form, d), (q.shape[2], k.shape[2], d), q.dtype)


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, form: Form):
    """(dq, dk, dv)."""
    rows = cast(do, form.rotated), cast(v, form.rotated)
    return attention_backward(do, q, k, *rows, form, form.scale * LOG2_E)
