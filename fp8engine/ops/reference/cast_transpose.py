"""Quantise once, keep both orientations: q for the matmul that reduces columns, q^T for the one that reduces rows.

    per tensor   q^T is the transpose of q: one scale serves both
    otherwise    each orientation is quantised from the 16-bit source, with scales along what its matmul reduces
    sums         sum[k] = sum over m of x[m, k] in FP32, of what x was before it was rounded: a gradient's are its dbias

The twin of kernels/cast_transpose.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch

from fp8engine.ops.reference.matmul import column_sums
from fp8engine.ops.reference.operand import How, Operand, Slot
from fp8engine.ops.reference.quantize import quantize


class Store(NamedTuple):
    """How a producer (norm, activation) stores its FP32 result: once, in the format that its consumers read.

    how: quantise so; None: 16 bits.  transposed: keep the transpose too (FP8 only).  slot: predicted scale, counters.
    """

    how: How | None = None
    transposed: bool = False
    slot: Slot | None = None


IN_16_BITS = Store()


@overload
def cast_transpose(
    x_MK: torch.Tensor, how: How, slot: Slot | None = None, sums: Literal[False] = False
) -> tuple[Operand, Operand]: ...


@overload
def cast_transpose(
    x_MK: torch.Tensor, how: How, slot: Slot | None = None, *, sums: Literal[True]
) -> tuple[Operand, Operand, torch.Tensor]: ...


@overload
def cast_transpose(x_MK: torch.Tensor, how: How, slot: Slot | None, sums: bool) -> tuple: ...


def cast_transpose(x_MK: torch.Tensor, how: How, slot: Slot | None = None, sums: bool = False):
    """Return (x quantised along K, its transpose [K, M] quantised along M), both contiguous.

    how: groups of the first; a 1 x 128 group becomes 128 x 1 of x for the second.
    sums: a third result, the sums of x's columns, FP32 [K]; not those of its codes, and NaN or Inf as x has them.

    >>> x_MK = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 4.0]])
    >>> q, q_t, sums_K = cast_transpose(x_MK, How(torch.float8_e4m3fn, -1, -1, power_of_2=True), sums=True)
    >>> q_t.data.shape, (q_t.data.float() * q_t.scale)[:, 0].tolist(), sums_K.tolist()
    (torch.Size([3, 2]), [1.0, 2.0, 4.0], [4.0, 2.0, 8.0])
    """
    both = _both(x_MK, how, slot)
    return (*both, column_sums(x_MK)) if sums else both


def _both(x_MK: torch.Tensor, how: How, slot: Slot | None) -> tuple[Operand, Operand]:
    operand = Operand(*quantize(x_MK, how, slot), how.rows, how.cols, how.power_of_2)
    if how.per_tensor:
        return operand, operand.t()._replace(data=operand.data.t().contiguous())
    down = how._replace(rows=how.cols, cols=how.rows)
    other = Operand(*quantize(x_MK, down), down.rows, down.cols, how.power_of_2).t()
    return operand, other._replace(data=other.data.contiguous(), scale=other.scale.contiguous())


def store(y_MK: torch.Tensor, dtype: torch.dtype, to: Store) -> tuple[torch.Tensor | Operand, Operand | None]:
    """Return (y as `to` says, its transpose where asked).  y_MK: FP32.  dtype: of the result that is not quantised.

    >>> y, y_t = store(torch.tensor([[1.0, 2.0]]), torch.bfloat16, Store())
    >>> y.dtype, y_t
    (torch.bfloat16, None)
    """
    if to.how is None:
        return y_MK.to(dtype), None
    if to.transposed:
        return cast_transpose(y_MK, to.how, to.slot)
    return Operand(*quantize(y_MK, to.how, to.slot), to.how.rows, to.how.cols, to.how.power_of_2), None
