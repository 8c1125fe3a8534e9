"""y = x @ w.T + b with each of its three matmuls in the precision its recipe asks for.

    forward   y[M, N]  = X[M, K]  @ W[N, K]^T + b        X, W reduced along -1
    dgrad     dx[M, K] = DY[M, N] @ (W^T)[K, N]^T        W cast along 0
    wgrad     dw[N, K] = (DY^T)[N, M] @ (X^T)[K, M]^T    DY, X cast along 0;  db = sum of dy over rows

M is the product of x's leading dimensions.  Saved for backward: X as FP8 codes in the orientation wgrad reads
(or in 16 bits where wgrad is), its scale, and the parameter itself.  What the 16-bit alternative keeps, x, is not.
A weight that needs no gradient saves no X; an x that needs none spends no dgrad.

A matmul on FP8 codes reads both operands along what is summed.  So x is transposed for wgrad, dy for wgrad and the
weight for dgrad in the pass that casts them, and the sums of dy's columns are db.
"""

from __future__ import annotations

import contextlib
import math

import torch

from fp8engine import device, ops
from fp8engine.dispatch import asked, inherited
from fp8engine.errors import GradientError, ShapeError, UnsupportedDtype
from fp8engine.functional.numerics import Numerics, both, holding, operand, plain, transpose
from fp8engine.reference import Operand, column_sums
from fp8engine.scaling import in_backward

ON_CODES = ("triton", "cublas")  # backends that multiply FP8 codes, both operands lying along what is summed
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, numerics: Numerics) -> torch.Tensor:
    """x [..., K] times a weight [N, K] plus a bias [N]; [..., N] in x's dtype, or autocast's where that is on.

    Raises ShapeError (with nn.Linear's words), UnsupportedDtype and BackendError (several devices), naming the layer.
    """
    check(x, weight_NK, bias_N, numerics.name)
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


def check(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, name: str) -> None:
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
    device.check_one(name, x, weight=weight_NK, bias=bias_N)


def graphs_run_on(where: torch.device) -> str | None:
    """A backend of the kind that a compiled graph, which chooses when it runs, will choose there; None: any."""
    return "cublas" if where.type == "cuda" else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, bias_N, numerics: Numerics, out: torch.dtype, record: bool):
        first, second = numerics.plan.forward
        saves = ctx.needs_input_grad[1]
        x_MK = _matrix(x)
        kept, weights = numerics.kept_of_input(x), numerics.kept_of_weight(weight_NK, record)
        to_save, for_dgrad = numerics.plan.wgrad[1], numerics.plan.dgrad[1]
        backend = graphs_run_on(x.device) if torch.compiler.is_compiling() else numerics.ran
        ctx.turned = saves and backend in ON_CODES and numerics.plan.input_serves_both
        ctx.turned_weight = backend in ON_CODES and numerics.plan.weight_serves_both
        if ctx.turned:
            a, saved = both(x_MK, first, kept, numerics.slot("input", record))
        else:
            hold = None if saves and to_save is first else holding(x_MK, backend)
            a = saved = operand(x_MK, first, kept, numerics.slot("input", record), hold)
        slot, hold = numerics.slot("weight", record), holding(weight_NK, backend)
        compiling, turned = torch.compiler.is_compiling(), (None, None)
        holds = ctx.needs_input_grad[0] and (numerics.weight.holds if plain(weight_NK) else compiling)
        if ctx.turned_weight and holds:
            b, b_t = both(weight_NK, second, weights, slot)
            turned = b_t[:2] if compiling else turned  # a graph saves it; else it waits in `weights`, for others too
        else:
            b = operand(weight_NK, second, weights, slot, hold)
        y_MN = _multiply(a, b, bias_N, out, numerics, "forward")
        if not compiling and (ctx.turned_weight or second is not for_dgrad):
            numerics.weight.after_forward(weights, second.how.get(hold))

        data = scale = ctx.groups = None
        if saves:
            if not ctx.turned and to_save is not first:
                saved = operand(x_MK, to_save, kept, numerics.slot("input", False, count=False))
            if isinstance(saved, Operand):
                data, scale, *ctx.groups = saved
            else:
                data = saved
        ctx.save_for_backward(data, scale, weight_NK, *turned)
        ctx.numerics, ctx.weights, ctx.x_like = numerics, weights if holds else {}, (x.shape, x.dtype)
        ctx.backend, ctx.asked = backend, None if compiling else asked()
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
        data, scale, weight_NK, *waiting = ctx.saved_tensors  # read once: checkpoints unpack nothing a second time
        if not torch.compiler.is_compiling():
            numerics.state.backward_seen = True
            numerics.weight.after_backward()
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
            first, _ = numerics.plan.dgrad
            shape, dtype = ctx.x_like
            if needs_w and ctx.backend in ON_CODES and numerics.plan.grad_serves_both:
                if needs_b:
                    a, turned, db_N = ops.cast_transpose(dy_MN, first.how[None], slot, sums=True)
                else:
                    a, turned = ops.cast_transpose(dy_MN, first.how[None], slot)
            else:
                a = operand(dy_MN, first, made, slot, hold)
            b = _Linear.weight_for_dgrad(ctx, weight_NK, *waiting)
            dx = _multiply(a, b, None, dtype, numerics, "dgrad").view(shape)
            slot = numerics.slot("grad_output", False, count=False)
        if needs_w:
            first, _ = numerics.plan.wgrad
            a = operand(dy_MN, first, made, slot, hold).t() if turned is None else turned
            b = data if ctx.groups is None else Operand(data, scale, *ctx.groups)
            dw_NK = _multiply(a, b if ctx.turned else b.t(), None, weight_NK.dtype, numerics, "wgrad")
        if needs_b:
            if db_N is None:
                compiling = torch.compiler.is_compiling()
                db_N = dy_MN.sum(0, dtype=torch.float32) if compiling else column_sums(dy_MN)
            if db_N.dtype != ctx.bias_dtype:
                db_N = db_N.to(ctx.bias_dtype)
        return dx, dw_NK, db_N, None, None, None

    @staticmethod
    def weight_for_dgrad(ctx, weight_NK, codes, scale) -> Operand | torch.Tensor:
        """The weight's transpose [K, N] for dgrad: from forward where it waits, else cast now."""
        numerics: Numerics = ctx.numerics
        slot = numerics.slot("weight", False, count=False)
        forward, dgrad = numerics.plan.forward[1], numerics.plan.dgrad[1]
        if codes is not None:
            how = forward.how[None]
            return Operand(codes, scale, how.rows, how.cols, how.power_of_2)
        # Taken out: a loss that the user still holds holds this node, and would hold what waits here.
        weights, ctx.weights = {} if torch.compiler.is_compiling() else ctx.weights, {}
        if ctx.turned_weight:
            return transpose(weight_NK, forward, weights, slot)
        return operand(weight_NK, dgrad, weights, slot, holding(weight_NK, ctx.backend)).t()


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
