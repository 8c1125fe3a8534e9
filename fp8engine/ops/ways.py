"""Ways to run a norm or an activation: our kernel, our kernel by way of FP32, or the twin in plain torch.

| asked for | per tensor | 1 x -1 | 1 x 128 | other blocks up to 128 |
| --- | --- | --- | --- | --- |
| norm or activation, forward or backward; 16 bits always | kernel | kernel | kernel | fp32 |
| norm with a transposed copy | transposed | fp32 | fp32 | fp32 |
| activation with a transposed copy | kernel | kernel | fp32 | fp32 |
| backward of a gated activation, N not a multiple of 128 | kernel | kernel | fp32 | fp32 |
| norm of more than 16,384 columns | twin | twin | twin | twin |
| a predicted scale | kernel, transposed | twin | twin | twin |
| emulated values, blocks over 128 | twin | twin | twin | twin |

    kernel      y leaves the registers in its final format
    transposed  the kernel stores q; q^T are the same codes under the same scale: 2 bytes an element more
    fp32        the kernel stores y in FP32 and a cast kernel reads it: 16 bytes an element of BF16 more, or 20
    twin        plain torch, a pass over FP32 for each operation; BackendError where "triton" was asked for

All of them round y once, from FP32: what is stored in 16 bits and then quantised would be rounded twice, and shapes
that take another way would get other codes.  Where casts run on the reference, all of this does.
The table follows from what the launchers return (`unsupported` in kernels/); tests/interpreted holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8engine.errors import BackendError
from fp8engine.ops import triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.casts import choose
from fp8engine.ops.reference import How, Norm, Operand, Store
from fp8engine.ops.reference.cast_transpose import IN_16_BITS


class Way(NamedTuple):
    """One way to run: "kernel", "transposed", "fp32" or "twin"; and why not as a kernel alone, None where it does."""

    name: str
    reason: str | None = None

    @property
    def backend(self) -> str:
        """The backend's name, for a report."""
        return "reference" if self.name == "twin" else "triton"


def norm_way(x_MK: torch.Tensor, norm: Norm, to: Store) -> Way:
    """How the norm of x runs here and now, forward or backward.

    Raises BackendError where the backend asked for is "triton" and its kernels cannot.

    >>> norm_way(torch.ones(2, 4), Norm("rms"), IN_16_BITS)
    Way(name='twin', reason='casts run on the reference here')
    """
    return _way(x_MK, to, lambda to: triton_backend.norm_unsupported(x_MK.shape, norm, to))


def act_way(x_MK: torch.Tensor, kind: str, to: Store, backward: bool = False) -> Way:
    """How the activation of x runs here and now.

    Raises BackendError where the backend asked for is "triton" and its kernels cannot.

    >>> act_way(torch.ones(2, 4), "relu", IN_16_BITS).backend
    'reference'
    """
    return _way(x_MK, to, lambda to: triton_backend.act_unsupported(x_MK.shape, kind, to, backward))


def _way(x_MK: torch.Tensor, to: Store, refuses: Callable[[Store], str | None]) -> Way:
    """refuses: why the launcher does not store x's result so, or None."""
    if choose(x_MK.device) == "reference":
        return Way("twin", "casts run on the reference here")
    if (reason := refuses(to)) is None:
        return Way("kernel")
    plain = refuses(IN_16_BITS)
    if plain is None and to.how is not None:
        if to.how.per_tensor and refuses(to._replace(transposed=False)) is None:
            return Way("transposed", reason)
        if (plain := _uncastable(to.how)) is None:
            return Way("fp32", reason)
    reason = plain or reason
    if asked() == "triton":
        raise BackendError(
            f"backend 'triton' cannot produce this from x {list(x_MK.shape)}: {reason}; use fe.backend('reference')"
        )
    return Way("twin", reason)


def _uncastable(how: How) -> str | None:
    """Why our casts do not store FP32 so, or None."""
    if how.held is not None:
        return "values held on the FP8 grid in 16 bits are an emulation's"
    if how.delayed and not how.per_tensor:
        return "a predicted scale is one per tensor"
    if not triton_backend.casts_groups(how):
        return f"scales per {how.rows} x {how.cols} block; casts take powers of two up to 128, or whole lines"
    return None


def produce(way: Way, x_MK: torch.Tensor, to: Store, launch: Callable[[torch.Tensor, Store], tuple]) -> tuple:
    """(y, y transposed where asked, whatever else the launcher returns).  launch: takes x and how to store."""
    if way.name == "fp32" and to.how is not None:
        y_MK, _, *others = launch(x_MK.float(), IN_16_BITS)  # a launcher stores what it does not quantise in x's dtype
        return *_cast(y_MK, to.how, to), *others
    after = way.name == "transposed"
    y, y_t, *others = launch(x_MK, to._replace(transposed=to.transposed and not after))
    if to.how is None:
        return y, y_t, *others
    q = Operand(*y)
    if after:
        return q, q._replace(data=triton_backend.transpose_codes(q.data)), *others
    return q, None if y_t is None else Operand(*y_t), *others


def _cast(y_MK: torch.Tensor, how: How, to: Store) -> tuple[Operand, Operand | None]:
    """FP32 values as `to` says, by the cast kernels."""
    if not to.transposed:
        return _operand(triton_backend.quantize(y_MK, how, to.slot), how), None
    first, second = triton_backend.cast_transpose(y_MK, how, to.slot)
    return _operand(first, how), _operand(second, how)


def _operand(cast: tuple[torch.Tensor, torch.Tensor], how: How) -> Operand:
    return Operand(*cast, how.rows, how.cols, how.power_of_2)


def row_major(y: torch.Tensor | Operand, y_t: Operand | None) -> tuple[torch.Tensor | Operand, Operand | None]:
    """A twin's results as kernels lay them and fakes promise them, also where x is a transposed view."""
    if not isinstance(y, Operand):
        return y.contiguous(), None
    y = y._replace(data=y.data.contiguous())
    if y_t is not None and y_t.data.data_ptr() == y.data.data_ptr():
        # A single row's transpose is a view of it, and an operator returns tensors of their own.
        y_t = y_t._replace(data=y_t.data.clone(memory_format=torch.contiguous_format))
    return y, y_t
