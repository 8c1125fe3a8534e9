"""y = x @ w.T + b with each of its three matmuls in the precision its recipe asks for.

    forward   y[M, N]  = X[M, K]  @ W[N, K]^T + b        X, W reduced along -1
    dgrad     dx[M, K] = DY[M, N] @ (W^T)[K, N]^T        W cast along 0
    wgrad     dw[N, K] = (DY^T)[N, M] @ (X^T)[K, M]^T    DY, X cast along 0;  db = sum of dy over rows

M is the product of x's leading dimensions.  Saved for backward: X as FP8 codes in the orientation wgrad reads
(or in 16 bits where wgrad is), its scale, and the parameter itself.  What the 16-bit alternative keeps, x, is not.
A weight that needs no gradient saves no X; an x that needs none spends no dgrad.
"""

from __future__ import annotations

import contextlib
import math

import torch

from fp8engine import ops
from fp8engine.dispatch import asked, inherited
from fp8engine.errors import GradientError, ShapeError, UnsupportedDtype
from fp8engine.functional.numerics import Numerics, both, holding, operand
from fp8engine.reference import Operand
from fp8engine.scaling import in_backward

ON_CODES = ("triton", "cublas")  # backends that multiply FP8 codes, both operands lying along what is summed
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, numerics: Numerics) -> torch.Tensor:
    """x [..., K] times a weight [N, K] plus a bias [N]; [..., N] in x's dtype, or autocast's where that is on.

    Raises ShapeError (with nn.Linear's words) and UnsupportedDtype, both naming the layer.
    """
    check(x, weight_NK, numerics.name)
    out = x.dtype
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        out = torch.get_autocast_dtype(x.device.type)
    elif weight_NK.dtype != x.dtype:
        raise UnsupportedDtype(
            f"{numerics.name}: input is {x.dtype} and weight is {weight_NK.dtype}; "
            "cast one of them, or run under autocast"
        )
    compiling = torch.compiler.is_compiling()
    if not numerics.plan.fp8:
        return _high_precision(x, weight_NK, bias_N, numerics.recipe.input.format.dtype, out)
    if not compiling:
        numerics.state.enter()
        numerics.ran = ops.choose(x.device, numerics.plan.by_block, (x.numel() // max(x.shape[-1], 1), len(weight_NK)))
    elif numerics.alone:
        numerics.state.begin_step()
    record = torch.is_grad_enabled() or (not compiling and in_backward())
    return _Linear.apply(x, weight_NK, bias_N, numerics, out, record)


def check(x: torch.Tensor, weight_NK: torch.Tensor, name: str) -> None:
    """Raise for an input that no recipe takes."""
    if x.dtype not in FLOATS or x.layout != torch.strided:
        raise UnsupportedDtype(
            f"{name}: input is {x.dtype}, {x.layout}; FP8 casts take dense float32, bfloat16 or float16: "
            "convert it first"
        )
    if weight_NK.dtype not in FLOATS:
        raise UnsupportedDtype(f"{name}: weight is {weight_NK.dtype}; FP8 casts take float32, bfloat16 or float16")
    if x.dim() == 0 or x.shape[-1] != weight_NK.shape[1]:
        rows = x.numel() // max(x.shape[-1], 1) if x.dim() else 1
        cols = x.shape[-1] if x.dim() else 0
        raise ShapeError(
            f"{name}: mat1 and mat2 shapes cannot be multiplied "
            f"({rows}x{cols} and {weight_NK.shape[1]}x{weight_NK.shape[0]}): in_features is {weight_NK.shape[1]}"
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, bias_N, numerics: Numerics, out: torch.dtype, record: bool):
        first, second = numerics.plan.forward
        saves = ctx.needs_input_grad[1]
        x_MK = _matrix(x)
        kept, weights = numerics.kept_of_input(x), numerics.kept_of_weight(weight_NK)
        to_save = numerics.plan.wgrad[1]
        backend = None if torch.compiler.is_compiling() else numerics.ran
        # A matmul on FP8 codes reads both operands along K: x is transposed for wgrad in the pass that casts it.
        ctx.turned = saves and backend in ON_CODES and numerics.plan.input_serves_both
        if ctx.turned:
            a, saved = both(x_MK, first, kept, numerics.slot("input", record))
        else:
            hold = None if saves and to_save is first else holding(x_MK, backend)
            a = saved = operand(x_MK, first, kept, numerics.slot("input", record), hold)
        b = operand(weight_NK, second, weights, numerics.slot("weight", record), holding(weight_NK, backend))
        y_MN = _multiply(a, b, bias_N, out, numerics, "forward")

        data = scale = ctx.groups = None
        if saves:
            if not ctx.turned and to_save is not first:
                saved = operand(x_MK, to_save, kept, numerics.slot("input", False, count=False))
            if isinstance(saved, Operand):
                data, scale, *ctx.groups = saved
            else:
                data = saved
        ctx.save_for_backward(data, scale, weight_NK)
        ctx.numerics, ctx.weights, ctx.x_like = numerics, weights, (x.shape, x.dtype)
        ctx.backend, ctx.asked = backend, None if torch.compiler.is_compiling() else asked()
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        return y_MN.view(*x.shape[:-1], weight_NK.shape[0])

    @staticmethod
    def backward(ctx, dy):
        if ctx.asked is None:
            return _Linear.gradients(ctx, dy)
        with inherited(ctx.asked):
            return _Linear.gradients(ctx, dy)

    @staticmethod
    def gradients(ctx, dy):
        """Gradients of x, the weight and the bias."""
        numerics: Numerics = ctx.numerics
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        data, scale, weight_NK = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            numerics.state.backward_seen = True
            if torch.is_grad_enabled():
                raise GradientError(
                    f"{numerics.name}: the gradient of an FP8 matmul has no gradient of its own; "
                    'for create_graph=True leave this layer in 16 bits (overrides={"name": "bf16"})'
                )
        dy_MN = _matrix(dy)
        hold, made, slot = holding(dy_MN, ctx.backend), {}, numerics.slot("grad_output", record=True)
        dx = dw_NK = db_N = None
        turned = None
        if needs_x:
            first, second = numerics.plan.dgrad
            shape, dtype = ctx.x_like
            if needs_w and ctx.backend in ON_CODES and numerics.plan.grad_serves_both:
                a, turned = both(dy_MN, first, made, slot)
            else:
                a = operand(dy_MN, first, made, slot, hold)
            weights = {} if torch.compiler.is_compiling() else ctx.weights  # a graph keeps nothing
            b = operand(
                weight_NK, second, weights, numerics.slot("weight", False, count=False), holding(weight_NK, ctx.backend)
            )
            dx = _multiply(a, b.t(), None, dtype, numerics, "dgrad").view(shape)
            slot = numerics.slot("grad_output", False, count=False)
        if needs_w:
            first, _ = numerics.plan.wgrad
            a = operand(dy_MN, first, made, slot, hold).t() if turned is None else turned
            b = data if ctx.groups is None else Operand(data, scale, *ctx.groups)
            dw_NK = _multiply(a, b if ctx.turned else b.t(), None, weight_NK.dtype, numerics, "wgrad")
        if needs_b:
            db_N = dy_MN.sum(0, dtype=torch.float32)
            if db_N.dtype != ctx.bias_dtype:
                db_N = db_N.to(ctx.bias_dtype)
        return dx, dw_NK, db_N, None, None, None


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """x with its leading dimensions as rows; their product is spelt out because -1 is ambiguous beside a 0."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _multiply(a, b, bias_N, out: torch.dtype, numerics: Numerics, matmul: str) -> torch.Tensor:
    """One of the three matmuls, in FP8 where its operands are."""
    if isinstance(a, Operand):
        precision = "exact" if numerics.plan.exact else numerics.plan.precision[matmul]
        return ops.matmul(a, b, bias_N, out, precision)
    y_MN = ops.matmul_fp16(a, b.to(a.dtype)).to(out)
    return y_MN if bias_N is None else y_MN + bias_N


def _high_precision(x, weight_NK, bias_N, dtype: torch.dtype, out: torch.dtype) -> torch.Tensor:
    """nn.Linear with its operands in `dtype`: what a recipe without FP8 means."""
    bias_N = None if bias_N is None else bias_N.to(dtype)
    if (
        dtype.itemsize == 2
        and ops.choose_16_bits(x.device, (x.numel() // max(x.shape[-1], 1), len(weight_NK))) != "torch"
    ):
        y_MN = ops.matmul_fp16(_matrix(x).to(dtype), weight_NK.to(dtype), bias_N)
        return y_MN.view(*x.shape[:-1], len(weight_NK)).to(out)
    with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x.to(dtype), weight_NK.to(dtype), bias_N).to(out)
