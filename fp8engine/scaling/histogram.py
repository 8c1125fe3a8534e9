"""Histogram of a tensor's magnitudes, from which its casts per tensor are predicted: a flat vector on its device.

`measure` takes a sample of x [M, K] and writes what `prediction.Measured` reads, without waiting for the device:

    header    amax A, sum (x/A)^2, sum (x/A)^4, how many elements: see `prediction.HEADER`
    tensor    512 bins of |x| / A, eight an octave: count; and the rows of x, by the bin in which their energy lies

The sample is whole rows, stratified, at irrational offsets, because a fixed stride would meet the same position of
every sequence.  A tensor of at most `sample` elements is measured whole.  65,536 elements of 2^20: 0.5 ms on one core
of an AMD EPYC.
"""

from __future__ import annotations

import torch

from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.numerics.formats import FLOATS, Format
from fp8engine.scaling.prediction import HEADER, TENSOR_BINS, Measured
from fp8engine.scaling.reads import strata

LEAST_ROWS = 16  # of a sample, as long as it stays under WIDEST samples
WIDEST = 4
LENGTH = len(HEADER) + 2 * TENSOR_BINS  # numbers of a tensor's table


def measure(x: torch.Tensor, sample: int = 65536, amax: torch.Tensor | None = None) -> torch.Tensor:
    """The table of x, [LENGTH] FP32 on x's device.

    x: FP32, BF16 or FP16, any shape and strides, [..., K]; NaN and Inf are counted and left out.
    sample: about how many elements to take.  amax: of all of x, where the caller has it (FP32, one element); else
    the sample's.
    Raises UnsupportedDtype, and ShapeError for a sample without elements.

    >>> found = read(measure(torch.tensor([[1.0, -2.0, 0.0, float("inf")]])))
    >>> found.amax, round(3 * found.rms**2, 6), found.nonfinite, found.nonzero
    (2.0, 5.0, 1, 2)
    """
    if x.dtype not in FLOATS or x.layout != torch.strided:
        raise UnsupportedDtype(
            f"measure: x is {x.dtype}, {x.layout}; it takes dense float32, bfloat16 or float16: convert it first"
        )
    if sample < 1:
        raise ShapeError(f"measure: sample={sample}; want how many elements to look at, 1 or more")
    with torch.no_grad():
        x_MK = x.detach().reshape(-1, x.shape[-1]) if x.dim() > 1 else x.detach().reshape(1, -1)
        if not x.numel():
            return torch.zeros(LENGTH, dtype=torch.float32, device=x.device)
        return _table(x_MK, some_rows(x_MK, sample).float(), amax)


def read(flat: torch.Tensor) -> Measured:
    """The statistics that `measure` wrote, on the host (the caller copies them there).

    Raises ShapeError for a vector of another length.

    >>> from fp8engine.numerics.recipe import E4M3, Cast
    >>> x = torch.linspace(-1, 1, 65536).view(64, 1024)
    >>> round(read(measure(x)).predict(Cast(E4M3)).sqnr_db, 1)
    31.9
    """
    if flat.shape != (LENGTH,):
        raise ShapeError(f"read: a table of shape {list(flat.shape)}; `measure` writes {LENGTH} numbers")
    numbers = flat.detach().double().cpu().numpy()
    header: dict[str, float] = dict(zip(HEADER, numbers[: len(HEADER)].tolist(), strict=True))
    return Measured(header, numbers[len(HEADER) :].reshape(2, TENSOR_BINS))


def _table(x_MK: torch.Tensor, x_RK: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """Header, counts, rows by the mean bin of their energy; a row of zeros is not counted."""
    v_RK = x_RK.nan_to_num(0.0, 0.0, 0.0).abs_()
    top_R1 = v_RK.amax(1, keepdim=True)
    largest = top_R1.amax()
    if amax is not None:
        amax = amax.detach().to(device=largest.device, dtype=torch.float32).reshape(())
        largest = torch.where(torch.isfinite(amax), torch.maximum(amax, largest), largest)
    z_RK = v_RK / torch.where(largest > 0, largest, 1.0)
    square = z_RK.square()
    bits_RK = z_RK.view(torch.int32).bitwise_right_shift(20)  # of 1.0: 1016
    index_RK = bits_RK.sub_(1016 - (TENSOR_BINS - 1)).clamp_(min=0)
    energy = (v_RK / torch.where(top_R1 > 0, top_R1, 1.0)).square_()  # relative to the row: no row is too small
    mean_R = (energy * index_RK).sum(dim=1) / energy.sum(dim=1).clamp_(min=1)
    of_all = v_RK.new_full  # a kernel launch, not a copy to the device
    header = torch.stack([
        largest,
        square.sum(),
        square.square().sum(),
        of_all((), float(v_RK.numel())),
        v_RK.sign().sum(),
        (x_RK - x_RK).ne_(0).sum(),  # Inf - Inf is NaN; several times cheaper than counting a mask
        of_all((), float(x_MK.numel())),
        of_all((), float(Format.of(x_MK.dtype).mantissa_bits)),
    ])  # fmt: skip
    counts = _summed(index_RK.flatten(), of_all((), 1.0).expand(v_RK.numel()))
    return torch.cat([header, counts, _summed(mean_R.round_(), (top_R1[:, 0] > 0).float())])


def _summed(bins: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights by bin, without `bincount`, which waits for the device to size its result by the largest index."""
    return weights.new_zeros(TENSOR_BINS).scatter_add_(0, bins.long(), weights)


def some_rows(x_MK: torch.Tensor, sample: int) -> torch.Tensor:
    """The rows that `measure` looks at: about `sample` elements, more where rows are long and would be few."""
    m, k = x_MK.shape
    count = max(sample // k, min(LEAST_ROWS, WIDEST * sample // k), 1)
    return x_MK if x_MK.numel() <= sample or count >= m else x_MK.index_select(0, strata(m, count, x_MK.device))
