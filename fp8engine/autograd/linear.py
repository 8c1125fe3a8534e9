"""Linear layer as an autograd Function: y = x @ w^T + b, each of its three matmuls in the recipe's precision.

    forward   y[M, N]  = X[M, K]  @ W[N, K]^T + b        X, W reduced along -1
    dgrad     dx[M, K] = DY[M, N] @ (W^T)[K, N]^T        W cast along 0
    wgrad     dw[N, K] = (DY^T)[N, M] @ (X^T)[K, M]^T    DY, X cast along 0;  db = sum of dy over rows

M is the product of x's leading dimensions.  x is cast before the Function (operands.py), because inside of it, in a
graph, x has no attributes.

Saved for backward: X as FP8 codes in the orientation wgrad reads (or in 16 bits where wgrad is), its scale, and the
parameter itself.  What the 16-bit alternative keeps, x, is not.  A weight that needs no gradient saves no X; an x that
needs none saves no parameter and spends no dgrad.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8engine import _torch
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.operands import (
    Either,
    Use,
    along_m,
    gradient_pair,
    input_again,
    input_pair,
    kept_of,
    matrix,
    plain,
    resumed,
    transposed,
    use_of,
    weight_for_dgrad,
    weight_pair,
)
from fp8engine.autograd.products import product
from fp8engine.autograd.ready import suited, take, take_gradient
from fp8engine.autograd.refusals import batched
from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops import device, matmul
from fp8engine.ops.backends import inherited
from fp8engine.ops.reference import Operand
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.scaling.operands import Again, Operands, operands_of_gradient
from fp8engine.scaling.sample import Call, outside_of_autocast


class Layer(NamedTuple):
    """A linear layer: weight [N, K], bias [N] or None, and the numerics of the module that holds them."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    numerics: Numerics


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, numerics: Numerics) -> torch.Tensor:
    """x [..., K] times a weight [N, K] plus a bias [N]; [..., N] in x's dtype, or autocast's where that is on.

    Without the layer's feature, which its module calls in place of this function, and which may call it.
    Raises ShapeError (with nn.Linear's words), UnsupportedDtype, BackendError (several devices) and, in FP8, for what
    refusals.py lists; all name the layer.
    """
    begun = begin(x, weight_NK, bias_N, numerics)
    if isinstance(x, Float8Tensor):
        x = suited(x, numerics, begun.compiling)
    if not numerics.recipe.is_fp8:
        return in_16_bits(x, weight_NK, bias_N, numerics, begun)
    use, again = use_of(numerics, x, weight_NK, bias_N, begun.compiling), None
    with torch.no_grad():
        if isinstance(x, Float8Tensor):
            (a, kept), is_transposed = take(use, x, lambda values, made: along_m(use, values, made)), False
        else:
            found = kept_of(use, x)
            again = found.again if use.needs_w else None
            a, kept, is_transposed = input_pair(use if again is None else use._replace(needs_w=False), matrix(x), found)
    if again is not None and not use.where.compiling:
        again.waiting += 1
    read = Read(a, kept, is_transposed, begun.out, again)
    return _Linear.apply(x, weight_NK, bias_N, use, read, *(() if again is None else again.tensors))


class Begun(NamedTuple):
    """A call of a layer that has begun.  out: dtype of its result.  compiling: whether a graph is traced."""

    out: torch.dtype
    compiling: bool


def begin(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, numerics: Numerics) -> Begun:
    """Check what a layer is given, and let a step begin with it that may change its recipe."""
    check(x, weight_NK, bias_N, numerics.name)
    out, compiling = dtype_of_result(x, weight_NK, numerics.name), torch.compiler.is_compiling()
    if not compiling:
        numerics.state.enter()
    return Begun(out, compiling)


def in_16_bits(x, weight_NK, bias_N, numerics: Numerics, begun: Begun, read: Callable | None = None) -> torch.Tensor:
    """A layer whose recipe has no FP8.  read: of (x, weight), what FP8 would read, where that is something else."""
    y = _high_precision(x, weight_NK, bias_N, numerics.recipe.input.dtype, begun.out)
    if numerics.state.samples is None or begun.compiling or _torch.transforms_active():
        return y
    return _observed(y, x, weight_NK, numerics, read)


def dtype_of_result(x: torch.Tensor, weight_NK: torch.Tensor, name: str) -> torch.dtype:
    """x's dtype, or autocast's where that is on; without it x and weight must agree."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    if weight_NK.dtype != x.dtype:
        raise UnsupportedDtype(
            f"{name}: input is {x.dtype} and weight is {weight_NK.dtype}; cast one of them, or run under autocast"
        )
    return x.dtype


def check(
    x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, name: str, columns: int | None = None
) -> None:
    """Raise for an input that no recipe takes.  columns: of what the layer reads, where that is made of x."""
    if x.dtype not in FLOATS or x.layout != torch.strided or x.is_nested:
        raise UnsupportedDtype(
            f"{name}: input is {x.dtype}, {'nested' if x.is_nested else x.layout}; FP8 casts take dense float32, "
            "bfloat16 or float16: convert it first"
        )
    if weight_NK.dtype not in FLOATS:
        raise UnsupportedDtype(
            f"{name}: weight is {weight_NK.dtype}; FP8 casts take float32, bfloat16 or float16: cast it, or, where "
            "another library has quantised it, let that come before fe.convert, which then leaves the layer as it is"
        )
    if x.dim() == 0:
        raise ShapeError(f"{name}: both arguments to linear need to be at least 1D, but they are 0D and 2D")
    read = x.shape[-1] if columns is None else columns
    if read != weight_NK.shape[1]:
        rows = x.numel() // max(x.shape[-1], 1)
        raise ShapeError(
            f"{name}: mat1 and mat2 shapes cannot be multiplied "
            f"({rows}x{read} and {weight_NK.shape[1]}x{weight_NK.shape[0]}): in_features is {weight_NK.shape[1]}"
        )
    if weight_NK.device != x.device or (bias_N is not None and bias_N.device != x.device):
        device.check_one(name, x, weight=weight_NK, bias=bias_N)


class Read(NamedTuple):
    """What `_Linear` reads of an input that is cast already.

    a: X; kept: what wgrad will read; None: x itself, in 16 bits, or nothing.  is_transposed: kept is X^T already.
    out: the result's dtype.  again: how x is made again for wgrad, from the tensors that are saved instead of kept.
    """

    a: Operand | None
    kept: Either | None
    is_transposed: bool
    out: torch.dtype
    again: Again | None


class _Linear(torch.autograd.Function):
    """The matmuls of a layer."""

    @staticmethod
    def forward(ctx, *given):
        # One parameter beside ctx: torch 2.13's Dynamo, tracing without gradients, drops ctx where a Function is called
        # with as many arguments as its forward has parameters.
        x, weight_NK, bias_N, use, read, *remade = given
        first, second, kept = use.recipe.forward[0], use.recipe.wgrad[1], read.kept
        a = read.a or plain(matrix(x), first)
        b, weight_KN, copies = weight_pair(use, weight_NK)
        y_MN = use.numerics.result(use, a, b, bias_N, read.out)
        if use.needs_w and kept is None and read.again is None:
            kept = a if second is first else plain(matrix(x), second)
        data, scale, *groups = kept if isinstance(kept, Operand) else (kept, None)
        ctx.save_for_backward(data, scale, weight_NK if use.needs_x else None, *weight_KN, *remade)
        ctx.use, ctx.copies, ctx.like = use, copies, (x.shape, x.dtype, weight_NK.dtype)
        ctx.kept = groups, read.is_transposed, read.again
        return in_shape_of(x, y_MN)

    @staticmethod
    def backward(ctx, dy):
        # Read once: checkpoints unpack nothing a second time.
        data, scale, weight_NK, *weight_KN = ctx.saved_tensors
        weight_KN, remade = weight_KN[:2], weight_KN[2:]
        use, copies, (shape, *dtypes) = resumed(ctx.use, dy), {}, ctx.like
        groups, is_transposed, again = ctx.kept
        if not use.where.compiling:
            # Taken out: a loss that the user keeps alive keeps this node alive, and with it these operands.
            copies, ctx.copies = ctx.copies, {}
        kept, dy_MN = Operand(data, scale, *groups) if groups else data, matrix(dy)
        if again is not None:
            kept = input_again(use, *again.result(remade, use.where.compiling))
        elif kept is not None and not is_transposed:
            kept = transposed(kept)
        with inherited(use.where.asked) if use.where.asked else contextlib.nullcontext():
            if isinstance(dy_MN, Float8Tensor):
                dy_MN = take_gradient(use, dy_MN)
            found = None if use.where.compiling or "fp8" not in vars(dy) else operands_of_gradient(dy)
            dx_MK, dw_NK, db_N = gradients(use, dy_MN, kept, (weight_NK, weight_KN, copies), dtypes, found)
        return None if dx_MK is None else dx_MK.view(shape), dw_NK, db_N, *[None] * (2 + len(remade))


def gradients(
    use: Use,
    dy: torch.Tensor | tuple,
    kept: Either | None,
    weight: tuple,
    dtypes: Sequence[torch.dtype],
    found: Operands | None = None,
) -> tuple:
    """(dx [M, K], dw, db), None for what is not needed.  use: as `resumed` gives it.  dtypes: of dx and of dw.

    dy: [M, N], or its operands.  found: what an activation's backward has made of it.  kept: X^T for wgrad.
    weight: the parameter, where dx is needed, then what `weight_pair` gave beside W.
    """
    if found is not None and found.producer is not None:
        found.producer.read_by(use.numerics, use.where.on_codes and use.needs_x and use.needs_w)
    d, d_t, db_N = gradient_pair(use, dy, found or {}) if isinstance(dy, torch.Tensor) else dy
    dx_MK = dw_NK = None
    if use.needs_x:
        dx_MK = product(use, d, weight_for_dgrad(use, *weight), None, dtypes[0], "dgrad")
    if use.needs_w:
        dw_NK = product(use, d_t, kept, None, dtypes[1], "wgrad")
    if db_N is None or not use.needs_b:
        return dx_MK, dw_NK, None
    return dx_MK, dw_NK, db_N if db_N.dtype == use.bias_dtype else db_N.to(use.bias_dtype)


def in_shape_of(x: torch.Tensor, y_MN: torch.Tensor) -> torch.Tensor:
    """y with the leading dimensions of x, for the result of an autograd Function.

    Not `y.view`: autograd refuses in-place operations on a view that a Function returns.  `_unsafe_view` gives the same
    memory as a tensor that is no view of another, which is right because the caller gives y_MN up.
    """
    return y_MN if x.dim() == 2 else _torch.unsafe_view(y_MN, [*x.shape[:-1], y_MN.shape[1]])


def _observed(y: torch.Tensor, x, weight_NK: torch.Tensor, numerics: Numerics, read: Callable | None) -> torch.Tensor:
    """y; its layer's tensors are described in this step, which is sampled: numbers may allow FP8 again."""
    if y.requires_grad or numerics.state.decides_next:
        x_MK = matrix(x.detach())
        if read is not None:
            x_MK, weight_NK = read(x_MK, weight_NK.detach())
        samples: Any = numerics.state.samples
        call = samples.call(numerics.layer, len(x_MK))
        numerics.observe("input", x_MK, call)
        numerics.observe("weight", weight_NK)
        if y.requires_grad:
            y.register_hook(lambda dy: _observed_gradient(dy, numerics, call))
    return y


def _observed_gradient(dy: torch.Tensor, numerics: Numerics, call: Call) -> None:
    if batched(dy):  # columns of a Jacobian: no training step, and nothing whose values can be described
        return
    numerics.state.backward_seen = True
    numerics.observe("grad_output", matrix(dy), call)


def _high_precision(x, weight_NK, bias_N, dtype: torch.dtype, out: torch.dtype) -> torch.Tensor:
    """nn.Linear with its operands in `dtype`: what a recipe without FP8 means."""
    bias_N = None if bias_N is None else bias_N.to(dtype)
    if (
        dtype.itemsize == 2
        and matmul.choose_16_bits(x.device, (x.numel() // max(x.shape[-1], 1), len(weight_NK))) != "torch"
    ):
        y_MN = matmul.matmul_fp16(matrix(x).to(dtype), weight_NK.to(dtype), bias_N)
        return y_MN.view(*x.shape[:-1], len(weight_NK)).to(out)
    with outside_of_autocast(x.device):
        return torch.nn.functional.linear(x.to(dtype), weight_NK.to(dtype), bias_N).to(out)
