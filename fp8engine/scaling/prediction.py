"""Prediction of a cast per tensor from the tensor's histogram: SQNR, and shares flushed and saturated.

y = x * s is rounded to m mantissa bits, in steps of d below the smallest normal number.  With values spread evenly over
a step the error of one element is, squared and averaged,

    step^2 / 12, step = max(2^(floor(log2 |y|) - m), d)      for |y| >= d          (1)
    (d - |y|)^2                                              for d/2 < |y| < d     rounded up to d
    y^2                                                      for |y| <= d/2        flushed: becomes 0
    (|y| - MAX)^2                                            for |y| > MAX         saturated (FP8); Inf in 16 bits

    SQNR = sum x^2 / sum error(x s)^2 / s^2

A bin is taken as equal shares at POINTS places, evenly spaced.  Values equal to the largest of all are a point, rounded
exactly: under s = MAX / amax they lose nothing.  A number already on a grid as coarse as the step loses nothing: BF16
in BF16.  A row counts as flushed where the mean of log2 |y| over its energy lies below d/2: most of its energy is.

Where (1) is wrong: few distinct values, which are not spread over a step.  All powers of two under a power-of-two scale
have no error at all, and are predicted as if they had.
So are values that all lie within a step of amax: a language model's first lm_head gradients, 10 to 15 dB better than
predicted.  And where few elements have most of the error, it depends on their rounding: 1 to 3 dB, either way.

Sources: (1) Widrow and Kollar, Quantization Noise (2008), chapters 5 and 12.

>>> from fp8engine.numerics.formats import E4M3
>>> error(numpy.array([0.0005, 0.0015, 1.5, 448.0, 450.0]), E4M3).round(8).tolist()
[2.5e-07, 2.1e-07, 0.00130208, 85.33333333, 4.0]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from fp8engine import _numpy as numpy
from fp8engine.errors import InvalidRecipe
from fp8engine.numerics.cast import Cast, PerTensor
from fp8engine.numerics.formats import Format

HEADER = ("amax", "energy", "fourth", "sampled", "nonzero", "nonfinite", "elements", "mantissa_bits")
TENSOR_BINS = 512  # 64 octaves of |x| / amax, eight each; the last has |x| = amax alone, the first what is less, and 0
POINTS = 8
FP32_MAX = (2 - 2.0**-23) * 2.0**127
SATURATES = 1 + 2.0**-22  # as reference/quantize.py counts: an amax times its scale may land one ulp above MAX


class Prediction(NamedTuple):
    """The effect of a cast.

    sqnr_db: sum x^2 over sum of squared errors, in dB; inf where nothing is lost, -inf where a value becomes Inf.
    flushed: share of the finite, nonzero elements that become 0.  saturated: share of them beyond the format's MAX.
    rows_flushed: share of the rows (not all zero) whose energy is mostly flushed.
    """

    sqnr_db: float
    flushed: float
    saturated: float
    rows_flushed: float


@dataclass(frozen=True, eq=False)
class Measured:
    """One tensor's statistics on the host (histogram.read): energies relative to amax^2, counts of the sample."""

    header: dict[str, float]
    tensor: numpy.ndarray
    made: dict[tuple, Prediction] = field(default_factory=dict, repr=False)  # predictions made so far

    @property
    def amax(self) -> float:
        """Largest finite |x|: of the whole tensor where `measure` was told, else of the sample."""
        return self.header["amax"]

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return round(self.header["elements"])

    @property
    def sampled(self) -> int:
        """Elements in the sample."""
        return round(self.header["sampled"])

    @property
    def nonzero(self) -> int:
        """Finite elements of the sample that are not 0."""
        return round(self.header["nonzero"])

    @property
    def nonfinite(self) -> int:
        """NaN and Inf in the sample."""
        return round(self.header["nonfinite"])

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements."""
        return self.amax * math.sqrt(self._energy / max(self._finite, 1.0))

    @property
    def crest(self) -> float:
        """amax / rms; 1 for a constant, 0 for nothing but zeros."""
        return self.amax / self.rms if self.rms else 0.0

    @property
    def kurtosis(self) -> float:
        """mean x^4 / (mean x^2)^2, zero taken as the mean: 3 for a normal distribution, 0 for nothing but zeros."""
        fourth = self.header["fourth"] * self._more + self._missing
        return self._finite * fourth / self._energy**2 if self._energy else 0.0

    @property
    def _more(self) -> float:
        """Elements for each one of the sample."""
        return self.elements / max(self.sampled, 1)

    @property
    def _missing(self) -> float:
        """1 where the sample missed the element whose |x| is amax: it is known, and may outweigh all others."""
        return float(self.amax > 0 and self.tensor[0, -1] == 0)

    @property
    def _energy(self) -> float:
        return self.header["energy"] * self._more + self._missing

    @property
    def _finite(self) -> float:
        return (self.header["sampled"] - self.header["nonfinite"]) * self._more

    def predict(self, cast: Cast, margin: int = 0, scale: float | None = None) -> Prediction:
        """The effect of `cast` on the tensor.

        margin: powers of two of headroom, as a recipe's; 16 and 32 bits have none.
        scale: the factor s with which a cast per tensor multiplies, where it is predicted from an older amax (margin
        is then already in it).
        Raises InvalidRecipe for another granularity, and for a scale of a cast that takes none.
        """
        asked = (cast, margin, scale)
        if asked not in self.made:
            self.made[asked] = self._predict(*asked)
        return self.made[asked]

    def _predict(self, cast: Cast, margin: int, scale: float | None) -> Prediction:
        if scale is not None and not (cast.is_fp8 and isinstance(cast.granularity, PerTensor) and 0 < scale < math.inf):
            raise InvalidRecipe(
                f"predict({cast}, scale={scale}): a scale is a positive factor for an FP8 cast per tensor; leave it out"
            )
        if cast.is_fp8 and not isinstance(cast.granularity, PerTensor):
            raise InvalidRecipe(f"predict({cast}): a histogram tells of scales per tensor alone; reads.py tries others")
        if self.amax == 0:
            return Prediction(math.inf, 0.0, 0.0, 0.0)
        if not cast.is_fp8:
            return self._of_tensor(cast.format, 1.0, aligned=True)
        goal = cast.format.max * 2.0**-margin
        if scale is None:
            scale = min(float(numpy.float32(min(goal / self.amax, FP32_MAX))), FP32_MAX)
            scale = 2.0 ** (math.frexp(scale)[1] - 1) if cast.power_of_2 else scale
        return self._of_tensor(cast.format, scale, aligned=math.frexp(scale)[0] == 0.5)

    def _of_tensor(self, format: Format, s: float, aligned: bool) -> Prediction:
        """One factor for the whole tensor; aligned: it is a power of two, so that x's own grid stays one."""
        top = self.amax * s
        counts, rows = self.tensor
        used = numpy.flatnonzero(counts[1:-1]) + 1
        y = _tensor_points()[used] * top
        lost = error(y, format)
        if aligned:  # x's own grid, n numbers to a step: its errors are few values, of mean square (1 + 2 / n^2) / 12
            n = step(y, format) / 2.0 ** (numpy.floor(numpy.log2(y)) - self.header["mantissa_bits"])
            lost = numpy.where((y >= format.smallest_subnormal) & (y <= format.max), lost * (1 + 2 / n**2), lost)
            lost = numpy.where((n <= 1) & (y <= format.max), 0.0, lost)
        noise = (counts[used] @ lost.mean(1)) * self._more
        noise += max(counts[-1] * self._more, self._missing) * _error_of_point(top, format)
        zeros = self.header["sampled"] - self.header["nonzero"]
        half = format.smallest_subnormal / 2
        flushed = counts[used] @ (y <= half).mean(1) + (counts[0] - zeros) + counts[-1] * (top <= half)
        over = counts[used] @ (y > format.max * SATURATES).mean(1) + counts[-1] * (top > format.max * SATURATES)
        place = 2.0 ** ((numpy.arange(TENSOR_BINS) + 0.5 - (TENSOR_BINS - 1)) / 8) * top
        nonzero = max(self.header["nonzero"], 1.0)
        shares = float(flushed / nonzero), float(over / nonzero), _share(rows, place <= half)
        return Prediction(_db(self._energy * top**2, float(noise)), *shares)


def step(y: numpy.ndarray, format: Format) -> numpy.ndarray:
    """Distance of the format's numbers around y > 0."""
    return numpy.maximum(2.0 ** (numpy.floor(numpy.log2(y)) - format.mantissa_bits), format.smallest_subnormal)


def error(y: numpy.ndarray, format: Format) -> numpy.ndarray:
    """Expected squared error of rounding values near y > 0: the four lines of this module's docstring."""
    d = format.smallest_subnormal
    found = numpy.where(y >= d, step(y, format) ** 2 / 12, numpy.where(y > d / 2, d - y, y) ** 2)
    return numpy.where(y > format.max, _beyond(y, format), found)


def _beyond(y, format: Format):
    return (y - format.max) ** 2 if format.is_fp8 else math.inf


def _error_of_point(y: float, format: Format) -> float:
    """Squared error of this very value."""
    if y > format.max * SATURATES:
        return _beyond(y, format)
    size = float(step(numpy.array(y), format))
    away = min(round(y / size) * size, format.max) - y
    return 0.0 if abs(away) < y * 2.0**-22 else away**2  # 2^-22: of a scale that was rounded to FP32


@functools.cache
def _tensor_points() -> numpy.ndarray:
    """|x| / amax at POINTS places of every bin, [bins, POINTS]."""
    exponent, eighth = numpy.divmod(numpy.arange(TENSOR_BINS)[:, None] - (TENSOR_BINS - 1), 8)
    return 2.0**exponent * (1 + (eighth + _middles()) / 8)


def _middles() -> numpy.ndarray:
    return (numpy.arange(POINTS) + 0.5) / POINTS


def _db(signal: float, noise: float) -> float:
    if noise == math.inf:
        return -math.inf
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


def _share(rows: numpy.ndarray, lost: numpy.ndarray) -> float:
    return float(rows @ lost / max(rows.sum(), 1.0))
