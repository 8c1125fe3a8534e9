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
    >>> found.amax, found.sum_sq, found.nonfinite, found.nonzero
    (2.0, 5.0, 1, 2)
    """
    if x.dtype not in FLOATS or x.layout != torch.strided:
        raise UnsupportedDtype(
            f"measure: x is {x.dtype}, {x.layout}; it takes dense float32, bfloat16 or float16: convert it first"
        )
    if sample < 1:
        raise ShapeError(f"measure: sample={sample}; want how many elements to look at, 1 or more")
    with torch.no_grad():
        x_MK = _as_matrix(x.detach())
        if not x.numel():
            return torch.zeros(LENGTH, dtype=torch.float32, device=x.device)
        return torch.cat(list(_tensor_table(x_MK, some_rows(x_MK, sample), amax)))


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


def _tensor_table(x_MK: torch.Tensor, rows_RK: torch.Tensor, amax: torch.Tensor | None):
    """Header, counts, rows."""
    x_RK = rows_RK.float()
    v_RK = _magnitude(x_RK)
    largest = v_RK.amax()
    if amax is not None:
        amax = amax.detach().to(device=largest.device, dtype=torch.float32).reshape(())
        largest = torch.where(torch.isfinite(amax), torch.maximum(amax, largest), largest)
    z_RK = v_RK / torch.where(largest > 0, largest, 1.0)
    square = z_RK.square()
    index = _bits(z_RK).bitwise_right_shift(20).sub_(1016 - (TENSOR_BINS - 1)).clamp_(min=0)  # 1.0's are 1016
    of_all = v_RK.new_full  # a kernel launch, not a copy to the device
    yield torch.stack([
        largest,
        square.sum(),
        square.square().sum(),
        of_all((), float(v_RK.numel())),
        v_RK.sign().sum(),
        (x_RK - x_RK).ne_(0).sum(),  # Inf - Inf is NaN; several times cheaper than counting a mask
        of_all((), float(x_MK.numel())),
        of_all((), float(Format.of(x_MK.dtype).mantissa_bits)),
    ])  # fmt: skip
    yield _counts(index.long().flatten(), TENSOR_BINS)
    yield _rows(v_RK, index)


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)


def _rows(v_RK: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by the mean bin of their energy; a row of zeros is not counted."""
    largest = v_RK.amax(dim=1, keepdim=True)
    energy = (v_RK / torch.where(largest > 0, largest, 1.0)).square_()  # relative to the row: no row is too small
    mean = (energy * index).sum(dim=1) / energy.sum(dim=1).clamp_(min=1)
    counts = v_RK.new_zeros(TENSOR_BINS)
    return counts.scatter_add_(0, mean.round_().long(), (largest[:, 0] > 0).float())


def _counts(index: torch.Tensor, bins: int) -> torch.Tensor:
    """Counts of each index, without `bincount`, which waits for the device to size its result by the largest index."""
    one = torch.ones((), dtype=torch.float32, device=index.device)
    return one.new_zeros(bins).scatter_add_(0, index, one.expand(index.shape))


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x| in FP32, what is not finite as 0."""
    return x.float().nan_to_num(0.0, 0.0, 0.0).abs_()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def some_rows(x_MK: torch.Tensor, sample: int) -> torch.Tensor:
    """The rows that `measure` looks at: about `sample` elements, more where rows are long and would be few."""
    m, k = x_MK.shape
    count = max(sample // k, min(LEAST_ROWS, WIDEST * sample // k), 1)
    return x_MK if x_MK.numel() <= sample or count >= m else x_MK.index_select(0, strata(m, count, x_MK.device))
