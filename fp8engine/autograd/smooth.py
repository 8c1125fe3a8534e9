"""Linear layer that shares the outliers of its input's channels with its weight's columns.

    s_k = 2^floor(log2(amax_k) / 2)       amax_k = max over tokens of |x_tk|; s_k = 1 where that is 0, Inf or NaN
    y   = cast(x / s) @ cast(w * s)^T + b
    dx  = (dy @ cast(w * s)) / s          dw = (dy^T @ cast(x / s)) * s

In real arithmetic all of it is y = x w^T + b and its gradients.  s is made of the call's own x on its device, is the
same in forward and backward, and takes no gradient; as a power of two it rounds nothing in FP32 and BF16 (in FP16 only
elements of x / s below 2^-14).  The casts, their slots and their statistics see x / s and w * s.

Smooth-SwiGLU (arXiv 2409.12517) divides by all of amax_k, which moves the whole outlier into a column of the weight;
the weight's other columns are then as far below its scale as x's other channels were.  Here half of the octaves go
there, as SmoothQuant shares them (arXiv 2211.10438, alpha = 0.5): a channel 2^16 times the others is 2^8 times them in
x / s, and its column 2^8 times the others in w * s.  Of E4M3's normal numbers the largest is 2^15 times the smallest.

Saved for backward: what linear.py names, and s [K].  w * s is made again.
"""

from __future__ import annotations

import torch

from fp8engine.autograd.features import SMOOTH
from fp8engine.autograd.linear import begin, gradients, in_16_bits, in_shape_of
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import Use, input_pair, matrix, plain, resumed, transposed, use_of, weight_pair
from fp8engine.autograd.ready import suited
from fp8engine.ops.backends import running_on
from fp8engine.ops.reference import Operand
from fp8engine.ops.tensor import Float8Tensor

MANTISSA, BIAS = 23, 127  # of FP32: bits of the mantissa, and what the exponent's field has added


class Smooth:
    """The feature.  All are equal: it has no state."""

    names = (SMOOTH,)

    def run(self, x: torch.Tensor, weight_NK: torch.Tensor, bias_N, numerics: Numerics) -> torch.Tensor:
        """`linear` of a layer that is smoothed."""
        begun = begin(x, weight_NK, bias_N, numerics)
        if isinstance(x, Float8Tensor):
            x = suited(x, numerics, begun.compiling, why="it is smoothed before its cast")
        if not numerics.recipe.is_fp8:
            read = lambda x_MK, weight_NK: smoothed(x_MK, weight_NK, scales(x_MK))  # noqa: E731 - what FP8 would read
            return in_16_bits(x, weight_NK, bias_N, numerics, begun, read)
        use = use_of(numerics, x, weight_NK, bias_N, begun.compiling)
        return _Smoothed.apply(x, weight_NK, bias_N, use, begun.out)


def scales(x_MK: torch.Tensor) -> torch.Tensor:
    """s [K] in FP32.

    >>> scales(torch.tensor([[0.0, -1.0, 4.0, 1.0], [0.0, 0.5, -70.0, torch.inf]]))
    tensor([1., 1., 8., 1.])
    """
    if not len(x_MK):
        return torch.ones(x_MK.shape[1], device=x_MK.device)
    x_MK = x_MK.detach()
    amax_K = torch.maximum(x_MK.amax(0), -x_MK.amin(0)).float()
    exponent_K = (amax_K.view(torch.int32) >> MANTISSA) - BIAS
    s_K = (((exponent_K >> 1) + BIAS) << MANTISSA).view(torch.float32)
    return torch.where((amax_K > 0) & (amax_K < torch.inf), s_K, 1.0)


def smoothed(x_MK: torch.Tensor, weight_NK: torch.Tensor, s_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / s in x's dtype, w * s in the weight's, or FP32 for FP16, whose range it may leave)."""
    return x_MK * s_K.reciprocal().to(x_MK.dtype), _times(weight_NK, s_K)


def _times(weight_NK: torch.Tensor, s_K: torch.Tensor) -> torch.Tensor:
    dtype = _wide(weight_NK.dtype)
    return weight_NK.to(dtype) * s_K.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype that a product with s does not leave: FP32 for FP16."""
    return torch.float32 if dtype == torch.float16 else dtype


class _Smoothed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, bias_N, use: Use, out: torch.dtype):
        x_MK = matrix(x)
        s_K, (first, second) = scales(x_MK), (use.recipe.forward[0], use.recipe.wgrad[1])
        divided_MK, weight_s_NK = smoothed(x_MK, weight_NK, s_K)
        a, kept, ctx.is_transposed = input_pair(use, divided_MK, {})
        b, codes, ctx.copies = weight_pair(use, weight_s_NK)
        y_MN = use.numerics.result(use, a or plain(divided_MK, first), b, bias_N, out)
        kept = kept or (plain(divided_MK, second) if use.needs_w else None)
        data, scale, *ctx.groups = kept if isinstance(kept, Operand) else (kept, None)
        ctx.save_for_backward(data, scale, weight_NK, s_K, *codes)
        ctx.use, ctx.x_like = use, (x.shape, x.dtype)
        return in_shape_of(x, y_MN)

    @staticmethod
    def backward(ctx, dy):
        data, scale, weight_NK, s_K, *codes = ctx.saved_tensors  # read once, as in _Linear
        use, copies, (shape, dtype) = resumed(ctx.use, dy), {}, ctx.x_like
        if not use.where.compiling:
            copies, ctx.copies = ctx.copies, {}  # taken out, as in _Linear
        kept = Operand(data, scale, *ctx.groups) if ctx.groups else data
        if kept is not None and not ctx.is_transposed:
            kept = transposed(kept)
        weight = (_times(weight_NK, s_K), codes, copies)
        with running_on(use.where.asked):
            dx_MK, dw_NK, db_N = gradients(use, matrix(dy), kept, weight, (_wide(dtype), weight[0].dtype))
        if dx_MK is not None:
            dx_MK = (dx_MK * s_K.reciprocal().to(dx_MK.dtype)).to(dtype).view(shape)
        if dw_NK is not None:
            dw_NK = (dw_NK * s_K.to(dw_NK.dtype)).to(weight_NK.dtype)
        return dx_MK, dw_NK, db_N, None, None
