"""Epilogue of a matmul, between its FP32 sums and the store: bias, activation, statistics, the output's format.

    y    = f(y + bias[n])      f: none, or a plain kind of activations.py
    amax = max |y| over finite y     saturated = how many finite |y / scale| > MAX     nonfinite = how many NaN and Inf
    stored: y rounded once to 16 or 32 bits, or saturate(RNE(y / scale)) in FP8 under a scale given beforehand

The twin of kernels/epilogue.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.numerics.formats import Format
from fp8engine.ops.reference.activations import ACTIVATIONS
from fp8engine.ops.reference.quantize import SATURATES
from fp8engine.ops.reference.rounding import saturating_cast

KINDS = ("none", *(name for name, activation in ACTIVATIONS.items() if not activation.gated))


class Epilogue(NamedTuple):
    """How a matmul ends.

    bias_N: added in FP32.  activation: one of KINDS.  out: dtype of the result; an FP8 one takes `scale`, FP32 with one
    element, y ≈ q * scale.  amax FP32 [1] rises to the largest finite |y|; to counts INT64 [2], of saturated and of
    not finite elements, is added.
    """

    bias_N: torch.Tensor | None = None
    out: torch.dtype = torch.bfloat16
    activation: str = "none"
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    counts: torch.Tensor | None = None


def finish(y_MN: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """y as it is stored.  y_MN: FP32.

    >>> y = finish(torch.tensor([[-1.0, 900.0]]), Epilogue(None, torch.float8_e4m3fn, "relu", torch.tensor(0.5)))
    >>> y.float().tolist()
    [[0.0, 448.0]]
    """
    if epilogue.bias_N is not None:
        y_MN = y_MN + epilogue.bias_N.float()
    if epilogue.activation != "none":
        y_MN = ACTIVATIONS[epilogue.activation].forward(y_MN)
    scaled = y_MN if epilogue.scale is None else y_MN * (torch.ones_like(epilogue.scale) / epilogue.scale)
    if epilogue.amax is not None and y_MN.numel():
        largest = torch.where(torch.isfinite(y_MN), y_MN.abs(), 0.0).max()
        epilogue.amax.copy_(torch.maximum(epilogue.amax, largest))
    if epilogue.counts is not None:
        finite = torch.isfinite(y_MN)
        over = finite & (scaled.abs() > Format.of(epilogue.out).max * SATURATES)
        epilogue.counts.add_(torch.stack([over.sum(), (~finite).sum()]))
    if Format.of(epilogue.out).is_fp8:
        return saturating_cast(scaled.clone(), y_MN, epilogue.out)
    return scaled.to(epilogue.out)
