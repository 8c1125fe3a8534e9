"""Casts to FP8 and back as operations: quantise, with the transpose and column sums, or under a given scale; decode.

A cast runs on Triton's kernels where there are FP8 Tensor Cores and the groups suit them, else on its twin in
reference/ (`_twin`).  Both give the same codes and scales bit for bit.

>>> quantize(torch.tensor([[1.0, -2.0]]), Cast.parse("e4m3 p2")).data.tolist()
[[128.0, -256.0]]
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from fp8engine.errors import ShapeError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import device, joined, reference, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.library import OPERATORS, call, direct, operation
from fp8engine.ops.reference import Operand, Slot, operand


def choose(where: torch.device) -> str:
    """The backend that casts, norms, activations and the update of scales run on: "triton" or "reference".

    "cublas" has matmuls only and leaves the choice open.
    """
    name = asked()
    if name == "reference":
        return name
    if where.type == "cuda":
        return "triton" if device.has_fp8(where) and triton_backend.usable() else "reference"
    return "triton" if name == "triton" and triton_backend.no_card(where) is None else "reference"


def _twin(x_MK: torch.Tensor, cast: Cast):
    """The module whose functions cast x here: `reference` or `triton_backend`, which share names and signatures."""
    if choose(x_MK.device) == "triton" and triton_backend.castable(x_MK, cast):
        return triton_backend
    return reference


def quantize(x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, held: torch.dtype | None = None) -> Operand:
    """x as an FP8 operand, its amax and counters written to the slot.

    held: the same values in that dtype instead of codes, for an emulated matmul; through the dispatcher it is codes.
    """
    if slot is not None and slot.group and cast.per_tensor:
        return joined.under_one_scale(lambda *given: quantize(*given, held=held), x_MK, cast, slot)
    if direct(x_MK):
        data, scale = _quantize(x_MK, cast, slot, held)
    else:
        data, scale = call("quantize", slot, x_MK, cast.text)
    return operand(data, scale, cast)


@overload
def cast_transpose(
    x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, sums: Literal[False] = False
) -> tuple[Operand, Operand]: ...


@overload
def cast_transpose(
    x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, *, sums: Literal[True]
) -> tuple[Operand, Operand, torch.Tensor]: ...


def cast_transpose(x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, sums: bool = False):
    """x quantised for the matmul that reduces its columns, and its transpose [K, M] for the one that reduces its rows.

    Both contiguous, from one read of x.  Groups of 1 x 128 of x are joined by groups of 1 x 128 of its transpose.
    sums: a third result, the sums of x's columns, FP32 [K], which the same read gives.
    """
    if slot is not None and slot.group and cast.per_tensor:
        return joined.under_one_scale(lambda *given: cast_transpose(*given, sums), x_MK, cast, slot)  # pyright: ignore[reportCallIssue] - a bool fits no overload
    if direct(x_MK):
        found = _cast_transpose(x_MK, cast, sums, slot)
    else:
        found = call("cast_transpose", slot, x_MK, cast.text, sums)
    data, scale, data_t, scale_t, sums_K = found
    first = operand(data, scale, cast)
    # Row scaling of x.T is column scaling of x: one cast describes both.
    # Not by _replace: torch 2.11 compiles no graph that returns what _replace made.
    second = operand(data_t, scale if cast.per_tensor else scale_t, cast)
    return (first, second, sums_K) if sums else (first, second)


def quantize_given(x_MK: torch.Tensor, cast: Cast, scale: torch.Tensor) -> Operand:
    """x as an FP8 operand under a scale that the caller chose; what does not fit saturates.

    Raises ShapeError for a scale that is neither one number nor one per group, BackendError for two devices.
    """
    device.check_one("quantize", x_MK, scale=scale)
    if scale.dim() and tuple(scale.shape) != cast.scale_shape(*x_MK.shape):
        want = list(cast.scale_shape(*x_MK.shape))
        raise ShapeError(f"quantize: scale is {list(scale.shape)}; {cast} of {list(x_MK.shape)} has {want}")
    data = encode(x_MK, cast, torch.ones_like(scale) / scale)
    return Operand(data, scale, cast.rows, cast.cols)  # the caller's scale is not known to be a power of two


def encode(x_MK: torch.Tensor, cast: Cast, s: torch.Tensor) -> torch.Tensor:
    """FP8 codes of x * s; s: FP32, the factor of each group (1 / scale), of shape `cast.scale_shape`, or one number.

    What does not fit saturates.  Casting with s and not with its inverse keeps the last bit that the inverse loses.

    >>> encode(torch.tensor([[1.0, -2.0]]), Cast.parse("e4m3"), torch.tensor(128.0)).tolist()
    [[128.0, -256.0]]
    """
    return OPERATORS.quantize_given(x_MK, cast.text, s)


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes as values in `dtype`, exact."""
    return OPERATORS.decode(codes, dtype)


def _shapes(x, text, *slot):
    cast = Cast.parse(text)
    m, k = x.shape
    return x.new_empty(m, k, dtype=cast.dtype), x.new_empty(cast.scale_shape(m, k), dtype=torch.float32)


def _shapes_of_both(x, text, sums, *slot):
    data, scale = _shapes(x, text)
    data_t, scale_t = _shapes(x.t(), text)
    sums_K = scale.new_empty(x.shape[1] if sums else 0)
    return data, scale, data_t, scale.new_empty(0) if Cast.parse(text).per_tensor else scale_t, sums_K


@operation("quantize(Tensor x, str cast) -> (Tensor, Tensor)", _shapes, slot=True)
def _quantize(x_MK, cast, slot=None, held=None):
    return reference.quantize(x_MK, cast, slot, held) if held else _twin(x_MK, cast).quantize(x_MK, cast, slot)


@operation(
    "cast_transpose(Tensor x, str cast, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _shapes_of_both,
    slot=True,
)
def _cast_transpose(x_MK, cast, sums=False, slot=None):
    """(data, scale, data of the transpose, its scale, sums of columns); empty: what is not needed."""
    first, second, *rest = _twin(x_MK, cast).cast_transpose(x_MK, cast, slot, sums)
    nothing = first[1].new_empty(0)
    return *first[:2], second[0], nothing if cast.per_tensor else second[1], rest[0] if sums else first[1].new_empty(0)


@operation("quantize_given(Tensor x, str cast, Tensor s) -> Tensor", lambda x, text, s: _codes(x, text))
def _quantize_given(x_MK, cast, s):
    return _twin(x_MK, cast).quantize_given(x_MK, cast, s)


def _codes(x, text):
    return x.new_empty(x.shape, dtype=Cast.parse(text).dtype)


operation(
    "decode(Tensor codes, ScalarType dtype) -> Tensor", lambda codes, dtype: torch.empty_like(codes, dtype=dtype)
)(reference.decode)
