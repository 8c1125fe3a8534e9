"""RMSNorm and LayerNorm, with the FP8 codes of the result that the next matmuls read; and their backward.

    LayerNorm   mu[m] = mean_k x[m, k]    r[m] = 1 / sqrt(mean_k (x[m, k] - mu[m])^2 + eps)
    RMSNorm     mu[m] = 0                 r[m] = 1 / sqrt(mean_k x[m, k]^2 + eps)
    both        n[m, k] = (x[m, k] - mu[m]) * r[m]    y[m, k] = n[m, k] * w[k] + b[k]

    backward    g = dy * w    dx = r * (g - n * mean_k(g * n) [- mean_k(g), LayerNorm])
                dw[k] = sum_m dy[m, k] * n[m, k]      db[k] = sum_m dy[m, k]

A zero-centred gamma stores w - 1, so that weight decay pulls w towards 1.  All of it in FP32, whatever x's dtype, to
which y and dx are rounded; codes are those of the rounded y.
Sources: Ba, Kiros, Hinton 2016 (arXiv 1607.06450), LayerNorm; Zhang, Sennrich 2019 (arXiv 1910.07467), RMSNorm.
The twin of kernels/norm_quantize.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.ops.reference.cast_transpose import IN_16_BITS, Store, row_major, store
from fp8engine.ops.reference.operand import Operand

KINDS = ("rms", "layer")


class Norm(NamedTuple):
    """Which norm.  kind: "rms" or "layer".  zero_centered: the weight given is w - 1."""

    kind: str
    eps: float = 1e-5
    zero_centered: bool = False


class RowStatistics(NamedTuple):
    """What backward needs of each row, FP32 [M]: r, and mu (None for RMSNorm)."""

    rstd_M: torch.Tensor
    mean_M: torch.Tensor | None


class NormGradients(NamedTuple):
    """dx in x's dtype, dw and db in the weight's; dw is None without a weight, db for RMSNorm."""

    dx_MK: torch.Tensor
    dweight_K: torch.Tensor | None
    dbias_K: torch.Tensor | None


def norm_quantize(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    norm: Norm,
    to: Store = IN_16_BITS,
) -> tuple[torch.Tensor, Operand | None, Operand | None, RowStatistics]:
    """Return (y in x's dtype, its codes, those of its transpose, row statistics); codes are None where `to` asks none.

    x_MK: FP32, BF16 or FP16.  weight_K None: all ones; bias_K None: zeros.  ops/norm_act.py refuses what does not fit.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> y, _, _, rows = norm_quantize(x, torch.zeros(2), None, Norm("rms", eps=0.0, zero_centered=True))
    >>> y, rows.rstd_M
    (tensor([[0.8485, 1.1314]]), tensor([0.2828]))
    """
    x = x_MK.float()
    mean_M1 = x.mean(1, keepdim=True) if norm.kind == "layer" else None
    centred_MK = x if mean_M1 is None else x - mean_M1
    rstd_M1 = (centred_MK.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    y_MK = centred_MK * rstd_M1
    if weight_K is not None:
        y_MK.mul_(_gamma(weight_K, norm))
    if bias_K is not None:
        y_MK.add_(bias_K.float())
    rows = RowStatistics(rstd_M1[:, 0], None if mean_M1 is None else mean_M1[:, 0])
    return *store(y_MK, x_MK.dtype, to), rows


def norm_quantize_backward(
    dy_MK: torch.Tensor,
    x_MK: torch.Tensor,
    weight_K: torch.Tensor | None,
    rows: RowStatistics,
    norm: Norm,
) -> NormGradients:
    """Gradients of `norm_quantize`.

    dy_MK: any of x's dtypes.  rows: what forward returned.

    >>> x, norm = torch.tensor([[3.0, 4.0]]), Norm("rms", eps=0.0)
    >>> rows = norm_quantize(x, None, None, norm)[3]
    >>> dx = norm_quantize_backward(torch.tensor([[6.0, 8.0]]), x, None, rows, norm).dx_MK
    >>> bool(dx.abs().max() < 1e-6)  # y does not change with the length of x
    True
    """
    dy = dy_MK.float()
    rstd_M1 = rows.rstd_M[:, None]
    normed_MK = (x_MK.float() if rows.mean_M is None else x_MK.float() - rows.mean_M[:, None]) * rstd_M1
    g_MK = dy if weight_K is None else dy * _gamma(weight_K, norm)
    dx_MK = g_MK - normed_MK * (g_MK * normed_MK).mean(1, keepdim=True)
    if rows.mean_M is not None:
        dx_MK -= g_MK.mean(1, keepdim=True)
    dtype = x_MK.dtype if weight_K is None else weight_K.dtype
    dweight_K = None if weight_K is None else (dy * normed_MK).sum(0).to(dtype)
    dbias_K = None if rows.mean_M is None else dy.sum(0).to(dtype)
    return NormGradients(row_major(dx_MK.mul_(rstd_M1), x_MK.dtype), dweight_K, dbias_K)


def _gamma(weight_K: torch.Tensor, norm: Norm) -> torch.Tensor:
    return weight_K.float() + 1 if norm.zero_centered else weight_K.float()
