"""Rows in FP8 as bytes, for collectives: the codes of a row, then its scales, powers of two of one byte each (E8M0).

    bytes [R, K + G]    E4M3 or E5M2 codes [R, K], scales [R, G]; G groups of a row: 1, or K / 128 rounded up

Gloo takes no dtype of 8-bit floats; one message for both is one launch and one wait.
E8M0 is 2^-127 to 2^127, which holds every scale that a cast with `power_of_2` gives.
Source: OCP Microscaling formats 1.0, section 5.4.1.
"""

from __future__ import annotations

import torch

from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts
from fp8engine.ops.reference import Slot
from fp8engine.ops.tensor import Float8Tensor

E8M0 = torch.float8_e8m0fnu


def pack(x_RK: torch.Tensor, cast: Cast, slot: Slot | None = None) -> torch.Tensor:
    """Rows as bytes, uint8 [R, K + G].  cast: groups of 1 x n or whole rows, scales powers of two.  slot: of the cast.

    >>> pack(torch.tensor([[1.0, -448.0]]), Cast.parse("e4m3 1x-1 p2")).tolist()
    [[56, 254, 127]]
    """
    rows, k = x_RK.shape
    # Long rows as many short ones: a kernel's tile has 32 rows, and there are as few long ones as ranks.
    short = cast.cols > 0 and k % cast.cols == 0
    q = casts.quantize(x_RK.detach().reshape(-1, cast.cols) if short and k else x_RK.detach(), cast, slot)
    codes, scales = q.data.view(torch.uint8), q.scale.to(E8M0).view(torch.uint8)
    return torch.cat([codes.view(rows, k), scales.view(rows, -1) if rows else scales], 1)


def unpack(
    bytes_RB: torch.Tensor, k: int, cast: Cast, dtype: torch.dtype, order_R: torch.Tensor | None = None
) -> Float8Tensor:
    """The rows of k numbers that `pack` made, in another order if one is given; they dequantise to `dtype`.

    >>> cast = Cast.parse("e4m3 1x-1 p2")
    >>> unpack(pack(torch.tensor([[1.0], [3.0]]), cast), 1, cast, torch.float32, torch.tensor([1, 0])).values().tolist()
    [[3.0], [1.0]]
    """
    codes, scales = bytes_RB[:, :k], bytes_RB[:, k:]
    if order_R is not None:
        codes, scales = codes[order_R], scales[order_R]
    scale = scales.contiguous().view(E8M0).float()
    found = Float8Tensor(codes.contiguous().view(cast.dtype), scale, cast.granularity, dtype)
    found.power_of_2 = True
    return found
