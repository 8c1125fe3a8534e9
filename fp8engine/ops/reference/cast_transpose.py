"""Cast in both orientations: q for the matmul that reduces columns, q^T for the one that reduces rows.

    per tensor   q^T is the transpose of q: one scale serves both
    otherwise    each orientation is quantised from the 16-bit source, with scales along what its matmul reduces
    sums         sum[k] = sum over m of x[m, k] in FP32, of what x was before it was rounded: a gradient's are its dbias

The twin of kernels/cast_transpose.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference.matmul import column_sums
from fp8engine.ops.reference.operand import Operand, Slot, operand
from fp8engine.ops.reference.quantize import quantize


class Store(NamedTuple):
    """Which FP8 codes a norm or an activation writes beside its result: exactly those that a cast of the result gives.

    cast: quantised so; None: no codes.  transposed: the transpose's too.  slot: predicted scale, counters.
    """

    cast: Cast | None = None
    transposed: bool = False
    slot: Slot | None = None


IN_16_BITS = Store()


def cast_transpose(x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, sums: bool = False) -> tuple:
    """Return (x quantised along K, its transpose [K, M] quantised along M), the codes of both contiguous.

    cast: groups of the first; a 1 x 128 group becomes 128 x 1 of x for the second, whose scales lie in memory as these
    groups of x do: the first dimension is contiguous, as Hopper's TMA reads the scales of a tile's rows.
    sums: a third result, the sums of x's columns, FP32 [K]; not those of its codes, and NaN or Inf as x has them.

    >>> x_MK = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 4.0]])
    >>> q, q_t, sums_K = cast_transpose(x_MK, Cast.parse("e4m3 p2"), sums=True)
    >>> q_t.data.shape, (q_t.data.float() * q_t.scale)[:, 0].tolist(), sums_K.tolist()
    (torch.Size([3, 2]), [1.0, 2.0, 4.0], [4.0, 2.0, 8.0])
    """
    both = _both(x_MK, cast, slot)
    return (*both, column_sums(x_MK)) if sums else both


def _both(x_MK: torch.Tensor, cast: Cast, slot: Slot | None) -> tuple[Operand, Operand]:
    q = operand(*quantize(x_MK, cast, slot), cast)
    if cast.per_tensor:
        # A copy also of a single row, whose transpose is contiguous as it is.
        return q, q.t()._replace(data=q.data.t().clone(memory_format=torch.contiguous_format))
    down = cast.t()
    other = operand(*quantize(x_MK, down), down).t()
    return q, other._replace(data=other.data.contiguous(), scale=other.scale.t().contiguous().t())


def row_major(y_MK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y rounded to `dtype`, in rows, as a kernel writes it, where x's strides have made it something else."""
    return y_MK.to(dtype).contiguous()


def store(y_MK: torch.Tensor, dtype: torch.dtype, to: Store) -> tuple[torch.Tensor, Operand | None, Operand | None]:
    """Return (y rounded to `dtype`, its codes, those of its transpose), None for what `to` does not ask for.

    y_MK: FP32.

    >>> y, q, q_t = store(torch.tensor([[1.0, 2.0]]), torch.bfloat16, Store())
    >>> y.dtype, q, q_t
    (torch.bfloat16, None, None)
    """
    y_MK = row_major(y_MK, dtype)
    if to.cast is None:
        return y_MK, None, None
    if to.transposed:
        return y_MK, *cast_transpose(y_MK, to.cast, to.slot)
    return y_MK, operand(*quantize(y_MK, to.cast, to.slot), to.cast), None
