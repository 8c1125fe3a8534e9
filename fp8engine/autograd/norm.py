"""y = norm(x) in x's own dtype, for what no matmul alone reads: a norm after a residual is the next residual too.

Saved: x (store="fp8": its FP8 codes, a scale per row), 4 bytes a row of statistics (8 for LayerNorm), gamma.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine.autograd.linear import in_shape_of, matrix
from fp8engine.autograd.norm_linear import norm_in_16_bits
from fp8engine.autograd.parts import KEEP, Memory, NormOf, check_memory, keep, kept
from fp8engine.errors import UnknownName
from fp8engine.ops import norm_act
from fp8engine.ops.reference import RowStatistics, column_sums
from fp8engine.ops.reference.norm_quantize import KINDS


def norm(x: torch.Tensor, of: NormOf, memory: Memory = KEEP) -> torch.Tensor:
    """norm(x), x [..., K], in x's dtype.  memory.store: how x is kept; with "16 bits" it is torch's own norm.

    Raises UnknownName for a norm or a store.

    >>> from fp8engine.ops.reference import Norm
    >>> norm(torch.tensor([[2.0, -2.0]]), NormOf(Norm("rms", eps=0.0), None), Memory(store="fp8"))
    tensor([[ 1., -1.]])
    """
    check_memory(memory)
    if of.norm.kind not in KINDS:
        raise UnknownName("norm", of.norm.kind, KINDS)
    if memory.store == "16 bits":
        return norm_in_16_bits(x, of)
    return _Norm.apply(x, of.weight_K, of.bias_K, of.norm, memory)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma_K, beta_K, which, memory: Memory):
        y: Any
        y, _, rows = norm_act.norm_quantize(matrix(x), gamma_K, beta_K, which)
        ctx.save_for_backward(*keep(matrix(x), memory), gamma_K, *rows)
        ctx.which, ctx.dtype = which, x.dtype
        ctx.beta_dtype = None if beta_K is None else beta_K.dtype
        return in_shape_of(x, y)

    @staticmethod
    def backward(ctx, dy):
        data, scale, gamma_K, *rows = ctx.saved_tensors
        dy_MK, x_MK = matrix(dy), kept(data, scale, ctx.dtype)
        found: Any = norm_act.norm_quantize_backward(dy_MK, x_MK, gamma_K, RowStatistics(*rows), ctx.which)
        dbeta_K = None
        if ctx.beta_dtype is not None:  # RMSNorm has no beta of its own
            dbeta_K = (column_sums(dy_MK) if found.dbias_K is None else found.dbias_K).to(ctx.beta_dtype)
        return found.dx_MK.view(dy.shape), found.dweight_K, dbeta_K, None, None
