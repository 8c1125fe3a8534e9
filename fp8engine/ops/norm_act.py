"""Norms and activations as operations, forward and backward; computed in FP32 and rounded once, into a `Store`.

    y = norm(x) or act(x), dx of y, in the format that their consumers read

Signatures and results are those of the twins in reference/; whether a kernel or the twin runs: ways.py.  An operator
returns tensors only, empty ones for what there is not; the functions here put Operands together.

>>> y, y_t, rows = norm_quantize(torch.tensor([[3.0, 4.0]]), None, None, Norm("rms", eps=0.0))
>>> y.tolist(), rows.rstd_M.tolist()
([[0.8485281467437744, 1.1313709020614624]], [0.2828427255153656])
"""

from __future__ import annotations

import torch

from fp8engine.errors import InvalidRecipe, ShapeError, UnknownName, UnsupportedDtype
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops import device, reference, triton_backend
from fp8engine.ops.library import call, direct, operation, refuse_gradient
from fp8engine.ops.reference import How, Norm, Operand, RowStatistics, Store
from fp8engine.ops.reference.act_quantize import ActGradients
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.ops.reference.norm_quantize import KINDS, NormGradients
from fp8engine.ops.ways import act_way, norm_way, produce, row_major

__all__ = ["act_quantize", "act_quantize_backward", "norm_quantize", "norm_quantize_backward"]


def norm_quantize(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    norm: Norm,
    to: Store = IN_16_BITS,
) -> tuple[torch.Tensor | Operand, Operand | None, RowStatistics]:
    """RMSNorm or LayerNorm of x's rows: (y, y transposed where asked, row statistics in FP32 [M] for backward).

    x_MK: FP32, BF16 or FP16, any strides.  weight_K None: all ones; bias_K None: zeros.
    y: a tensor of x's dtype where `to.how` is None, else an Operand; y transposed [K, M]: an Operand.

    Raises UnknownName for a kind of norm, ShapeError, UnsupportedDtype, InvalidRecipe for a transposed copy in 16 bits,
    BackendError for tensors on several devices or a backend asked for that cannot.
    Sources: arXiv 1607.06450 (LayerNorm), arXiv 1910.07467 (RMSNorm).

    >>> to = Store(How(torch.float8_e4m3fn, -1, -1, power_of_2=True), transposed=True)
    >>> q, q_t, _ = norm_quantize(torch.tensor([[1.0, -1.0, 1.0]]), None, None, Norm("rms", eps=0.0), to)
    >>> (q.data.float() * q.scale).tolist(), q_t.data.shape
    ([[1.0, -1.0, 1.0]], torch.Size([3, 1]))
    """
    _check("norm_quantize", to, x_MK, weight=weight_K, bias=bias_K)
    _check_norm("norm_quantize", norm, x_MK, weight_K, bias_K)
    if _direct(x_MK, weight_K, bias_K):
        return _run_norm(x_MK, weight_K, bias_K, norm, to)
    *stored, rstd_M, mean_M = _call("norm_quantize", (x_MK, weight_K, bias_K, *norm), to)
    return *_operands(stored, to), RowStatistics(rstd_M, mean_M if norm.kind == "layer" else None)


def norm_quantize_backward(
    dy_MK: torch.Tensor,
    x_MK: torch.Tensor,
    weight_K: torch.Tensor | None,
    rows: RowStatistics,
    norm: Norm,
    to: Store = IN_16_BITS,
) -> NormGradients:
    """Gradients of `norm_quantize`: dx stored as `to` says, dw and db in the weight's dtype (x's without a weight).

    rows: what forward returned.  dw is None without a weight, db for RMSNorm.  Raises as `norm_quantize` does.

    >>> x, norm = torch.tensor([[1.0, 3.0]]), Norm("layer", eps=0.0)
    >>> rows = norm_quantize(x, None, None, norm)[2]
    >>> found = norm_quantize_backward(torch.tensor([[5.0, 7.0]]), x, torch.ones(2), rows, norm)
    >>> found.dx_MK.tolist(), found.dweight_K.tolist(), found.dbias_K.tolist()  # two numbers always become -1 and 1
    ([[0.0, 0.0]], [-5.0, 7.0], [5.0, 7.0])
    """
    name, statistics = "norm_quantize_backward", {"rstd": rows.rstd_M, "mean": rows.mean_M}
    _check(name, to, x_MK, dy=dy_MK, weight=weight_K, **statistics)
    _check_norm(name, norm, x_MK, weight_K, None)
    _same(name, "dy", dy_MK, x_MK.shape, "y's")
    for what, value in statistics.items():
        if value is not None:
            _same(name, what, value, x_MK.shape[:1], "one for each row of x")
    if (rows.mean_M is None) != (norm.kind == "rms"):
        raise ShapeError(
            f"{name}: rows {'have no' if rows.mean_M is None else 'have a'} mean, and the norm is {norm.kind!r}; "
            "pass the row statistics that this norm's forward returned"
        )
    if _direct(x_MK, dy_MK, weight_K):
        return _run_norm_backward(dy_MK, x_MK, weight_K, rows, norm, to)
    *stored, dweight_K, dbias_K = _call(name, (dy_MK, x_MK, weight_K, *rows, *norm), to)
    return NormGradients(
        *_operands(stored, to), None if weight_K is None else dweight_K, None if rows.mean_M is None else dbias_K
    )


def act_quantize(
    x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS
) -> tuple[torch.Tensor | Operand, Operand | None]:
    """An activation of x: (y [M, N], y transposed where asked); N = K, or K / 2 of a gated kind's [gate | up].

    x_MK: FP32, BF16 or FP16, any strides.  kind: a name of reference/activations.py's table.
    y: a tensor of x's dtype where `to.how` is None, else an Operand; y transposed [N, M]: an Operand.

    Raises UnknownName for a kind, ShapeError, also for a gated kind of an odd K, UnsupportedDtype, InvalidRecipe for a
    transposed copy in 16 bits, BackendError for a backend asked for that cannot.

    >>> q, _ = act_quantize(torch.tensor([[-1.0, 2.0]]), "relu", Store(How(torch.float8_e4m3fn, 1, -1)))
    >>> q.data.tolist(), round(q.scale.item() * 448, 6)
    ([[0.0, 448.0]], 2.0)
    """
    _check("act_quantize", to, x_MK)
    _check_act("act_quantize", kind, x_MK)
    if _direct(x_MK):
        return _run_act(x_MK, kind, to)
    return _operands(_call("act_quantize", (x_MK, kind), to), to)


def act_quantize_backward(dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS) -> ActGradients:
    """Gradients of `act_quantize`: dx [M, K] stored as `to` says, and its sum over rows in FP32, before rounding.

    Raises as `act_quantize` does, ShapeError also for a dy of another shape than y, BackendError for two devices.

    >>> found = act_quantize_backward(torch.tensor([[5.0, 7.0]]), torch.tensor([[-1.0, 2.0]]), "relu")
    >>> found.dx_MK.tolist(), found.dbias_K.tolist()
    ([[0.0, 7.0]], [0.0, 7.0])
    """
    _check("act_quantize_backward", to, x_MK, dy=dy_MN)
    columns = _check_act("act_quantize_backward", kind, x_MK)
    _same("act_quantize_backward", "dy", dy_MN, (x_MK.shape[0], columns), "y's")
    if _direct(x_MK, dy_MN):
        return _run_act_backward(dy_MN, x_MK, kind, to)
    *stored, dbias_K = _call("act_quantize_backward", (dy_MN, x_MK, kind), to)
    return ActGradients(*_operands(stored, to), dbias_K)


def _direct(*tensors: torch.Tensor | None) -> bool:
    """Whether the dispatcher has nothing to add for any of the tensors."""
    return all(x is None or direct(x) for x in tensors)


def _call(name: str, arguments: tuple, to: Store):
    """The operator of that name, or the one that writes a slot."""
    if to.how is None:
        return call(name, None, *arguments, "", to.transposed)
    return call(name, to.slot, *arguments, str(to.how), to.transposed)


def _operands(stored, to: Store) -> tuple[torch.Tensor | Operand, Operand | None]:
    """(y, y transposed where asked) of an operator's (data, scale, data transposed, scale transposed)."""
    data, scale, data_t, scale_t = stored
    how = to.how
    if how is None:
        return data, None
    q = Operand(data, scale, how.rows, how.cols, how.power_of_2)
    if not to.transposed:
        return q, None
    # Not by _replace: torch 2.11 compiles no graph that returns what _replace made.
    return q, Operand(data_t, scale if how.per_tensor else scale_t, how.rows, how.cols, how.power_of_2)


def _check(operation: str, to: Store, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise for tensors or a `to` that neither a norm nor an activation takes."""
    _check_dtypes(operation, {"x": x, **others})
    if x.dim() != 2:
        raise ShapeError(f"{operation}: x is {list(x.shape)}; want a matrix [M, K]: flatten its leading dimensions")
    if to.how is None and to.transposed:
        raise InvalidRecipe(
            f"{operation}: a transposed copy is kept in FP8 only; give `to` a how, or read the transpose as a view"
        )
    tables = {} if to.slot is None else {"slot": to.slot.live_2S, "counters_of_the_slot": to.slot.counts_CS}
    device.check_one(operation, x, **others, **tables)


def _check_dtypes(operation: str, given: dict[str, torch.Tensor | None]) -> None:
    eager = not torch.compiler.is_compiling()  # Dynamo refuses a layout within a backward, and traces dense tensors
    for what, value in given.items():
        if value is not None and (value.dtype not in FLOATS or (eager and value.layout != torch.strided)):
            raise UnsupportedDtype(
                f"{operation}: {what} is {value.dtype}, {value.layout}; it takes dense float32, bfloat16 or float16: "
                "convert it first"
            )


def _check_norm(operation: str, norm: Norm, x_MK: torch.Tensor, weight_K, bias_K) -> None:
    if norm.kind not in KINDS:
        raise UnknownName("norm", norm.kind, KINDS)
    for what, value in (("weight", weight_K), ("bias", bias_K)):
        if value is not None:
            _same(operation, what, value, x_MK.shape[1:], "one for each column of x")


def _check_act(operation: str, kind: str, x_MK: torch.Tensor) -> int:
    """The columns of y."""
    if kind not in ACTIVATIONS:
        raise UnknownName("activation", kind, ACTIVATIONS)
    k = x_MK.shape[1]
    if not ACTIVATIONS[kind].gated:
        return k
    if k % 2:
        raise ShapeError(f"{operation}: {kind} takes [gate | up], an even number of columns; x is {list(x_MK.shape)}")
    return k // 2


def _same(operation: str, what: str, value: torch.Tensor, shape, whose: str) -> None:
    if tuple(value.shape) != tuple(shape):
        raise ShapeError(f"{operation}: {what} is {list(value.shape)}; want {list(shape)}, {whose}")


def _flat(like: torch.Tensor, y, y_t: Operand | None, *others: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """An operator's results: tensors of their own, empty for what there is not."""
    data, scale = (y.data, y.scale) if isinstance(y, Operand) else (y, None)
    data_t, scale_t = (None, None) if y_t is None else (y_t.data, y_t.scale)
    if scale_t is not None and scale_t.dim() == 0:
        scale_t = None  # the scale of y itself
    return tuple(like.new_empty(0) if t is None else t for t in (data, scale, data_t, scale_t, *others))


def _stored_fake(x: torch.Tensor, shape, text: str, transposed: bool) -> tuple[torch.Tensor, ...]:
    m, k = shape
    if not text:
        return _flat(x, x.new_empty(m, k), None)
    how = How.parse(text)

    def operand(rows, columns) -> Operand:
        scale = x.new_empty(how.scale_shape(rows, columns), dtype=torch.float32)
        return Operand(x.new_empty(rows, columns, dtype=how.held or how.dtype), scale)

    return _flat(x, operand(m, k), operand(k, m) if transposed else None)


def _run_norm(
    x_MK: torch.Tensor, weight_K, bias_K, norm: Norm, to: Store
) -> tuple[torch.Tensor | Operand, Operand | None, RowStatistics]:
    way = norm_way(x_MK, norm, to)
    if way.name == "twin":
        y, y_t, rows = reference.norm_quantize(x_MK, weight_K, bias_K, norm, to)
        return *row_major(y, y_t), rows
    y, y_t, rows = produce(way, x_MK, to, lambda x, to: triton_backend.norm_quantize(x, weight_K, bias_K, norm, to))
    return y, y_t, RowStatistics(*rows)


def _run_norm_backward(dy_MK, x_MK, weight_K, rows: RowStatistics, norm: Norm, to: Store) -> NormGradients:
    way = norm_way(x_MK, norm, to)
    if way.name == "twin":
        dx, dx_t, *sums = reference.norm_quantize_backward(dy_MK, x_MK, weight_K, rows, norm, to)
        return NormGradients(*row_major(dx, dx_t), *sums)

    def launch(x: torch.Tensor, to: Store) -> tuple:
        return triton_backend.norm_quantize_backward(dy_MK, x, weight_K, rows, norm, to)

    dx, dx_t, dweight_K, dbias_K = produce(way, x_MK, to, launch)
    if dbias_K is not None and weight_K is None:
        dbias_K = dbias_K.to(x_MK.dtype)  # by way of FP32 it has that dtype: rounded here, once
    return NormGradients(dx, dx_t, dweight_K, dbias_K)


def _run_act(x_MK: torch.Tensor, kind: str, to: Store) -> tuple[torch.Tensor | Operand, Operand | None]:
    way = act_way(x_MK, kind, to)
    if way.name == "twin":
        return row_major(*reference.act_quantize(x_MK, kind, to))
    y, y_t = produce(way, x_MK, to, lambda x, to: triton_backend.act_quantize(x, kind, to))
    return y, y_t


def _run_act_backward(dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to: Store) -> ActGradients:
    way = act_way(x_MK, kind, to, backward=True)
    if way.name == "twin":
        dx, dx_t, dbias_K = reference.act_quantize_backward(dy_MN, x_MK, kind, to)
        return ActGradients(*row_major(dx, dx_t), dbias_K)
    return ActGradients(*produce(way, x_MK, to, lambda x, to: triton_backend.act_quantize_backward(dy_MN, x, kind, to)))


def _norm_fake(x, weight, bias, kind, *rest):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = torch.empty_like(rstd) if kind == "layer" else x.new_empty(0)
    return *_stored_fake(x, x.shape, *rest[2:4]), rstd, mean


def _norm_backward_fake(dy, x, weight, rstd, mean, *rest):
    dtype = x.dtype if weight is None else weight.dtype
    sums = (x.new_empty(0) if of is None else x.new_empty(x.shape[1], dtype=dtype) for of in (weight, mean))
    return *_stored_fake(x, x.shape, *rest[3:5]), *sums


def _act_fake(x, kind, text, transposed, *slot):
    m, k = x.shape
    return _stored_fake(x, (m, k // 2 if ACTIVATIONS[kind].gated else k), text, transposed)


def _act_backward_fake(dy, x, kind, text, transposed, *slot):
    return *_stored_fake(x, x.shape, text, transposed), x.new_empty(x.shape[1], dtype=torch.float32)


NORM, STORE = "str kind, float eps, bool zero_centered", "str how, bool transposed"
FOUR = "(Tensor, Tensor, Tensor, Tensor"  # codes or values, scale, and both of the transpose


@operation(
    f"norm_quantize(Tensor x, Tensor? weight, Tensor? bias, {NORM}, {STORE}) -> {FOUR}, Tensor, Tensor)",
    _norm_fake,
    slot=True,
)
def _norm_operator(x, weight, bias, *rest, slot=None):
    y, y_t, rows = _run_norm(x, weight, bias, Norm(*rest[:3]), Store(rest[3], rest[4], slot))
    return _flat(x, y, y_t, rows.rstd_M, rows.mean_M)


@operation(
    f"norm_quantize_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? mean, {NORM}, {STORE})"
    f" -> {FOUR}, Tensor, Tensor)",
    _norm_backward_fake,
    slot=True,
)
def _norm_backward_operator(dy, x, weight, *rest, slot=None):
    rows, norm = RowStatistics(*rest[:2]), Norm(*rest[2:5])
    found = _run_norm_backward(dy, x, weight, rows, norm, Store(rest[5], rest[6], slot))
    return _flat(x, found.dx_MK, found.dx_KM, found.dweight_K, found.dbias_K)


@operation(f"act_quantize(Tensor x, str kind, {STORE}) -> {FOUR})", _act_fake, slot=True)
def _act_operator(x, kind, how, transposed, slot=None):
    return _flat(x, *_run_act(x, kind, Store(how, transposed, slot)))


@operation(
    f"act_quantize_backward(Tensor dy, Tensor x, str kind, {STORE}) -> {FOUR}, Tensor)", _act_backward_fake, slot=True
)
def _act_backward_operator(dy, x, kind, how, transposed, slot=None):
    return _flat(x, *_run_act_backward(dy, x, kind, Store(how, transposed, slot)))


for _name in __all__:  # autograd is functional code's, which calls both directions
    refuse_gradient(_name, f"{_name}_slot", f"{_name}_column")
