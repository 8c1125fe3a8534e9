"""Norm in x's own dtype, for a residual that reads it beside a matmul; the gradients that every norm here uses.

Saved: x (store="fp8": its FP8 codes, a scale per row), 4 bytes a row of statistics (8 for LayerNorm), gamma.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine.autograd.linear import in_shape_of, matrix
from fp8engine.autograd.parts import KEEP, Memory, NormOf, check_memory, keep, kept
from fp8engine.errors import UnknownName
from fp8engine.ops import norm_act
from fp8engine.ops.reference import Norm, RowStatistics, column_sums
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


def norm_in_16_bits(x: torch.Tensor, norm: NormOf) -> torch.Tensor:
    """The norm as torch computes it, in x's dtype; through FP32 where its parameters have another."""
    (kind, eps, zero_centered), weight_K, bias_K = norm
    if kind not in KINDS:
        raise UnknownName("norm", kind, KINDS)
    given = [parameter for parameter in (weight_K, bias_K) if parameter is not None]
    wide = zero_centered or any(parameter.dtype != x.dtype for parameter in given)
    values = x.float() if wide else x
    weight_K, bias_K = (p.float() if wide and p is not None else p for p in (weight_K, bias_K))
    if zero_centered and weight_K is not None:
        weight_K = weight_K + 1
    if kind == "layer":
        n = torch.nn.functional.layer_norm(values, x.shape[-1:], weight_K, bias_K, eps)
    else:
        n = torch.nn.functional.rms_norm(values, x.shape[-1:], weight_K, eps)
        n = n if bias_K is None else n + bias_K
    return n.to(x.dtype)


def norm_gradients(
    dn_MK: torch.Tensor, x_MK: torch.Tensor, gamma_K, rows: RowStatistics, norm: Norm, beta_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx [M, K], dgamma, dbeta) of norm(x); beta_dtype None: it has no beta."""
    found: Any = norm_act.norm_quantize_backward(dn_MK, x_MK, gamma_K, rows, norm)
    dbeta_K = None
    if beta_dtype is not None:  # RMSNorm has no beta of its own
        dbeta_K = (column_sums(dn_MK) if found.dbias_K is None else found.dbias_K).to(beta_dtype)
    return found.dx_MK, found.dweight_K, dbeta_K


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gamma_K, beta_K, which, memory: Memory):
        y: Any
        y, _, _, rows = norm_act.norm_quantize(matrix(x), gamma_K, beta_K, which)
        ctx.save_for_backward(*keep(matrix(x), memory), gamma_K, *rows)
        ctx.which, ctx.dtype = which, x.dtype
        ctx.beta_dtype = None if beta_K is None else beta_K.dtype
        return in_shape_of(x, y)

    @staticmethod
    def backward(ctx, dy):
        data, scale, gamma_K, *rows = ctx.saved_tensors
        rows = RowStatistics(*rows)
        dx_MK, *own = norm_gradients(matrix(dy), kept(data, scale, ctx.dtype), gamma_K, rows, ctx.which, ctx.beta_dtype)
        return dx_MK.view(dy.shape), *own, None, None
