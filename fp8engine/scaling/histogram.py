"""Histograms of a tensor's magnitudes, from which casts are predicted: one flat FP32 vector, made on its device.

`measure` takes a sample of x [M, K] and writes what `prediction.Measured` reads, without waiting for the device:

    header    amax A, sum (x/A)^2, sum (x/A)^4, how many elements: see `prediction.HEADER`
    tensor    512 bins of |x| / A, eight an octave: count; and the rows of x, by the bin in which their energy lies
    grouping  130 bins of |x| / a[g] for each grouping asked, a[g] = amax of the element's own scale group

A group's factor is s[g] = MAX / a[g]; E4M3's 448 and E5M2's 57344 are both 1.75 * 2^i, so the octaves of
u = 1.75 |x| / a[g] are those of x * s[g] in either format, and no bin holds a boundary between two steps of the format.
A power-of-two factor is s[g] * t[g], t[g] in (1/2, 1]; its octave is u's or the one below: a bin is the sum of both
exponents, an even sum where they agree.  Each bin has its count, sum a[g]^2 (the error of rounding x * s[g], squared,
times (a[g] / MAX)^2 is that of x), and sum (a[g] / t[g])^2.  Elements equal to a[g] have two bins of their own: MAX is
exact.

The sample is whole groups, stratified: whole rows for scales per tensor, row and 1 x n; whole columns for scales per
column; whole blocks for the others.  Strata of irrational offsets, because a fixed stride would meet the same
position of every sequence.  A tensor of at most `sample` elements is measured whole.

Best of 150 on one core of an AMD EPYC, 65,536 elements of 2^20: 0.5 ms per tensor; with one grouping 0.9 (rows,
1 x 128), 1.2 (columns, 128 x 128) or 1.7 (128 x 1); with all five 5.0.  16,384 elements: 0.25, 0.55, 0.75, 0.85, 2.4.
"""

from __future__ import annotations

import math

import torch

from fp8engine import _numpy as numpy
from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.numerics.formats import FLOATS, Format
from fp8engine.numerics.recipe import PerTensor
from fp8engine.ops.reference.operand import as_groups
from fp8engine.scaling.prediction import GROUP_BINS, HEADER, TENSOR_BINS, Groupings, Measured, Table, extent

GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2: its multiples spread most evenly over the circle
LEAST_ROWS = 16  # of a sample, as long as it stays under WIDEST samples
WIDEST = 4
LINE = 4  # neighbouring columns taken together: with more, fewer places of the row would be sampled
SCALARS = 4  # of a grouping
PARTS = 4  # vectors of a grouping: counts, two weights, rows


def measure(
    x: torch.Tensor, groupings: Groupings, sample: int = 65536, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """The table of x, one FP32 vector on x's device of a length that depends on the groupings alone.

    x: FP32, BF16 or FP16, any shape and strides, [..., K]; NaN and Inf are counted and left out.
    groupings: the granularities to measure, in any order; per tensor is always measured.
    sample: about how many elements to take.  amax: of all of x, where the caller has it (FP32, one element); else
    the sample's.
    Raises UnsupportedDtype, and ShapeError for a sample without elements.

    >>> flat = measure(torch.tensor([[1.0, -2.0, 0.0, float("inf")]]), ())
    >>> found = read(flat, ())
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
        x = x.detach()
        x_MK = _as_matrix(x)
        if not x.numel():
            return torch.zeros(length(groupings), dtype=torch.float32, device=x.device)
        rows_RK = _some_rows(x_MK, sample)
        parts = list(_tensor_table(x_MK, rows_RK, amax))
        views: dict[object, torch.Tensor] = {}
        for rows, cols in grouped(groupings):
            kind = "rows" if rows == 1 else "columns" if rows == -1 else (rows, cols)
            if kind not in views:
                views[kind] = _magnitude(rows_RK if kind == "rows" else _some(x_MK, kind, sample))
            v = views[kind]
            parts += _group_table(v if v.dim() == 4 else as_groups(v, min(rows, len(v)), min(cols, v.shape[1])))
        return torch.cat(parts)


def read(flat: torch.Tensor, groupings: Groupings) -> Measured:
    """The statistics that `measure` wrote with the same groupings, on the host (the caller copies them there).

    Raises ShapeError for a vector of other groupings.

    >>> from fp8engine.numerics.recipe import E4M3, Cast, PerRow
    >>> rows = (PerRow(),)
    >>> x = torch.linspace(-1, 1, 65536).view(64, 1024)
    >>> round(read(measure(x, rows), rows).predict(Cast(E4M3, PerRow())).sqnr_db, 1)
    33.5
    """
    if flat.shape != (length(groupings),):
        raise ShapeError(
            f"read: a table of shape {list(flat.shape)}, and these groupings have {length(groupings)} numbers; "
            "pass the groupings that `measure` was given"
        )
    numbers = flat.detach().double().cpu().numpy()
    at = len(HEADER)
    header: dict[str, float] = dict(zip(HEADER, numbers[:at].tolist(), strict=True))
    tensor = numbers[at : at + 2 * TENSOR_BINS].reshape(2, TENSOR_BINS)
    at += tensor.size
    tables = {}
    for key in grouped(groupings):
        scalars = numbers[at : at + SCALARS].tolist()
        at += SCALARS
        bins = numbers[at : at + PARTS * GROUP_BINS].reshape(PARTS, GROUP_BINS)
        tables[key] = Table(*scalars, *bins)
        at += bins.size
    return Measured(header, tensor, tables)


def grouped(groupings: Groupings) -> list[tuple[int, int]]:
    """Rows and columns of a group of each grouping but per tensor, once each."""
    return list(dict.fromkeys(extent(g) for g in groupings if not isinstance(g, PerTensor)))


def length(groupings: Groupings) -> int:
    """Numbers in the table of these groupings.

    >>> length(())
    1032
    """
    return len(HEADER) + 2 * TENSOR_BINS + len(grouped(groupings)) * (SCALARS + PARTS * GROUP_BINS)


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
    yield _rows(v_RK[:, None, None, :], index[:, None, None, :], TENSOR_BINS)


def measure_on_host(x: torch.Tensor, sample: int, amax: float) -> torch.Tensor:
    """`measure` without groupings, of x in CPU memory: the same numbers from a third of the calls into torch.

    amax: of all of x; not finite where that is not.

    >>> x = torch.tensor([[1.0, -2.0, 0.0, float("inf")]])
    >>> torch.equal(measure_on_host(x, 65536, math.inf), measure(x, ()))
    True
    """
    x_MK = _as_matrix(x.detach())
    # In memory of its own: fully_shard cannot resize a storage that NumPy has seen.
    x_RK = _some_rows(x_MK, sample).to(torch.float32, copy=True).numpy()
    v_RK, bad = numpy.abs(x_RK), ~numpy.isfinite(x_RK)
    v_RK[bad] = 0.0
    top_R = v_RK.max(1)
    largest = top_R.max()
    if math.isfinite(amax):
        largest = max(largest, numpy.float32(amax))
    z_RK = v_RK / (largest or numpy.float32(1.0))
    square = z_RK * z_RK
    index = numpy.maximum((z_RK.view(numpy.int32) >> 20) - (1016 - (TENSOR_BINS - 1)), 0)
    energy = (v_RK / numpy.where(top_R > 0, top_R, numpy.float32(1.0))[:, None]) ** 2
    # Summed by torch, so that `measure` and this function round alike.
    by_row, by_bin = (torch.from_numpy(t).sum(1).numpy() for t in (energy, energy * index.astype(numpy.float32)))
    mean = numpy.rint(by_bin / numpy.maximum(by_row, 1.0)).astype(numpy.int64)
    flat = numpy.empty(length(()), numpy.float32)
    flat[: len(HEADER)] = (
        largest,
        torch.from_numpy(square).sum(),
        torch.from_numpy(square * square).sum(),
        v_RK.size,
        numpy.count_nonzero(v_RK),
        numpy.count_nonzero(bad),
        x_MK.numel(),
        Format.of(x_MK.dtype).mantissa_bits,
    )
    counts, rows = flat[len(HEADER) :].reshape(2, TENSOR_BINS)
    counts[:] = numpy.bincount(index.ravel(), minlength=TENSOR_BINS)
    rows[:] = numpy.bincount(mean[top_R > 0], minlength=TENSOR_BINS)
    return torch.from_numpy(flat)


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)


def _group_table(v: torch.Tensor):
    """Scalars; counts, two weights, rows: of |x| as [groups down, rows, groups across, cols]."""
    a = v.amax(dim=(1, 3), keepdim=True)
    largest = a.amax()
    positive = torch.where(a > 0, a, 1.0)
    t = v / positive
    # The power of two below MAX / a is MAX / a * (p / 1.75); a = mantissa * 2^i with a mantissa in [1/2, 1).
    mantissa = torch.frexp(positive).mantissa
    p = torch.where(mantissa > 0.875, mantissa, 2 * mantissa)
    index = _bits(t * 1.75).bitwise_right_shift(23) + _bits(t * p).bitwise_right_shift(23)
    index = index.add_(t.int(), alpha=2).sub_(254 - (GROUP_BINS - 3)).clamp_(min=0)
    ratio = (a / torch.where(largest > 0, largest, 1.0)).square()
    by_p2 = ratio * (1.75 / p).square()
    weights = torch.stack([
        torch.ones_like(ratio), ratio, by_p2,
        by_p2 * _rounding(p, 3), by_p2 * _rounding(p, 2),
    ])  # fmt: skip
    groups = ratio.numel()
    if groups * GROUP_BINS <= 2 * v.numel():  # a histogram for each group, counts only: exact in any order
        down, _, across, _ = v.shape
        first = torch.arange(0, groups * GROUP_BINS, GROUP_BINS, device=v.device).view(down, 1, across, 1)
        each = _counts((index + first).flatten(), groups * GROUP_BINS)
        table = weights.view(5, groups) @ each.view(groups, GROUP_BINS)
    else:
        spread = weights.expand(5, *v.shape).reshape(5, -1)
        table = spread.new_zeros(5, GROUP_BINS).scatter_add_(1, index.long().reshape(1, -1).expand(5, -1), spread)
    energy = (t.square() * ratio).sum()
    yield torch.stack([energy, v.sign().sum(), *table[3:, -2:].sum(1)])
    yield table[:3].reshape(-1)
    # A row with groups of its own has its largest element at MAX, so that its energy is never flushed.
    yield _rows(v, index, GROUP_BINS) if v.shape[1] > 1 else v.new_zeros(GROUP_BINS)


def _rounding(p: torch.Tensor, bits: int) -> torch.Tensor:
    """Squared error of rounding p in (7/8, 7/4] to so many mantissa bits: of a group's largest under a power of two."""
    steps = torch.where(p < 1, 2.0 ** (bits + 1), 2.0**bits)
    return ((p * steps).round_() / steps - p).square_()


def _rows(v: torch.Tensor, index: torch.Tensor, bins: int) -> torch.Tensor:
    """Rows of v [down, rows, across, cols] by the mean bin of their energy; a row of zeros is not counted."""
    largest = v.amax(dim=(2, 3), keepdim=True)
    energy = (v / torch.where(largest > 0, largest, 1.0)).square_()  # relative to the row: no row is too small
    mean = (energy * index).sum(dim=(2, 3)) / energy.sum(dim=(2, 3)).clamp_(min=1)
    counts = v.new_zeros(bins)
    return counts.scatter_add_(0, mean.round_().long().flatten(), (largest > 0).float().flatten())


def _counts(index: torch.Tensor, bins: int) -> torch.Tensor:
    """Counts of each index, without `bincount`, which waits for the device to size its result by the largest index."""
    one = torch.ones((), dtype=torch.float32, device=index.device)
    return one.new_zeros(bins).scatter_add_(0, index, one.expand(index.shape))


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x| in FP32, what is not finite as 0."""
    return x.float().nan_to_num(0.0, 0.0, 0.0).abs_()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def _strata(size: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` places in 0..size-1, one in each of as many equal parts."""
    i = torch.arange(count, dtype=torch.float64, device=device)
    return (i + (i * GOLDEN).frac()).mul_(size / count).long()


def _some_rows(x_MK: torch.Tensor, sample: int) -> torch.Tensor:
    """Whole rows: about `sample` elements, more where rows are long and would be few."""
    m, k = x_MK.shape
    count = max(sample // k, min(LEAST_ROWS, WIDEST * sample // k), 1)
    return x_MK if x_MK.numel() <= sample or count >= m else x_MK.index_select(0, _strata(m, count, x_MK.device))


def _some(x_MK: torch.Tensor, kind: object, sample: int) -> torch.Tensor:
    """Whole columns [M, C], or whole blocks [places, rows, groups, cols]."""
    m, k = x_MK.shape
    if x_MK.numel() <= sample:
        return x_MK
    if not isinstance(kind, tuple):
        return _some_columns(x_MK, sample)
    rows, cols = min(kind[0], m), min(LINE if kind[1] == 1 else kind[1], k)
    down, across = -(-m // rows), -(-k // cols)
    count = max(sample // (rows * cols), 1)
    if count >= down * across:
        return x_MK
    block = _strata(down * across, count, x_MK.device)
    row = (block // across * rows)[:, None, None] + torch.arange(rows, device=x_MK.device)[:, None]
    column = (block % across * cols)[:, None, None] + torch.arange(cols, device=x_MK.device)
    inside = (row < m) & (column < k) if m % rows or k % cols else None
    down, across = x_MK.stride()
    # By place in memory: a third of the time of indexing both dimensions.
    place = row.clamp_(max=m - 1) * down + column.clamp_(max=k - 1) * across
    memory = x_MK.as_strided(((m - 1) * down + (k - 1) * across + 1,), (1,))
    if kind[1] > 1:
        some = memory.index_select(0, place.flatten()).view(place.shape)
        return (some if inside is None else torch.where(inside, some, 0.0))[:, :, None, :]
    # Each group's elements side by side: twice as fast as with its neighbours' between.
    some = memory.index_select(0, place.transpose(1, 2).flatten()).view(-1, cols, rows).transpose(1, 2)
    return (some if inside is None else torch.where(inside, some, 0.0))[..., None]


def _some_columns(x_MK: torch.Tensor, sample: int) -> torch.Tensor:
    m, k = x_MK.shape
    count = max(sample // m, min(LEAST_ROWS, WIDEST * sample // m), 1)
    width = min(LINE, max(count // 4, 1))
    chunks = count // width
    if chunks * width >= k:
        return x_MK
    first = _strata(k - width + 1, chunks, x_MK.device)
    column = first[:, None] + torch.arange(width, device=x_MK.device)
    return x_MK.index_select(1, column.flatten())
