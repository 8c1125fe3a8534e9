"""Quantisation of a matrix to FP8, a scale per tensor, row, column or block, with counters of what it cost.

    a[g]    = max |x| over the finite elements of group g
    s[g]    = MAX / a[g]                        current scaling, or predicted from earlier steps (per tensor)
    q[m, k] = saturate(RNE(x[m, k] * s[g]))     scale[g] = 1 / s[g]     x ≈ q * scale

A predicted s under which a[g] would saturate is replaced by the measured one in the same call: the recast.
The twin of kernels/quantize.py.  One pass for amax, one to scale and round; a finite amax proves that the whole
tensor is finite and lets the second pass skip every check.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from fp8engine import _numpy as numpy
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import BY_DTYPE, Format
from fp8engine.ops.reference.operand import Operand, Slot, as_groups
from fp8engine.ops.reference.rounding import FEW, scale_and_round
from fp8engine.ops.reference.scale import FP32_MAX, scale_factor

# |x * s| over MAX by less than the rounding of s itself is not saturation: s = RN(MAX / a) may land a * s one ulp up.
SATURATES = 1 + 2.0**-22
# Flushed elements are counted on one call in this many per slot (the first included): it costs a pass of its own.  On a
# card a cast with one scale counts them on every call, in the pass that it makes.
SAMPLE_EVERY = 16


def quantize(
    x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, held: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q_MK, scale) with x_MK ≈ q_MK * scale; q is FP8, or the same values in the dtype `held`.

    x_MK: FP32, BF16 or FP16, any strides.  scale: FP32, of shape `cast.scale_shape(M, K)`.

    >>> q, scale = quantize(torch.tensor([[1.0, -2.0], [0.0, 4.0]]), Cast.parse("e4m3 1x-1 p2"))
    >>> (q.float() * scale).tolist(), scale.tolist()
    ([[1.0, -2.0], [0.0, 4.0]], [[0.0078125], [0.015625]])
    """
    if x_MK.numel() == 0:
        one = x_MK.new_ones(cast.scale_shape(*x_MK.shape), dtype=torch.float32)
        return x_MK.to(held or cast.dtype), one
    if cast.rows == cast.cols == -1 and x_MK.device.type == "cpu":
        return _quantize_on_host(x_MK, cast, slot, held)
    return _quantize_groups(x_MK, cast, slot, held)


def quantize_operand(
    x_MK: torch.Tensor, cast: Cast, slot: Slot | None = None, held: torch.dtype | None = None
) -> Operand:
    """`quantize` as an Operand."""
    return Operand(*quantize(x_MK, cast, slot, held), cast.rows, cast.cols, cast.power_of_2)  # saves a call


def quantize_given(x_MK: torch.Tensor, cast: Cast, s: torch.Tensor) -> torch.Tensor:
    """FP8 codes of x under given factors (q ≈ x * s, s of shape `cast.scale_shape`); beyond its range q saturates.

    >>> quantize_given(torch.tensor([[900.0]]), Cast.parse("e4m3"), torch.tensor(2.0)).float().item()
    448.0
    """
    if x_MK.numel() == 0:
        return x_MK.to(cast.dtype)
    s = s.expand(cast.scale_shape(*x_MK.shape))
    return scale_and_round(x_MK, s if s.dim() == 2 else s.reshape(1, 1), cast, finite=False)


def _quantize_on_host(x_MK, cast: Cast, slot: Slot | None, held: torch.dtype | None):
    """Per tensor on a CPU: the scale is a Python float, so nothing is broadcast and finite tensors take no checks."""
    format = BY_DTYPE[cast.dtype]
    low, high = torch.aminmax(x_MK)
    amax = max(-low.item(), high.item())
    bad = 0
    if not (finite := math.isfinite(amax)):
        mask = torch.isfinite(x_MK)
        bad = x_MK.numel() - int(mask.sum())
        amax = torch.where(mask, x_MK, 0).abs().max().item()
    s = float((slot.host or slot.on_host)[0][1, slot.index]) if slot is not None and cast.delayed else 0.0
    saturated = 0
    if s == 0.0:
        s = scale_factor_of_float(amax, format.max, cast.power_of_2)
    elif amax * s > _most_that_fits(format.max):
        saturated = int(_beyond(x_MK, format.max, s))
        s = scale_factor_of_float(amax, format.max, cast.power_of_2)
    q_MK = scale_and_round(x_MK, s, cast, finite, held)
    if slot is not None and slot.count:
        _count_on_host(slot, x_MK, q_MK, (saturated, bad, saturated > 0))
    if slot is not None and slot.record and not bad:
        _record_on_host(slot, amax, None if cast.delayed else s)
    return q_MK, torch.scalar_tensor(1.0 / s, dtype=torch.float32)


def scale_factor_of_float(amax: float, maximum: float, power_of_2: bool = False) -> float:
    """`scale_factor` for one number on the host, bit for bit.

    A quotient of two FP32 numbers rounded to FP64 and then to FP32 is the correctly rounded FP32 quotient, because
    53 >= 2 * 24 + 2 bits (Figueroa 1995, "When is double rounding innocuous?").

    >>> scale_factor_of_float(3.0, 448.0) == scale_factor(torch.tensor(3.0), 448.0).item()
    True
    """
    if not amax > 0:
        return 1.0
    s = min(ctypes.c_float(maximum / amax).value, FP32_MAX)
    return math.ldexp(1.0, math.frexp(s)[1] - 1) if power_of_2 else s


def _quantize_groups(x_MK, cast: Cast, slot: Slot | None, held: torch.dtype | None = None):
    """Any granularity, any device, nothing read back by the host except the CPU's alarm for what is not finite."""
    format = Format.of(cast.dtype)
    m, k = x_MK.shape
    on_cpu = x_MK.device.type == "cpu"
    amax = largest(x_MK, cast)
    finite = on_cpu and math.isfinite(float(amax.numpy().max()))
    if not finite:
        amax = largest(torch.where(torch.isfinite(x_MK), x_MK, 0), cast)
    s = measured = scale_factor(amax, format.max, cast.power_of_2)
    over = None
    if slot is not None and cast.delayed:
        predicted = slot.live_2S[1, slot.index]
        over = (amax * predicted > format.max * SATURATES) & (predicted > 0)
        s = torch.where(over | (predicted == 0), measured, predicted)
    q_MK = scale_and_round(x_MK, s, cast, finite, held)
    if slot is not None and (slot.count or slot.record):
        note(x_MK, q_MK, slot, cast, (finite, over, amax, s))
    return q_MK, (torch.ones_like(s) / s).view(cast.scale_shape(m, k))


def largest(x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
    """max |x| of every group, FP32 [groups down, groups across]."""
    x = as_groups(x_MK, cast.rows, cast.cols)
    if x.dtype == torch.float32 and x.numel() >= FEW:  # two passes, but no copy of the tensor's size
        return torch.maximum(x.amax(dim=(1, 3)), x.amin(dim=(1, 3)).neg_())
    return x.abs().amax(dim=(1, 3)).float()


def note(x_MK, q_MK, slot: Slot, cast: Cast, found: tuple) -> None:
    """Write one call, of which (finite, over, amax, s) was found, to the slot: without a sync but for a CPU."""
    finite, over, amax, s = found
    bad = 0 if finite else (~torch.isfinite(x_MK)).sum()
    lost, recast = 0, False
    if over is not None and slot.count:
        lost, recast = _beyond(x_MK, Format.of(cast.dtype).max, slot.live_2S[1, slot.index]), over.any()
    if x_MK.device.type == "cpu":
        if slot.count:
            _count_on_host(slot, x_MK, q_MK, (int(lost), int(bad), bool(recast)))
        if slot.record and not bad:
            _record_on_host(slot, float(amax.numpy().max()), None if cast.delayed else float(s.numpy().min()))
        return
    counts, live = slot.counts_CS[:, slot.index], slot.live_2S[:, slot.index]
    if slot.count:
        sampled = 1 if cast.per_tensor else (counts[0] % SAMPLE_EVERY == 0).to(counts.dtype)
        row = [1, x_MK.numel(), x_MK.numel() * sampled, lost, _flushed(x_MK, q_MK) * sampled, bad, recast]
        # Nothing is copied from the host: a CUDA graph may capture it.
        for counter, value in zip(counts, row, strict=True):
            counter.add_(value)
    if slot.record:
        clean = torch.as_tensor(bad == 0, device=live.device)  # a tensor there already
        live[0] = torch.where(clean, torch.maximum(live[0], amax.max()), live[0])
        if not cast.delayed:
            live[1] = torch.where(clean, s.min(), live[1])


@functools.cache
def _most_that_fits(maximum: float) -> float:
    """The largest exact product of two FP32 numbers that, rounded to FP32, is not over MAX * SATURATES in FP32.

    Every backend compares rounded numbers.  The host has the product exactly, in FP64, and rounding keeps the order:
    what rounds to the limit or below lies below the middle between the limit and its successor, or on it, because the
    limit is even (14,680,068 ulps for both formats) and a tie goes there.
    """
    limit = numpy.float32(maximum * SATURATES)
    return (float(limit) + float(numpy.nextafter(limit, numpy.float32("inf")))) / 2


def _beyond(x_MK, maximum: float, s) -> torch.Tensor:
    """How many finite elements saturate under the factor s."""
    return (torch.where(torch.isfinite(x_MK), x_MK, 0).abs().float() * s > maximum * SATURATES).sum()


def _flushed(x_MK: torch.Tensor, q_MK: torch.Tensor) -> torch.Tensor:
    """How many elements were not zero and became zero."""
    magnitude = q_MK.view(torch.uint8) & 0x7F if q_MK.dtype.itemsize == 1 else q_MK
    return torch.count_nonzero(x_MK) - torch.count_nonzero(magnitude)


def _count_on_host(slot: Slot, x_MK, q_MK, events: tuple[int, int, bool]) -> None:
    """Add one call to the slot's counters."""
    _, counts = slot.host or slot.on_host
    index, size = slot.index, x_MK.numel()
    saturated, bad, recast = events
    if counts[0, index] % SAMPLE_EVERY == 0:
        counts[2, index] += size
        counts[4, index] += int(_flushed(x_MK, q_MK))
    counts[0, index] += 1
    counts[1, index] += size
    if bad or saturated:
        counts[3, index] += saturated
        counts[5, index] += bad
        counts[6, index] += recast


def _record_on_host(slot: Slot, amax: float, s: float | None) -> None:
    live, _ = slot.host or slot.on_host
    if amax > live[0, slot.index]:
        live[0, slot.index] = amax
    if s is not None:
        live[1, slot.index] = s
