"""What a cast really does to a tensor, by doing it: the truth that predictions are held against."""

import math

import torch

from fp8engine.numerics.recipe import Cast
from fp8engine.ops.reference import How
from fp8engine.ops.reference.quantize import quantize, quantize_given
from fp8engine.scaling.prediction import Prediction, extent


def real(x_MK: torch.Tensor, cast: Cast, margin: int = 0, scale: float | None = None) -> Prediction:
    """SQNR, flushed and saturated shares of finite nonzero elements, share of rows that lose over half their energy."""
    finite = torch.isfinite(x_MK)
    x = torch.where(finite, x_MK, 0)
    factor = torch.tensor(0.0)
    if not cast.is_fp8:
        back = x.to(cast.format.dtype).double()
    else:
        how = How(cast.format.dtype, *extent(cast.granularity), cast.power_of_2)
        q, factor = quantize(x, how)
        if scale is not None:
            factor = torch.tensor(1.0) / scale
        if scale is not None or margin:
            factor = factor * 2.0**margin
            q = quantize_given(x, how, torch.tensor(1.0) / factor)
        wide = factor
        if factor.dim() == 2:  # one number per group, written out
            for dim, (groups, size) in enumerate(zip(factor.shape, x.shape, strict=True)):
                if groups > 1:
                    width = {0: how.rows, 1: how.cols}[dim]
                    wide = wide.repeat_interleave(width, dim).narrow(dim, 0, size)
        back = q.double() * wide.double()
    x = x.double()
    error = (back - x).square().sum()
    signal = x.square()
    gone = (back == 0) & (x != 0)
    nonzero = max(int((x != 0).sum()), 1)
    inf = not bool(torch.isfinite(back).all())
    beyond = torch.isinf(back)
    if cast.is_fp8 and factor.dim() == 0:
        beyond = x.abs() > cast.format.max * float(factor) * (1 + 2.0**-22)
    rows = signal.sum(1)
    lost = (torch.where(gone, signal, 0).sum(1) > rows / 2) & (rows > 0)
    db = -math.inf if inf else math.inf if error == 0 else 10 * math.log10(float(signal.sum()) / float(error))
    return Prediction(
        db, int(gone.sum()) / nonzero, int(beyond.sum()) / nonzero, int(lost.sum()) / max(int((rows > 0).sum()), 1)
    )
