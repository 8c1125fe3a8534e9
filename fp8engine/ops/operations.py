"""One function per operation, the backend chosen per call; operators of torch, so torch.compile takes them.

Which backend a matmul runs on: fp8engine/ops/dispatch.py.

>>> a = quantize(torch.ones(2, 4), How(torch.float8_e4m3fn, -1, -1, power_of_2=True))
>>> with backend("reference"):
...     matmul(a, a, out=torch.float32).tolist()
[[4.0, 4.0], [4.0, 4.0]]
"""

from __future__ import annotations

import functools
from typing import Literal, overload

import torch

from fp8engine import _torch
from fp8engine.errors import BackendError, ShapeError, UnknownName
from fp8engine.numerics.recipe import Cast, PerBlock, PerRow
from fp8engine.ops import device, execute, reference
from fp8engine.ops.dispatch import backend, choose, choose_16_bits, emulated, why_emulated
from fp8engine.ops.reference import Epilogue, How, Operand, Slot

__all__ = [
    "backend",
    "cast_transpose",
    "choose",
    "choose_16_bits",
    "decode",
    "direct",
    "emulated",
    "how",
    "matmul",
    "matmul_epilogue",
    "matmul_fp16",
    "quantize",
    "quantize_given",
    "scale_update",
    "why_emulated",
]


@functools.cache
def how(cast: Cast, held: torch.dtype | None = None) -> How:
    """A recipe's cast in the words of the kernels.

    >>> from fp8engine.numerics.formats import E4M3
    >>> str(how(Cast(E4M3, PerBlock(1, 128), power_of_2=True)))
    'float8_e4m3fn 1x128 p2'
    """
    group = cast.granularity
    rows, cols = -1, -1
    if isinstance(group, PerBlock):
        rows, cols = group.rows, group.cols
    elif isinstance(group, PerRow):
        rows, cols = (1, -1) if group.dim == -1 else (-1, 1)
    return How(cast.format.dtype, rows, cols, cast.power_of_2, cast.delayed, held)


def quantize(x_MK: torch.Tensor, how: How, slot: Slot | None = None) -> Operand:
    """x as an FP8 operand, its amax and counters written to the slot."""
    if direct(x_MK):
        data, scale = execute.quantize(x_MK, how, slot)
    elif slot is None:
        data, scale = torch.ops.fp8engine.quantize.default(x_MK, str(how))
    else:
        data, scale = torch.ops.fp8engine.quantize_recorded.default(x_MK, str(how), *slot[:5])
    return Operand(data, scale, how.rows, how.cols, how.power_of_2)


@overload
def cast_transpose(
    x_MK: torch.Tensor, how: How, slot: Slot | None = None, sums: Literal[False] = False
) -> tuple[Operand, Operand]: ...


@overload
def cast_transpose(
    x_MK: torch.Tensor, how: How, slot: Slot | None = None, *, sums: Literal[True]
) -> tuple[Operand, Operand, torch.Tensor]: ...


def cast_transpose(x_MK: torch.Tensor, how: How, slot: Slot | None = None, sums: bool = False):
    """x quantised for the matmul that reduces its columns, and its transpose [K, M] for the one that reduces its rows.

    Both contiguous, from one read of x.  Groups of 1 x 128 of x are joined by groups of 1 x 128 of its transpose.
    sums: a third result, the sums of x's columns, FP32 [K], which the same read gives.
    """
    if direct(x_MK):
        found = execute.cast_transpose(x_MK, how, slot, sums)
    elif slot is None:
        found = torch.ops.fp8engine.cast_transpose.default(x_MK, str(how), sums)
    else:
        found = torch.ops.fp8engine.cast_transpose_recorded.default(x_MK, str(how), sums, *slot[:5])
    data, scale, turned, scale_turned, sums_K = found
    first = Operand(data, scale, how.rows, how.cols, how.power_of_2)
    # Down x's columns is along the transpose's rows: 1 x -1 of x is cast again as -1 x 1, which lies as 1 x -1 there.
    # Not by _replace: torch 2.11 compiles no graph that returns what _replace made.
    scale_turned = scale if how.per_tensor else scale_turned
    second = Operand(turned, scale_turned, how.rows, how.cols, how.power_of_2)
    return (first, second, sums_K) if sums else (first, second)


def quantize_given(x_MK: torch.Tensor, how: How, scale: torch.Tensor) -> Operand:
    """x as an FP8 operand under a scale that the caller chose; what does not fit saturates.

    Raises ShapeError for a scale that is neither one number nor one per group, BackendError for two devices.
    """
    device.check_one("quantize", x_MK, scale=scale)
    if scale.dim() and tuple(scale.shape) != how.scale_shape(*x_MK.shape):
        want = list(how.scale_shape(*x_MK.shape))
        raise ShapeError(f"quantize: scale is {list(scale.shape)}; {how} of {list(x_MK.shape)} has {want}")
    data = torch.ops.fp8engine.quantize_given(x_MK, str(how), scale)
    return Operand(data, scale, how.rows, how.cols)  # the caller's scale: whether it is a power of two, nobody asked


def matmul(a: Operand, b: Operand, bias_N=None, out: torch.dtype = torch.bfloat16, precision="exact") -> torch.Tensor:
    """a @ b.T + bias on the backend that `choose` names.  out: dtype of the result.

    precision: "fast" may keep Hopper's ~13-bit partial sums, "promoted" sums in FP32; both may round once to 16 bits
    before an FP32 result; "exact" sums in FP32 and rounds only to `out`.

    Raises ShapeError for operands, scales or a bias that do not fit together, BackendError for operands on several
    devices, a backend that was asked for and cannot run them, or E5M2 by E5M2.
    """
    _check(a, b, bias_N)
    if direct(a.data):
        return execute.matmul(a, b, bias_N, out, precision)
    return torch.ops.fp8engine.matmul.default(a.data, b.data, a.scale, b.scale, bias_N, _groups(a, b), out, precision)


def matmul_epilogue(a: Operand, b: Operand, epilogue: Epilogue, precision: str = "exact") -> torch.Tensor:
    """`matmul` with an activation, statistics or an FP8 result decided before the store; one launch on Triton.

    Elsewhere the FP32 product is finished in plain torch.  Raises as `matmul` does; UnknownName for an activation.

    >>> one = Operand(torch.ones(1, 2).to(torch.float8_e4m3fn), torch.tensor(1.0))
    >>> end = Epilogue(None, torch.float8_e4m3fn, "relu", torch.tensor(0.5))
    >>> matmul_epilogue(one, one, end).float().item()  # 2 = 4 * 0.5
    4.0
    """
    _check(a, b, epilogue.bias_N)
    if epilogue.activation not in reference.KINDS:
        raise UnknownName("activation of a matmul", epilogue.activation, reference.KINDS)
    if direct(a.data):
        return execute.matmul_epilogue(a, b, epilogue, precision)
    return torch.ops.fp8engine.matmul_epilogue.default(
        a.data, b.data, a.scale, b.scale, _groups(a, b), precision, *epilogue
    )


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N=None, out: torch.dtype | None = None) -> torch.Tensor:
    """a @ b.T + bias of ordinary tensors of any strides; out: dtype of the result, default a's.  Differentiable.

    >>> matmul_fp16(torch.ones(2, 3), torch.ones(1, 3)).tolist()
    [[3.0], [3.0]]
    """
    out = out or a_MK.dtype
    if a_MK.dtype.itemsize != 2 or choose_16_bits(a_MK.device, (a_MK.shape[0], b_NK.shape[0])) == "torch":
        return reference.matmul_fp16(a_MK, b_NK, bias_N, out)
    return torch.ops.fp8engine.matmul_fp16.default(a_MK, b_NK, bias_N, out)


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 codes as values held in `dtype`, exact."""
    return torch.ops.fp8engine.decode(codes, dtype)


def scale_update(history_HS, live_2S, rules_3S, ranks: str = "", saved_1: torch.Tensor | None = None) -> None:
    """Enter a step's amaxes into the windows and predict the next scales: one call for a whole model.

    saved_1: where given, the amaxes of several ranks are joined first, as ranks.py says.
    ranks: name of the process group that is joined; "" for DistributedDataParallel's, inside of one.
    """
    torch.ops.fp8engine.scale_update(history_HS, live_2S, rules_3S, ranks, saved_1)


def direct(x: torch.Tensor) -> bool:
    """Whether the dispatcher has nothing to add: eager code, real data, no mode watching.  Saves 8 us a call."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and _torch.dispatch_modes() == 0
        and not x.is_meta
        and not torch.is_grad_enabled()
    )


def _check(a: Operand, b: Operand, bias_N) -> None:
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        raise BackendError("Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3")
    if a.data.dim() != 2 or b.data.dim() != 2 or a.data.shape[1] != b.data.shape[1]:
        raise ShapeError(f"matmul: want a [M, K] and b [N, K], got {list(a.data.shape)} and {list(b.data.shape)}")
    if bias_N is not None and bias_N.shape != b.data.shape[:1]:
        raise ShapeError(f"matmul: bias is {list(bias_N.shape)}; b {list(b.data.shape)} wants [{b.data.shape[0]}]")
    device.check_one("matmul", a.data, b=b.data, scale_of_a=a.scale, scale_of_b=b.scale, bias=bias_N)
    for name, (data, scale, rows, cols, _) in (("a", a), ("b", b)):
        if scale.dim() == 0:
            continue
        m, k = data.shape
        want = (1 if rows == -1 else -(-m // rows), 1 if cols == -1 else -(-k // cols))
        if tuple(scale.shape) != want:
            raise ShapeError(
                f"matmul: scale of {name} is {list(scale.shape)}; {rows} x {cols} groups of {[m, k]} have {list(want)}"
            )


def _groups(a: Operand, b: Operand) -> list[int]:
    return [a.rows, a.cols, b.rows, b.cols, int(a.power_of_2 and b.power_of_2)]
