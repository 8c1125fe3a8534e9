"""What a cast really does to a tensor, by doing it: the truth that predictions are held against."""

import math
from dataclasses import replace

import torch

from fp8engine.numerics.recipe import Cast
from fp8engine.ops.reference.quantize import quantize, quantize_given
from fp8engine.scaling.prediction import Prediction


def restored(x_MK: torch.Tensor, cast: Cast, margin: int = 0, scale: float | None = None) -> torch.Tensor:
    """x [M, K] cast and multiplied by its scales again, in float64.

    margin: powers of two of headroom.  scale: the factor of a cast per tensor; None for the tensor's own.
    """
    if not cast.is_fp8:
        return x_MK.to(cast.format.dtype).double()
    how = replace(cast, scaling="current")
    q, factor = quantize(x_MK, how)
    if scale is not None:
        factor = torch.tensor(1.0) / scale
    if scale is not None or margin:
        factor = factor * 2.0**margin
        q = quantize_given(x_MK, how, torch.tensor(1.0) / factor)
    if factor.dim() == 2:  # one number per group, written out
        for dim, (groups, size) in enumerate(zip(factor.shape, x_MK.shape, strict=True)):
            if groups > 1:
                width = {0: how.rows, 1: how.cols}[dim]
                factor = factor.repeat_interleave(width, dim).narrow(dim, 0, size)
    return q.double() * factor.double()


def real(x_MK: torch.Tensor, cast: Cast, margin: int = 0, scale: float | None = None) -> Prediction:
    """SQNR, flushed and saturated shares of finite nonzero elements, share of rows that lose over half their energy.

    cast: per tensor, or to 16 or 32 bits.
    """
    x = torch.where(torch.isfinite(x_MK), x_MK, 0)
    back = restored(x, cast, margin, scale)
    s = scale if scale is not None else cast.format.max * 2.0**-margin / max(float(x.abs().max()), 1e-300)
    x = x.double()
    beyond = x.abs() > cast.format.max / s * (1 + 2.0**-22) if cast.is_fp8 else torch.isinf(back)
    signal, error = x.square(), float((back - x).square().sum())
    gone = (back == 0) & (x != 0)
    nonzero = max(int((x != 0).sum()), 1)
    rows = signal.sum(1)
    lost = (torch.where(gone, signal, 0).sum(1) > rows / 2) & (rows > 0)
    inf = not bool(torch.isfinite(back).all())
    db = -math.inf if inf else math.inf if error == 0 else 10 * math.log10(float(signal.sum()) / error)
    return Prediction(
        db, int(gone.sum()) / nonzero, int(beyond.sum()) / nonzero, int(lost.sum()) / max(int((rows > 0).sum()), 1)
    )
