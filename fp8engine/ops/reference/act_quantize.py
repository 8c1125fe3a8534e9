"""Activations, plain and gated, stored in the format that the next matmul reads; and their backward.

    plain      y[m, n] = f(x[m, n])                    dx = dy * f'(x)
    gated      y[m, n] = f(gate[m, n]) * u(up[m, n])   dgate = dy * u(up) * f'(gate)    dup = dy * f(gate) * u'(up)
               x[m, 2 n] = [gate | up]: the gate is the first half of the last dimension, as in Llama's fused
               gate_up_proj; `torch.nn.functional.glu` has it second
    backward   dbias[k] = sum_m dx[m, k], of the matmul that made x, before dx is rounded

f and u of each kind, with their sources: activations.py.
All of it in FP32, whatever x's dtype; the FP32 result is rounded once: to x's dtype, or straight to FP8.
The twin of kernels/act_quantize.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.errors import ShapeError, UnknownName
from fp8engine.ops.reference.activations import ACTIVATIONS, Activation
from fp8engine.ops.reference.cast_transpose import IN_16_BITS, Store, store
from fp8engine.ops.reference.operand import Operand


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
    return store(activation(x_MK.float()), x_MK.dtype, to)


def act_quantize_backward(dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS) -> ActGradients:
    """Gradients of `act_quantize`: dx [M, K] in x's dtype, or quantised for the layer below as `to` says, and dbias.

    dy_MN: any of x's dtypes; N = K, or K / 2 for a gated kind, whose dx is [dgate | dup].

    >>> found = act_quantize_backward(torch.tensor([[5.0, 7.0], [1.0, 1.0]]), torch.tensor([[-1.0, 2.0]] * 2), "relu")
    >>> found.dx_MK.tolist(), found.dbias_K.tolist()
    ([[0.0, 7.0], [0.0, 1.0]], [0.0, 8.0])
    """
    activation = _activation(kind, x_MK)
    dx_MK = activation.gradient(dy_MN.float(), x_MK.float())
    return ActGradients(*store(dx_MK, x_MK.dtype, to), dx_MK.sum(0))


def _activation(kind: str, x_MK: torch.Tensor) -> Activation:
    if kind not in ACTIVATIONS:
        raise UnknownName("activation", kind, ACTIVATIONS)
    if ACTIVATIONS[kind].gated and x_MK.shape[1] % 2:
        raise ShapeError(f"{kind} takes [gate | up], an even number of columns; got {tuple(x_MK.shape)}")
    return ACTIVATIONS[kind]
