"""Activations, plain and gated, stored in the format that the next matmul reads; and their backward.

    relu       max(x, 0)
    gelu       x Phi(x),  Phi(x) = (1 + erf(x / sqrt 2)) / 2
    gelu_tanh  x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
    silu       x sigma(x),  sigma(x) = 1 / (1 + e^-x)

    plain      y[m, n] = f(x[m, n])                          dx = dy * f'(x)
    gated      y[m, n] = f(gate[m, n]) * up[m, n]            dgate = dy * up * f'(gate)    dup = dy * f(gate)
               x[m, 2 n] = [gate | up]: the gate is the first half of the last dimension, as in Llama's fused
               gate_up_proj; `torch.nn.functional.glu` has it second
    swiglu     gated silu    geglu, geglu_tanh     gated gelu, gelu_tanh
    backward   dbias[k] = sum_m dx[m, k], of the matmul that made x, before dx is rounded

All of it in FP32, whatever x's dtype; the FP32 result is rounded once: to x's dtype, or straight to FP8.
Sources: Hendrycks, Gimpel 2016 (arXiv 1606.08415), GELU and SiLU; Shazeer 2020 (arXiv 2002.05202), the gated ones.
The twin of kernels/act_quantize.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8engine.errors import ShapeError, UnknownName
from fp8engine.ops.reference.cast_transpose import IN_16_BITS, Store, store
from fp8engine.ops.reference.operand import Operand

aten = torch.ops.aten  # backward formulas in one pass each


class Activation(NamedTuple):
    """f, (dy, x) -> dy * f'(x), and whether the input holds a gate beside the value that f's result multiplies."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gated: bool = False


_GELU = Activation(aten.gelu, aten.gelu_backward)
_GELU_TANH = Activation(
    lambda x: aten.gelu(x, approximate="tanh"), lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh")
)
_SILU = Activation(aten.silu, aten.silu_backward)
# `x <= 0` is false for NaN, so that a NaN's gradient passes, as in torch.
_RELU = Activation(torch.relu, lambda dy, x: dy.masked_fill(x <= 0, 0.0))
ACTIVATIONS = {
    "relu": _RELU,
    "gelu": _GELU,
    "gelu_tanh": _GELU_TANH,
    "silu": _SILU,
    "swiglu": _SILU._replace(gated=True),
    "geglu": _GELU._replace(gated=True),
    "geglu_tanh": _GELU_TANH._replace(gated=True),
}


class ActGradients(NamedTuple):
    """dx, its transposed copy where asked, and the sum of dx over rows in FP32."""

    dx_MK: torch.Tensor | Operand
    dx_KM: Operand | None
    dbias_K: torch.Tensor


def act_quantize(
    x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS
) -> tuple[torch.Tensor | Operand, Operand | None]:
    """Return (y, y transposed where asked).

    x_MK: FP32, BF16 or FP16; gated kinds take K = 2 N as [gate | up] and give y[M, N].
    kind: a key of ACTIVATIONS.  to: format, counters, transposed copy.
    Raises UnknownName for another kind, ShapeError for a gated one with an odd K.

    >>> act_quantize(torch.tensor([[-1.0, 2.0]]), "relu")[0].tolist()
    [[0.0, 2.0]]
    >>> act_quantize(torch.tensor([[30.0, 2.0]]), "swiglu")[0].tolist()  # silu(30) * 2
    [[60.0]]
    """
    activation = _activation(kind, x_MK)
    if not activation.gated:
        return store(activation.forward(x_MK.float()), x_MK.dtype, to)
    gate_MN, up_MN = x_MK.float().chunk(2, dim=1)
    return store(activation.forward(gate_MN) * up_MN, x_MK.dtype, to)


def act_quantize_backward(dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS) -> ActGradients:
    """Gradients of `act_quantize`: dx [M, K] in x's dtype, or quantised for the layer below as `to` says, and dbias.

    dy_MN: any of x's dtypes; N = K, or K / 2 for a gated kind, whose dx is [dgate | dup].

    >>> found = act_quantize_backward(torch.tensor([[5.0, 7.0], [1.0, 1.0]]), torch.tensor([[-1.0, 2.0]] * 2), "relu")
    >>> found.dx_MK.tolist(), found.dbias_K.tolist()
    ([[0.0, 7.0], [0.0, 1.0]], [0.0, 8.0])
    """
    activation = _activation(kind, x_MK)
    x, dy = x_MK.float(), dy_MN.float()
    if activation.gated:
        gate_MN, up_MN = x.chunk(2, dim=1)
        dx_MK = torch.cat([activation.backward(dy * up_MN, gate_MN), dy * activation.forward(gate_MN)], dim=1)
    else:
        dx_MK = activation.backward(dy, x)
    return ActGradients(*store(dx_MK, x_MK.dtype, to), dx_MK.sum(0))


def _activation(kind: str, x_MK: torch.Tensor) -> Activation:
    if kind not in ACTIVATIONS:
        raise UnknownName("activation", kind, ACTIVATIONS)
    if ACTIVATIONS[kind].gated and x_MK.shape[1] % 2:
        raise ShapeError(f"{kind} takes [gate | up], an even number of columns; got {tuple(x_MK.shape)}")
    return ACTIVATIONS[kind]
