"""Linear layer on a weight that is stored as FP8 codes and never changes: gradients of its input and of its bias.

    forward   y[M, N]  = X[M, K]    @ (C[N, K] * s)^T + b     X: x under the recipe's cast, or under a given scale
    dgrad     dx[M, K] = DY[M, N]   @ (C * s)                 the codes of forward; no 16-bit weight, no second rounding

Nothing of x is saved, since there is no wgrad.  Scales per row, s[N], lie along what dgrad sums, where Tensor Cores
apply none: dy is multiplied by them in FP32 before its cast, and C is multiplied without.  Those of blocks of one row,
1x32, would change with every value that dgrad sums: C * s is cast again under the recipe's own cast for dgrad, which
under powers of two rounds only what is subnormal in one of the casts.  Kernels read operands along what they sum, so
dgrad copies the codes once, transposed: a byte a weight, for the one call.
"""

from __future__ import annotations

import math

import torch

from fp8engine.autograd.linear import in_shape_of
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import matrix
from fp8engine.autograd.refusals import batched, not_one_gradient
from fp8engine.ops import casts, matmul
from fp8engine.ops.reference import Operand, column_sums


def frozen_linear(
    x: torch.Tensor, weight: Operand, bias_N: torch.Tensor | None, numerics: Numerics, given: torch.Tensor | None
) -> torch.Tensor:
    """x [..., K] times a stored weight [N, K] plus a bias [N]: [..., N] in x's dtype, or autocast's where that is on.

    given: FP32 scale of x; None: x's own amax decides.
    """
    out = x.dtype
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        out = torch.get_autocast_dtype(x.device.type)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        recipe, sizes = numerics.recipe, (math.prod(x.shape[:-1]), *weight.data.shape)
        numerics.ran = matmul.choose(
            x.device, recipe.by_block, sizes, recipe.precision["forward"], numerics.kind, bias_N is not None
        )
    wants = x.requires_grad or (bias_N is not None and bias_N.requires_grad)
    if torch.is_grad_enabled() and wants:
        return _Frozen.apply(x, bias_N, weight, given, numerics, out, compiling)
    return in_shape_of(x, _forward(matrix(x), weight, bias_N, given, numerics, out))


def _forward(x_MK, weight: Operand, bias_N, given, numerics: Numerics, out: torch.dtype) -> torch.Tensor:
    slot, cast = numerics.slot("input", record=True), numerics.recipe.forward[0]
    with torch.no_grad():
        if given is None:
            a = casts.quantize(x_MK, cast, slot)
        else:
            a = casts.quantize_given(x_MK, cast, given)
            slot.counts_CS[:2, slot.index] += torch.tensor([1, x_MK.numel()], device=slot.counts_CS.device)
        bias_N = None if bias_N is None else bias_N.detach()
        return matmul.matmul(a, weight, bias_N, out, numerics.recipe.precision["forward"])


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias_N, *given):
        weight, given_scale, numerics, out, ctx.compiling = given
        # Of no size that counts: the layer's own codes, here so that a change of them before backward is an error.
        ctx.save_for_backward(weight.data, weight.scale)
        ctx.groups, ctx.numerics = weight[2:], numerics
        ctx.x_like, ctx.bias_dtype = (x.shape, x.dtype), None if bias_N is None else bias_N.dtype
        return in_shape_of(x, _forward(matrix(x), weight, bias_N, given_scale, numerics, out))

    @staticmethod
    def backward(ctx, dy):
        numerics, (shape, dtype) = ctx.numerics, ctx.x_like
        if not ctx.compiling and (torch.is_grad_enabled() or batched(dy)):
            raise not_one_gradient(numerics.name)
        dy_MN, dx, db_N = matrix(dy), None, None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(dy_MN, Operand(*ctx.saved_tensors, *ctx.groups), numerics, dtype).view(shape)
        if ctx.needs_input_grad[1]:
            db_N = column_sums(dy_MN).to(ctx.bias_dtype)
        return dx, db_N, *[None] * 5


def _input_gradient(dy_MN: torch.Tensor, weight: Operand, numerics: Numerics, dtype: torch.dtype) -> torch.Tensor:
    cast, slot = numerics.recipe.dgrad[0], numerics.slot("grad_output", record=True)
    if weight.rows == 1 and weight.cols == -1:
        dy_MN = dy_MN.float() * weight.scale.t()
        b = Operand(weight.data.t(), torch.ones((), device=weight.data.device), power_of_2=True)
    elif weight.rows == 1:
        # No `folded`, which Dynamo does not trace, nor a slice of repeated columns, which Inductor reads out of bounds.
        blocks = torch.arange(weight.data.shape[1], device=weight.data.device) // weight.cols
        values = casts.decode(weight.data, torch.bfloat16) * weight.scale[:, blocks].to(torch.bfloat16)
        b = casts.quantize(values, numerics.recipe.dgrad[1]).t()
    else:
        b = weight.t()
    return matmul.matmul(casts.quantize(dy_MN, cast, slot), b, None, dtype, numerics.recipe.precision["dgrad"])
