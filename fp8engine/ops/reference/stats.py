"""Statistics of a tensor in one pass: amax, sum of squares, and a histogram of binary exponents.

    amax = max |x|    sum_sq = sum x^2    hist[e] = how many finite x have FP32 exponent field e

Bin e holds 2^(e-127) <= |x| < 2^(e-126) for e in 1..254; bin 0 zeros and FP32 subnormals; bin 255 what is not finite.
The twin of kernels/stats.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Statistics(NamedTuple):
    """amax, sum_sq: FP32 scalars over finite elements.  histogram: INT64 [256], one count per FP32 exponent field."""

    amax: torch.Tensor
    sum_sq: torch.Tensor
    histogram: torch.Tensor


def stats(x_MK: torch.Tensor, every: int = 1) -> Statistics:
    """Statistics of a tensor of any shape in FP32, BF16 or FP16.  every: look at one row in that many.

    >>> found = stats(torch.tensor([[1.0, -3.0, 0.0, float("inf")]]))
    >>> found.amax.item(), found.sum_sq.item(), found.histogram[[0, 127, 128, 255]].tolist()
    (3.0, 10.0, [1, 1, 1, 1])
    """
    x = torch.atleast_1d(x_MK)[::every].float()
    finite = torch.where(torch.isfinite(x), x, 0.0)
    exponent = x.contiguous().view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    histogram = torch.bincount(exponent.flatten(), minlength=256)
    amax = finite.abs().max() if x.numel() else finite.new_zeros(())
    return Statistics(amax, finite.square().sum(), histogram)
