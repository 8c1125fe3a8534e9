"""Norms and activations as operations, forward and backward: results in 16 bits and, beside them, their FP8 codes.

    y = norm(x) or act(x), dx of y: computed in FP32, rounded to x's dtype
    codes = casts.quantize(y, cast, slot), or casts.cast_transpose(y, cast, slot): bit for bit, the slot's tables too

So codes are a cache: whoever finds none casts y and has the same.  Signatures and results are those of the twins in
reference/.  Where casts run on Triton a kernel writes y, and in the same launches the codes that it can (produce.py);
codes that it cannot are the casts'.  Elsewhere, for an x of no element and for rows too wide for a program of a norm,
the twin runs.

What is refused is refused by a forward.  A backward is called by a Function (autograd/produce.py), with what its
forward was given and has returned, and a gradient that autograd has compared with the result.

>>> y, q, q_t, rows = norm_quantize(torch.tensor([[3.0, 4.0]]), None, None, Norm("rms", eps=0.0))
>>> y.tolist(), rows.rstd_M.tolist(), q, q_t
([[0.8485281467437744, 1.1313709020614624]], [0.2828427255153656], None, None)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8engine.errors import BackendError, InvalidRecipe, ShapeError, UnknownName, UnsupportedDtype
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops import casts, device, reference, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.library import operation, refuse_gradient
from fp8engine.ops.reference import Norm, Operand, RowStatistics, Store
from fp8engine.ops.reference.act_quantize import ActGradients
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.ops.reference.norm_quantize import KINDS, NormGradients

__all__ = ["act_quantize", "act_quantize_backward", "norm_quantize", "norm_quantize_backward"]


def norm_quantize(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    norm: Norm,
    to: Store = IN_16_BITS,
) -> tuple[torch.Tensor, Operand | None, Operand | None, RowStatistics]:
    """RMSNorm or LayerNorm of x's rows: (y, its codes, those of its transpose, row statistics for backward, FP32 [M]).

    x_MK: FP32, BF16 or FP16, any strides; y has its dtype.  weight_K None: all ones; bias_K None: zeros.
    to: which codes; None for what it does not ask for.

    Raises UnknownName for a kind of norm, ShapeError, UnsupportedDtype, InvalidRecipe for a transposed copy in 16 bits,
    BackendError for tensors on several devices or a backend asked for that cannot.
    Sources: arXiv 1607.06450 (LayerNorm), arXiv 1910.07467 (RMSNorm).

    >>> from fp8engine.numerics.cast import Cast
    >>> to = Store(Cast.parse("e4m3 p2"), transposed=True)
    >>> y, q, q_t, _ = norm_quantize(torch.tensor([[1.0, -1.0, 1.0]]), None, None, Norm("rms", eps=0.0), to)
    >>> (q.data.float() * q.scale).tolist() == y.tolist(), q_t.data.shape
    (True, torch.Size([3, 1]))
    """
    _check("norm_quantize", to, x_MK, weight=weight_K, bias=bias_K)
    if norm.kind not in KINDS:
        raise UnknownName("norm", norm.kind, KINDS)
    for what, value in (("weight", weight_K), ("bias", bias_K)):
        _same("norm_quantize", what, value, x_MK.shape[1:], "one for each column of x")
    y, q, q_t, rstd_M, mean_M = _made(_norm_quantize, (x_MK, weight_K, bias_K, *norm), to)
    return y, q, q_t, RowStatistics(rstd_M, mean_M if norm.kind == "layer" else None)


def norm_quantize_backward(
    dy_MK: torch.Tensor,
    x_MK: torch.Tensor,
    weight_K: torch.Tensor | None,
    rows: RowStatistics,
    norm: Norm,
) -> NormGradients:
    """Gradients of `norm_quantize`: dx in x's dtype, dw and db in the weight's (x's without a weight).

    rows: what forward returned.  dw is None without a weight, db for RMSNorm.

    >>> x, norm = torch.tensor([[1.0, 3.0]]), Norm("layer", eps=0.0)
    >>> rows = norm_quantize(x, None, None, norm)[3]
    >>> found = norm_quantize_backward(torch.tensor([[5.0, 7.0]]), x, torch.ones(2), rows, norm)
    >>> found.dx_MK.tolist(), found.dweight_K.tolist(), found.dbias_K.tolist()  # two numbers always become -1 and 1
    ([[0.0, 0.0]], [-5.0, 7.0], [5.0, 7.0])
    """
    dx_MK, dweight_K, dbias_K = _norm_quantize_backward(dy_MK, x_MK, weight_K, *rows, *norm)
    return NormGradients(dx_MK, None if weight_K is None else dweight_K, None if rows.mean_M is None else dbias_K)


def act_quantize(
    x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS, up_MN: torch.Tensor | None = None
) -> tuple[torch.Tensor, Operand | None, Operand | None]:
    """An activation of x: (y [M, N], its codes, those of its transpose); N = K, or K / 2 of a gated kind's [gate | up].

    x_MK: FP32, BF16 or FP16, any strides; y has its dtype.  kind: a name of reference/activations.py's table.
    to: which codes; None for what it does not ask for.  up_MN: of a gated kind, any strides; x is then the gate [M, N].

    Raises UnknownName for a kind, ShapeError, also for a gated kind of an odd K, UnsupportedDtype, InvalidRecipe for a
    transposed copy in 16 bits, BackendError for a backend asked for that cannot.

    >>> from fp8engine.numerics.cast import Cast
    >>> y, q, _ = act_quantize(torch.tensor([[-1.0, 2.0]]), "relu", Store(Cast.parse("e4m3 1x-1")))
    >>> y.tolist(), q.data.tolist(), round(q.scale.item() * 448, 6)
    ([[0.0, 2.0]], [[0.0, 448.0]], 2.0)
    """
    _check("act_quantize", to, x_MK, up=up_MN)
    _check_act(kind, x_MK, up_MN)
    y, q, q_t = _made(_act_quantize, (x_MK, up_MN, kind), to)
    return y, q, q_t


def act_quantize_backward(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS, up_MN: torch.Tensor | None = None
) -> ActGradients:
    """Gradients of `act_quantize`: dx [M, K] in x's dtype, its codes as `to` says, and the FP32 sums of its columns.

    up_MN: what forward was given; then dgate and dup, in 16 bits alone: `to` asks for nothing, and there are no sums.

    >>> found = act_quantize_backward(torch.tensor([[5.0, 7.0]]), torch.tensor([[-1.0, 2.0]]), "relu")
    >>> found.dx_MK.tolist(), found.dbias_K.tolist()
    ([[0.0, 7.0]], [0.0, 7.0])
    """
    dx_MK, q, q_t, dup_MN, dbias_K = _made(_act_quantize_backward, (dy_MN, x_MK, up_MN, kind), to)
    return ActGradients(dx_MK, q, q_t, *((None, dbias_K) if up_MN is None else (dup_MN, None)))


def _made(run: Callable[..., tuple], arguments: tuple, to: Store) -> tuple:
    """(y, its codes, those of its transpose, whatever else there is) by one of the operations below."""
    own = to
    if to.cast is None or (to.slot is not None and to.slot.group and to.cast.per_tensor):
        own = IN_16_BITS  # no codes; or under one scale for all ranks, which a cast of its own finds
    y, *found = run(*arguments, own.cast, own.transposed, slot=own.slot)
    if to.cast is None or own is to:
        codes = casts.operands(found[:4], own.cast, own.transposed)
    else:
        codes = _cast(y, to.cast, to)
    return y, *codes, *found[4:]


def _cast(y_MK: torch.Tensor, cast: Cast, to: Store) -> tuple[Operand | None, Operand | None]:
    """The codes of y that `to`, which has that cast, asks for."""
    if to.transposed:
        return casts.cast_transpose(y_MK, cast, to.slot)
    return casts.quantize(y_MK, cast, to.slot), None


def _check(operation: str, to: Store, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise for tensors or a `to` that neither a norm nor an activation takes."""
    eager = not torch.compiler.is_compiling()  # Dynamo refuses a layout within a backward, and traces dense tensors
    for what, value in {"x": x, **others}.items():
        if value is not None and (value.dtype not in FLOATS or (eager and value.layout != torch.strided)):
            raise UnsupportedDtype(
                f"{operation}: {what} is {value.dtype}, {value.layout}; it takes dense float32, bfloat16 or float16: "
                "convert it first"
            )
    if x.dim() != 2:
        raise ShapeError(f"{operation}: x is {list(x.shape)}; want a matrix [M, K]: flatten its leading dimensions")
    if to.cast is None and to.transposed:
        raise InvalidRecipe(
            f"{operation}: a transposed copy is kept in FP8 only; give `to` a cast, or read the transpose as a view"
        )
    tables = {} if to.slot is None else {"slot": to.slot.live_2S, "counters_of_the_slot": to.slot.counts_CS}
    device.check_one(operation, x, **others, **tables)


def _check_act(kind: str, x_MK: torch.Tensor, up_MN: torch.Tensor | None) -> None:
    operation = "act_quantize"
    if kind not in ACTIVATIONS:
        raise UnknownName("activation", kind, ACTIVATIONS)
    gated = ACTIVATIONS[kind].gated
    if up_MN is None:
        if gated and x_MK.shape[1] % 2:
            raise ShapeError(
                f"{operation}: {kind} takes [gate | up], an even number of columns; x is {list(x_MK.shape)}"
            )
        return
    if not gated:
        raise ShapeError(f"{operation}: {kind} has no gate; leave up out")
    _same(operation, "up", up_MN, x_MK.shape, "the gate's")
    if up_MN.dtype != x_MK.dtype:
        raise UnsupportedDtype(f"{operation}: up is {up_MN.dtype} and the gate {x_MK.dtype}; convert one of them")


def _same(operation: str, what: str, value: torch.Tensor | None, shape, whose: str) -> None:
    if value is not None and tuple(value.shape) != tuple(shape):
        raise ShapeError(f"{operation}: {what} is {list(value.shape)}; want {list(shape)}, {whose}")


def _twin(x_MK: torch.Tensor, norm: bool):
    """The module whose functions compute a norm or an activation here: that of casts, unless no kernel can."""
    found = casts.twin(x_MK.device) if x_MK.numel() else reference
    reason = triton_backend.norm_unsupported(x_MK.shape) if norm and found is triton_backend else None
    if reason and asked() == "triton":
        raise BackendError(
            f"backend 'triton' cannot produce this from x {list(x_MK.shape)}: {reason}; use fe.backend('reference')"
        )
    return reference if reason else found


def _flat(y: torch.Tensor, q: tuple | None, q_t: tuple | None, to: Store) -> tuple[torch.Tensor | None, ...]:
    """(y, data, scale, data of the transpose, its scale), None for what there is not.

    q, q_t: the codes that were made with y; those that `to` asks for and that were not are made here.
    """
    if q is None and to.cast is not None:
        q, q_t = _cast(y, to.cast, to)
    return y, *casts.taken_apart(q, q_t, to.cast)


NORM, STORE = "str kind, float eps, bool zero_centered", "str cast, bool transposed"
FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor"  # y, codes, scale, and both of the transpose


def _norm_fake(x, weight, bias, kind, *rest):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = torch.empty_like(rstd) if kind == "layer" else None
    return x.new_empty(x.shape), *casts.shapes_of_both(x, *rest[2:]), rstd, mean


def _norm_backward_fake(dy, x, weight, rstd, mean, *norm):
    dtype = x.dtype if weight is None else weight.dtype
    return x.new_empty(x.shape), *(
        None if of is None else x.new_empty(x.shape[1], dtype=dtype) for of in (weight, mean)
    )


def _act_fake(x, up, kind, *to):
    m, k = x.shape
    y = x.new_empty(m, k // 2 if ACTIVATIONS[kind].gated and up is None else k)
    return y, *casts.shapes_of_both(y, *to)


def _act_backward_fake(dy, x, up, kind, *to):
    sums = x.new_empty(x.shape[1], dtype=torch.float32)
    others = (None, sums) if up is None else (x.new_empty(x.shape), None)
    return x.new_empty(x.shape), *casts.shapes_of_both(x, *to), *others


@operation(
    f"norm_quantize(Tensor x, Tensor? weight, Tensor? bias, {NORM}, {STORE}) -> {FIVE}, Tensor, Tensor)",
    _norm_fake,
    slot=True,
)
def _norm_quantize(x, weight, bias, *rest, slot=None):
    norm, to = Norm(*rest[:3]), Store(*rest[3:], slot=slot)
    y, q, q_t, rows = _twin(x, True).norm_quantize(x, weight, bias, norm, to)
    return *_flat(y, q, q_t, to), *rows


@operation(
    f"norm_quantize_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? mean, {NORM})"
    " -> (Tensor, Tensor, Tensor)",
    _norm_backward_fake,
)
def _norm_quantize_backward(dy, x, weight, rstd, mean, *norm) -> tuple:
    return tuple(_twin(x, True).norm_quantize_backward(dy, x, weight, RowStatistics(rstd, mean), Norm(*norm)))


@operation(f"act_quantize(Tensor x, Tensor? up, str kind, {STORE}) -> {FIVE})", _act_fake, slot=True)
def _act_quantize(x, up, kind, *to, slot=None):
    to = Store(*to, slot=slot)
    return _flat(*_twin(x, False).act_quantize(x, kind, to, up), to)


@operation(
    f"act_quantize_backward(Tensor dy, Tensor x, Tensor? up, str kind, {STORE}) -> {FIVE}, Tensor, Tensor)",
    _act_backward_fake,
    slot=True,
)
def _act_quantize_backward(dy, x, up, kind, *to, slot=None):
    to = Store(*to, slot=slot)
    dx, q, q_t, *others = _twin(x, False).act_quantize_backward(dy, x, kind, to, up)
    return *_flat(dx, q, q_t, to), *others


for _name in __all__:  # autograd is functional code's, which calls both directions
    _slotted = () if _name == "norm_quantize_backward" else (f"{_name}_slot", f"{_name}_column")
    refuse_gradient(_name, *_slotted)
