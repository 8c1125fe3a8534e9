"""Float8Tensor: FP8 codes with their scale, as a tensor that takes part in ordinary code.

    x ≈ data * scale        data [..., K] FP8; scale FP32: () per tensor, one per row, column or block otherwise

A short list of operations keeps the FP8 form (detach, clone, moving device, views that keep groups whole, transposing
a matrix, copying into one); everything else computes on the dequantised values and returns an ordinary tensor, and what
would write into FP8 codes is refused.  One that a layer returned has a gradient, which is an ordinary tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import torch

from fp8engine import _torch
from fp8engine._torch import tree_leaves, tree_map
from fp8engine.errors import InvalidRecipe, ShapeError, UnsupportedDtype
from fp8engine.numerics.cast import Cast, Granularity, PerBlock, PerRow, PerTensor
from fp8engine.numerics.formats import BF16, FLOATS, Format
from fp8engine.ops import casts, device, reference
from fp8engine.ops import matmul as products
from fp8engine.ops.reference import Operand, Slot

aten = torch.ops.aten


class Float8Tensor(torch.Tensor):
    """FP8 codes with their scale, of any shape; made by `fe.quantize`.

    data: the codes.  scale: FP32.  format: E4M3 or E5M2.  granularity: what one scale covers.
    dtype (of the tensor) is what it dequantises to.  Saved, loaded and moved like any tensor; `fe.quantize` has no
    gradient, and what a layer under `Recipe.stored` returns has.
    source: the slot that counted it when it was stored, if one did.  power_of_2: every scale is known to be one.
    """

    _data: torch.Tensor
    _scale: torch.Tensor
    granularity: Granularity
    source: Slot | None = None
    power_of_2: bool = False

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, granularity: Granularity, dtype: torch.dtype):
        return _torch.wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, granularity: Granularity, dtype: torch.dtype):
        self._data, self._scale, self.granularity = data, scale, granularity

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The FP8 codes."""
        return self._data

    @property
    def scale(self) -> torch.Tensor:
        """FP32; times the codes gives the values."""
        return self._scale

    @property
    def format(self) -> Format:
        """E4M3 or E5M2."""
        return Format.of(self._data.dtype)

    def dequantize(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values as an ordinary tensor in this tensor's dtype, the product taken in FP32; differentiable."""
        return _Dequantize.apply(self) if torch.is_grad_enabled() and self.requires_grad else self.values()

    def values(self) -> torch.Tensor:
        """`dequantize` without a gradient."""
        cast = _cast_of(self.granularity, self._data.dtype)
        if cast.per_tensor:
            return (casts.decode(self._data, torch.float32) * self._scale).to(self.dtype)
        operand = self.operand()
        operand = operand._replace(data=casts.decode(operand.data, torch.float32))  # an operator, in a graph as well
        return reference.folded(operand, torch.float32).view(self._data.shape).to(self.dtype)

    def operand(self) -> Operand:
        """What the matmuls take; a matrix (leading dimensions count as rows)."""
        cast = _cast_of(self.granularity, self._data.dtype)
        data = _matrix(self._data)
        scale = self._scale if cast.per_tensor else _matrix(self._scale)
        return Operand(data, scale, cast.rows, cast.cols, self.power_of_2)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shape = "x".join(map(str, self.shape))
        return f"Float8Tensor({shape}, {self.format} {self.granularity}, dequantises to {self.dtype}, on {self.device})"

    def __tensor_flatten__(self):
        return ["_data", "_scale"], (self.granularity, self.dtype, self.power_of_2)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        *rest, power_of_2 = context
        return _knowing(Float8Tensor(inner["_data"], inner["_scale"], *rest), power_of_2)

    def __reduce_ex__(self, protocol):
        # As bytes: torch's pickle of an FP8 storage cannot be read back outside torch.save.
        codes = self._data.view(torch.uint8)
        return _rebuild, (codes, self.format.name, self._scale, self.granularity, self.dtype, self.power_of_2)

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self._map(torch.clone))

    def _map(self, fn) -> Float8Tensor:
        found = type(self)(fn(self._data), fn(self._scale), self.granularity, self.dtype)
        return _knowing(found, self.power_of_2)

    def _viewed(self, data: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> Float8Tensor:
        """Other shape, same numbers."""
        found = type(self)(data, scale, granularity, self.dtype)
        found.source = self.source
        return _knowing(found, self.power_of_2)

    __torch_function__ = _torch.no_torch_function  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        kwargs = kwargs or {}
        result = keep(func, args, kwargs) if (keep := KEEPING.get(func)) else None
        if result is not None:
            return result
        if func._schema.is_mutable:
            _refuse_writing(func, args, kwargs)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Float8Tensor):
        values = x.values()
        return _torch.unsafe_view(values, values.shape)  # a Function's result is no view

    @staticmethod
    def backward(ctx, dy):
        return dy


def quantize(x: torch.Tensor, cast: Cast, scale: torch.Tensor | None = None) -> Float8Tensor:
    """x [..., K] as a Float8Tensor under a cast.

    scale: use this one (x ≈ q * scale; it must have the shape the cast's granularity gives) instead of measuring x:
    what does not fit then saturates.  Rows count over the leading dimensions.  A scale's values are not looked at, as
    that would wait for the device: under one of 0 all numbers come back as 0, under Inf or NaN as NaN.
    Raises UnsupportedDtype for a dtype that is not FP32, BF16 or FP16 or a cast that is not to FP8, InvalidRecipe for
    what is no cast, ShapeError for a scale of another shape, BackendError for one on another device.

    >>> q = quantize(torch.tensor([[1.0, -3.0, 7.0]]), Cast(Format.named("E4M3"), power_of_2=True))
    >>> q.dequantize().tolist(), q.scale.item(), q.data.dtype
    ([[1.0, -3.0, 7.0]], 0.015625, torch.float8_e4m3fn)
    """
    UnsupportedDtype.unless(x, torch.Tensor, "quantize takes a tensor")
    InvalidRecipe.unless(cast, Cast, "quantize takes an fe.Cast")
    UnsupportedDtype.unless(scale, torch.Tensor | None, "quantize takes a tensor as scale")
    if x.dtype not in FLOATS or x.layout != torch.strided:
        raise UnsupportedDtype(f"quantize: x is {x.dtype}, {x.layout}; want dense float32, bfloat16 or float16")
    if not cast.is_fp8:
        raise UnsupportedDtype(f"quantize: {cast} has no scale; x.to({cast.format.dtype}) does it")
    if x.dim() == 0:
        raise ShapeError("quantize: x has no dimensions; want at least one")
    cast = replace(cast, scaling="current")
    with torch.no_grad():
        flat = _matrix(x.detach())
        if scale is None:
            operand = casts.quantize(flat, cast)
        else:
            given = scale.detach().float()
            if given.dim() == x.dim() > 2 and given.shape[:-1] == x.shape[:-1]:
                given = _matrix(given)  # as a result's own scale lies
            operand = casts.quantize_given(flat, cast, casts.shaped(given, flat, cast))
    scale = operand.scale
    if x.dim() > 2 and cast.rows == 1:
        scale = scale.view(*x.shape[:-1], scale.shape[-1])
    return _knowing(Float8Tensor(operand.data.view(x.shape), scale, cast.granularity, x.dtype), operand.power_of_2)


def matmul(a_MK, b_NK, *, bias_N: torch.Tensor | None = None, out: Format = BF16) -> torch.Tensor:
    """a [..., K] @ b[N, K].T + bias[N], of Float8Tensors or ordinary tensors; a result [..., N] in `out`.

    Two Float8Tensors multiply in FP8 (on the backend `fe.backend` or the device names), FP32 sums rounded once to
    `out`; beside an ordinary tensor a Float8Tensor is dequantised.  Raises ShapeError, and BackendError
    for E5M2 by E5M2 or operands on several devices.

    >>> a = quantize(torch.ones(2, 3), Cast(Format.named("E4M3"), power_of_2=True))
    >>> from fp8engine.numerics.formats import FP32
    >>> matmul(a, a, out=FP32)
    tensor([[3., 3.],
            [3., 3.]])
    """
    for x in (a_MK, b_NK):
        UnsupportedDtype.unless(x, torch.Tensor, "matmul takes tensors")
    UnsupportedDtype.unless(bias_N, torch.Tensor | None, "matmul takes a tensor as bias_N")
    UnsupportedDtype.unless(out, Format, "matmul takes a Format as out (fe.BF16)")
    if a_MK.dim() < 1 or b_NK.dim() != 2 or a_MK.shape[-1] != b_NK.shape[1]:
        raise ShapeError(f"matmul: want a [..., K] and b [N, K], got {list(a_MK.shape)} and {list(b_NK.shape)}")
    if out.is_fp8:
        raise UnsupportedDtype(f"matmul: out={out} needs a scale; quantize the result")
    if isinstance(a_MK, Float8Tensor) and isinstance(b_NK, Float8Tensor):
        y_MN = products.matmul(a_MK.operand(), b_NK.operand(), bias_N, out.dtype, "exact")
        return y_MN.view(*a_MK.shape[:-1], b_NK.shape[0])
    a_MK, b_NK = _plain(a_MK), _plain(b_NK)
    device.check_one("matmul", a_MK, b=b_NK, bias=bias_N)
    if bias_N is not None and bias_N.shape != b_NK.shape[:1]:
        raise ShapeError(f"matmul: bias is {list(bias_N.shape)}; b {list(b_NK.shape)} wants [{b_NK.shape[0]}]")
    if a_MK.dtype != b_NK.dtype:
        b_NK = b_NK.to(a_MK.dtype)
    y_MN = products.matmul_fp16(_matrix(a_MK), b_NK, None if bias_N is None else bias_N.to(a_MK.dtype), out.dtype)
    return y_MN.view(*a_MK.shape[:-1], b_NK.shape[0])


def _rebuild(codes: torch.Tensor, format: str, scale, granularity, dtype, power_of_2: bool) -> Float8Tensor:
    return _knowing(Float8Tensor(codes.view(Format.named(format).dtype), scale, granularity, dtype), power_of_2)


def _knowing(x: Float8Tensor, power_of_2: bool) -> Float8Tensor:
    x.power_of_2 = power_of_2
    return x


@functools.cache
def _cast_of(granularity: Granularity, dtype: torch.dtype) -> Cast:
    return Cast(Format.of(dtype), granularity)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """x with its leading dimensions as rows; their product is spelt out because -1 is ambiguous beside a 0."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _plain(x: Any) -> Any:
    return x.values() if isinstance(x, Float8Tensor) else x


def _refuse_writing(func, args, kwargs) -> None:
    """Raise for an operation that writes: what it writes to a dequantised copy would be lost silently."""
    for argument, value in itertools.zip_longest(func._schema.arguments, args):
        values = [value, kwargs.get(argument.name)] if argument.alias_info and argument.alias_info.is_write else []
        if any(isinstance(leaf, Float8Tensor) for leaf in tree_leaves(values)):
            raise UnsupportedDtype(
                f"{func} writes into a Float8Tensor, whose codes cannot hold what it computes: use the operation that "
                "returns a new tensor, or x = x.dequantize() before (for a layer's result: Recipe(stored=None))"
            )


def _same(func, args, kwargs):
    """A view of the same memory."""
    x = args[0]
    return x._viewed(func(x._data), func(x._scale), x.granularity)


def _clone(func, args, kwargs):
    """The operation on codes and scale alike."""
    found = args[0]._map(lambda inner: func(inner, *args[1:], **kwargs))
    found.source = args[0].source
    return found


def _view(func, args, kwargs):
    """Any view of codes under one scale."""
    x, *rest = args
    if not isinstance(x.granularity, PerTensor):
        return None
    return tree_map(lambda data: x._viewed(data, x._scale, x.granularity), func(x._data, *rest, **kwargs))


def _move(func, args, kwargs):
    """`.to`: another device keeps FP8, another dtype dequantises."""
    if kwargs.get("dtype") not in (None, args[0].dtype):
        return None
    return args[0]._map(lambda inner: func(inner, **{**kwargs, "dtype": None}))


def _transpose(func, args, kwargs):
    x, *dims = args
    if isinstance(x.granularity, PerTensor):
        return _view(func, args, kwargs)
    if func is aten.permute.default:  # .T
        dims = dims[0] if x.dim() == 2 and dims[0][0] % 2 == 1 else [0, 0]
    if x.dim() != 2 or (dims and {dim % 2 for dim in dims} != {0, 1}):
        return None
    return x._viewed(x._data.t(), x._scale.t(), _cast_of(x.granularity, x._data.dtype).t().granularity)


def _reshape(func, args, kwargs):
    """A view keeps FP8 where no group is cut: per tensor always, per row as long as the last dimension stays."""
    x, shape = args[0], args[1]
    if tuple(shape) == tuple(x.shape):
        return _same(aten.detach.default, (x,), {})
    if isinstance(x.granularity, PerTensor):
        return _view(func, args, kwargs)
    if _cast_of(x.granularity, x._data.dtype).rows == 1 and len(shape) and shape[-1] in (x.shape[-1], -1):
        data = func(x._data, shape)
        if data.shape[-1] == x.shape[-1]:
            scale = x._scale.reshape(*data.shape[:-1], x._scale.shape[-1])
            return x._viewed(data, scale, x.granularity)
    return None


def _strided(func, args, kwargs):
    """The same memory in the same shape, as fully_shard asks for it."""
    x, size, stride, *offset = args
    same = (tuple(size), tuple(stride)) == (tuple(x.shape), x.stride()) and offset in ([], [None], [x.storage_offset()])
    return _same(func=aten.detach.default, args=(x,), kwargs={}) if same else None


def _copy(func, args, kwargs):
    target, source = args[:2]
    if not isinstance(target, Float8Tensor):
        return target.copy_(source.dequantize())
    if any(getattr(source, name, None) != getattr(target, name) for name in ("format", "granularity")):
        cast = Cast(target.format, target.granularity, power_of_2=target.power_of_2)
        source = quantize(_plain(source).to(target.device), cast)
    target._data.copy_(source._data)
    target._scale.copy_(source._scale)
    target.power_of_2 = source.power_of_2
    return target


KEEPING = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _clone,
    _torch.to_copy: _move,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.view.default: _reshape,
    _torch.unsafe_view: _reshape,
    aten.reshape.default: _reshape,
    aten.copy_.default: _copy,
    aten.as_strided.default: _strided,
    **dict.fromkeys((aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default), _view),
    **dict.fromkeys((aten.unbind.int, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default), _view),
}

# Our own classes and nothing else, so that torch.load(weights_only=True), the default, reads our tensors.
torch.serialization.add_safe_globals([_rebuild, PerTensor, PerRow, PerBlock])
