"""Activations, plain and gated, with the FP8 codes of the result that the next matmul reads; and their backward.

    plain      y[m, n] = f(x[m, n])                    dx = dy * f'(x)
    gated      y[m, n] = f(gate[m, n]) * u(up[m, n])   dgate = dy * u(up) * f'(gate)    dup = dy * f(gate) * u'(up)
               x[m, 2 n] = [gate | up]: the gate is the first half of the last dimension, as in Llama's fused
               gate_up_proj; `torch.nn.functional.glu` has it second; or gate and up are two matrices
    backward   dbias[k] = sum_m dx[m, k], of the matmul that made x, of dx as it was rounded

f and u of each kind, with their sources: activations.py.
All of it in FP32, whatever x's dtype, to which y and dx are rounded; codes are those of the rounded result.
The twin of kernels/act_quantize.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.reference.cast_transpose import IN_16_BITS, Store, row_major, store
from fp8engine.ops.reference.matmul import column_sums
from fp8engine.ops.reference.operand import Operand


class ActGradients(NamedTuple):
    """dx in x's dtype, its codes and those of its transpose where asked, and the sums of its columns in FP32.

    dup_MN: where up was a matrix of its own, its gradient; dx is then the gate's, and sums are not taken.
    """

    dx_MK: torch.Tensor
    q: Operand | None = None
    q_t: Operand | None = None
    dup_MN: torch.Tensor | None = None
    dbias_K: torch.Tensor | None = None


def act_quantize(
    x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS, up_MN: torch.Tensor | None = None
) -> tuple[torch.Tensor, Operand | None, Operand | None]:
    """Return (y in x's dtype, its codes, those of its transpose); codes are None where `to` asks for none.

    x_MK: FP32, BF16 or FP16; gated kinds take K = 2 N as [gate | up] and give y[M, N], or x is the gate [M, N].
    kind: a key of ACTIVATIONS.  up_MN: of a gated kind, where x is the gate.  ops/norm_act.py refuses another kind.

    >>> act_quantize(torch.tensor([[-1.0, 2.0]]), "relu")[0].tolist()
    [[0.0, 2.0]]
    >>> act_quantize(torch.tensor([[30.0, 2.0]]), "swiglu")[0].tolist()  # silu(30) * 2
    [[60.0]]
    """
    activation = ACTIVATIONS[kind]
    y_MN = activation(x_MK.float()) if up_MN is None else activation.of(x_MK.float(), up_MN.float())
    return store(y_MN, x_MK.dtype, to)


def act_quantize_backward(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to: Store = IN_16_BITS, up_MN: torch.Tensor | None = None
) -> ActGradients:
    """Gradients of `act_quantize`: dx [M, K] with its codes and dbias; or, beside up, dgate and dup.

    dy_MN: any of x's dtypes; N = K, or K / 2 for a gated kind, whose dx is [dgate | dup].  up_MN: asks for no codes.

    >>> found = act_quantize_backward(torch.tensor([[5.0, 7.0], [1.0, 1.0]]), torch.tensor([[-1.0, 2.0]] * 2), "relu")
    >>> found.dx_MK.tolist(), found.dbias_K.tolist()
    ([[0.0, 7.0], [0.0, 1.0]], [0.0, 8.0])
    """
    activation = ACTIVATIONS[kind]
    if up_MN is not None:
        dgate_MN, dup_MN = activation.gradients(dy_MN.float(), x_MK.float(), up_MN.float())
        return ActGradients(row_major(dgate_MN, x_MK.dtype), dup_MN=row_major(dup_MN, x_MK.dtype))
    dx_MK, q, q_t = store(activation.gradient(dy_MN.float(), x_MK.float()), x_MK.dtype, to)
    return ActGradients(dx_MK, q, q_t, None, column_sums(dx_MK))
