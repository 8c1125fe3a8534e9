"""Casts to FP8 and back as operations: quantise, with the transpose and column sums, or under a given scale; decode.

A cast runs on Triton's kernels where there are FP8 Tensor Cores and the groups suit them, else on its twin in
reference/ (`_twin`).  Both give the same codes and scales bit for bit.

>>> quantize(torch.tensor([[1.0, -2.0]]), Cast.parse("e4m3 p2")).data.tolist()
[[128.0, -256.0]]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8engine.errors import ShapeError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import device, joined, reference, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.library import direct, operation
from fp8engine.ops.reference import Operand, Slot, operand
from fp8engine.ops.reference.scale import FP32_MAX


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


def twin(where: torch.device):
    """The module of that backend, `reference` or `triton_backend`, whose functions share names and signatures."""
    return triton_backend if choose(where) == "triton" else reference


def _twin(x_MK: torch.Tensor, cast: Cast):
    """The module whose functions cast x here; of nothing there is nothing to launch."""
    ours = x_MK.numel() > 0 and triton_backend.castable(cast.rows, cast.cols)
    return triton_backend if ours and choose(x_MK.device) == "triton" else reference


def quantize(x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, held: torch.dtype | None = None) -> Operand:
    """x as an FP8 operand, its amax and counters written to the slot.

    held: the same values in that dtype instead of codes, for an emulated matmul; through the dispatcher it is codes.
    """
    if slot is not None and slot.group and cast.per_tensor:
        return joined.under_one_scale(lambda *given: quantize(*given, held=held), x_MK, cast, slot)
    if held is not None and direct(x_MK):
        return operand(*reference.quantize(x_MK, cast, slot, held), cast)
    data, scale = _quantize(x_MK, cast, slot=slot)
    return operand(data, scale, cast)


def cast_transpose(x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, sums: bool = False) -> tuple:
    """x quantised for the matmul that reduces its columns, and its transpose [K, M] for the one that reduces its rows.

    Both contiguous, from one read of x.  Groups of 1 x 128 of x are joined by groups of 1 x 128 of its transpose.
    sums: a third result, the sums of x's columns, FP32 [K], which the same read gives.
    """
    if slot is not None and slot.group and cast.per_tensor:
        return joined.under_one_scale(lambda *given: cast_transpose(*given, sums=sums), x_MK, cast, slot)
    *codes, sums_K = _cast_transpose(x_MK, cast, sums, slot=slot)
    both = operands(codes, cast, transposed=True)
    return (*both, sums_K) if sums else both


def operands(codes: Sequence, cast: Cast | None, transposed: bool) -> tuple:
    """(x quantised, its transpose quantised), of what `taken_apart` gives; None for what there is not."""
    if cast is None:
        return None, None
    data, scale, data_t, scale_t = codes
    # Row scaling of x.T is column scaling of x: one cast describes both.
    # Not by _replace: torch 2.11 compiles no graph that returns what _replace made.
    other = operand(data_t, scale if cast.per_tensor else scale_t, cast) if transposed else None
    return operand(data, scale, cast), other


def taken_apart(q: tuple | None, q_t: tuple | None, cast: Cast | None) -> tuple:
    """(data, scale, data of the transpose, its scale where it has one of its own), None for what there is not."""
    if q is None or cast is None:
        return None, None, None, None
    data_t, scale_t = (None, None) if q_t is None else q_t[:2]
    return *q[:2], data_t, None if cast.per_tensor else scale_t


def quantize_given(x_MK: torch.Tensor, cast: Cast, scale: torch.Tensor) -> Operand:
    """x as an FP8 operand under a scale that the caller chose; what does not fit saturates.

    Raises ShapeError for a scale that is neither one number nor one per group, BackendError for two devices.
    """
    device.check_one("quantize", x_MK, scale=scale)
    if scale.dim():
        scale = shaped(scale, x_MK, cast)
    data = encode(x_MK, cast, (torch.ones_like(scale) / scale).clamp(max=FP32_MAX))  # as a measured s: 0 * Inf is NaN
    return Operand(data, scale, cast.rows, cast.cols)  # the caller's scale is not known to be a power of two


def shaped(scale: torch.Tensor, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
    """A scale in the shape that the cast of x has; one number has it in any shape.  Raises ShapeError for others."""
    want = cast.scale_shape(*x_MK.shape)
    if tuple(scale.shape) != want and not (cast.per_tensor and scale.numel() == 1):
        raise ShapeError(f"quantize: scale is {list(scale.shape)}; {cast} of {list(x_MK.shape)} has {list(want)}")
    return scale.reshape(want)


def _shapes(x, cast):
    m, k = x.shape
    return x.new_empty(m, k, dtype=cast.dtype), x.new_empty(cast.scale_shape(m, k), dtype=torch.float32)


def shapes_of_both(x, cast, transposed):
    """What `taken_apart` gives of the codes of x, without values."""
    other = _shapes(x.t(), cast) if cast and transposed else None
    if other is not None:
        other = other[0], x.new_empty(other[1].shape[::-1], dtype=torch.float32).t()  # as x's own groups lie
    return taken_apart(_shapes(x, cast) if cast else None, other, cast)


def _shapes_and_sums(x, cast, sums):
    return *shapes_of_both(x, cast, True), x.new_empty(x.shape[1], dtype=torch.float32) if sums else None


@operation("quantize(Tensor x, str cast) -> (Tensor, Tensor)", _shapes, slot=True)
def _quantize(x_MK, cast, slot=None):
    return _twin(x_MK, cast).quantize(x_MK, cast, slot)


@operation(
    "cast_transpose(Tensor x, str cast, bool sums) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _shapes_and_sums,
    slot=True,
)
def _cast_transpose(x_MK, cast, sums, slot=None) -> tuple:
    q, q_t, *rest = _twin(x_MK, cast).cast_transpose(x_MK, cast, slot, sums)
    return *taken_apart(q, q_t, cast), rest[0] if rest else None


@operation("quantize_given(Tensor x, str cast, Tensor s) -> Tensor", lambda x, cast, s: _shapes(x, cast)[0])
def encode(x_MK: torch.Tensor, cast: Cast, s: torch.Tensor) -> torch.Tensor:
    """FP8 codes of x * s; s: FP32, the factor of each group (1 / scale), of shape `cast.scale_shape`, or one number.

    What does not fit saturates.  Casting with s and not with its inverse keeps the last bit that the inverse loses.

    >>> encode(torch.tensor([[1.0, -2.0]]), Cast.parse("e4m3"), torch.tensor(128.0)).tolist()
    [[128.0, -256.0]]
    """
    return _twin(x_MK, cast).quantize_given(x_MK, cast, s)


@operation("decode(Tensor codes, ScalarType dtype) -> Tensor", lambda codes, to: torch.empty_like(codes, dtype=to))
def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes as values in `dtype`, exact."""
    return reference.decode(codes, dtype)
