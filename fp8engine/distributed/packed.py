"""Rows in FP8 as bytes, for collectives: the codes of a row, then its scales.

    bytes [R, K + G]     E4M3 or E5M2 codes [R, K]; G groups of a row, 1 or K / 128 rounded up, whose scales are powers
                         of two of one byte each (E8M0)
    bytes [R, K + 4 G]   the same under other scales, in FP32
    bytes [R, K]         codes under one scale, which ranks have joined (ops/joined.py) and need not send

Gloo takes no dtype of 8-bit floats; one message for both is one launch and one wait.
E8M0 is 2^-127 to 2^127, which holds every scale that a cast with `power_of_2` gives.
Source: OCP Microscaling formats 1.0, section 5.4.1.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts
from fp8engine.ops.reference import Slot
from fp8engine.ops.tensor import Float8Tensor

E8M0 = torch.float8_e8m0fnu
Codes = TypeVar("Codes", bound=Float8Tensor)


def pack(x_RK: torch.Tensor, cast: Cast, slot: Slot | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as bytes, uint8 [R, B], and the scale of all rows where there is only one.

    cast: per tensor, whole rows, or groups of 1 x n.  slot: of the cast; its group joins a scale per tensor.

    >>> pack(torch.tensor([[1.0, -448.0]]), Cast.parse("e4m3 1x-1 p2"))[0].tolist()
    [[56, 254, 127]]
    """
    rows, k = x_RK.shape
    # Long rows as many short ones: a kernel's tile has 32 rows, and there are as few long ones as ranks.
    short = cast.cols > 0 and k % cast.cols == 0
    q = casts.quantize(x_RK.detach().reshape(-1, cast.cols) if short and k else x_RK.detach(), cast, slot)
    codes = q.data.view(torch.uint8).view(rows, k)
    if cast.per_tensor:
        return codes, q.scale
    scales = (q.scale.to(E8M0) if cast.power_of_2 else q.scale.contiguous()).view(torch.uint8)
    return torch.cat([codes, scales.view(rows, -1) if rows else scales], 1), None


def unpack(
    bytes_B: torch.Tensor,
    k: int,
    cast: Cast,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    kind: type[Codes] = Float8Tensor,
) -> Codes:
    """The rows [..., k] that `pack` made bytes [..., B] of, as a tensor of that kind; they dequantise to `dtype`.

    scale: of all rows, where there is only one.

    >>> cast = Cast.parse("e4m3 1x-1 p2")
    >>> unpack(pack(torch.tensor([[1.0], [3.0]]), cast)[0], 1, cast, torch.float32).values().tolist()
    [[1.0], [3.0]]
    """
    if scale is None:
        scales = bytes_B[..., k:].contiguous()
        scale = scales.view(E8M0).float() if cast.power_of_2 else scales.view(torch.float32)
    found = kind(bytes_B[..., :k].contiguous().view(cast.dtype), scale, cast.granularity, dtype)
    found.power_of_2 = cast.power_of_2
    return found
