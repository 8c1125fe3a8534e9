"""Quantise a matrix to FP8 with a scale per tensor, row, column or block, and count what it cost.

    a[g]    = max |x| over the finite elements of group g
    s[g]    = MAX / a[g]                        current scaling, or predicted from earlier steps (per tensor)
    q[m, k] = saturate(RNE(x[m, k] * s[g]))     scale[g] = 1 / s[g]     x ≈ q * scale

A predicted s under which a[g] would saturate is replaced by the measured one in the same call: the recast.
The twin of kernels/quantize.py.  One pass for amax, one to scale and round; a finite amax proves that the whole
tensor is finite and lets the second pass skip every check.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from fp8engine.formats import Format
from fp8engine.reference.rounding import round_to_grid, saturating_cast
from fp8engine.reference.scale import scale_factor, scale_factor_of_float

# |x * s| over MAX by less than the rounding of s itself is not saturation: s = RN(MAX / a) may land a * s one ulp up.
SATURATES = 1 + 2.0**-22
# A CPU counts flushed elements on one call in this many per slot (the first included): it costs a pass of its own.
SAMPLE_EVERY = 16
# Below this many elements torch's own conversion, one call, beats rounding in FP32 arithmetic, six.
FEW = 4096
COUNTERS = ("calls", "elements", "sampled", "saturated", "underflowed", "nonfinite", "recasts")


class How(NamedTuple):
    """One way to quantise, as one word an operator's schema can carry: "float8_e4m3fn 1x-1 p2"."""

    dtype: torch.dtype
    rows: int  # rows of a group; -1 = all
    cols: int  # columns of a group; -1 = all
    power_of_2: bool = False
    delayed: bool = False
    held: torch.dtype | None = None  # values on the FP8 grid in this dtype instead of codes: for an emulated matmul

    @staticmethod
    @functools.cache
    def parse(text: str) -> How:
        """The inverse of `str`."""
        dtype, group, *flags = text.split()
        rows, cols = map(int, group.split("x"))
        held = next((getattr(torch, flag[5:]) for flag in flags if flag.startswith("held:")), None)
        return How(getattr(torch, dtype), rows, cols, "p2" in flags, "delayed" in flags, held)

    @functools.cache
    def __str__(self) -> str:
        flags = ["p2"] * self.power_of_2 + ["delayed"] * self.delayed
        flags += [f"held:{_word(self.held)}"] if self.held else []
        return " ".join([_word(self.dtype), f"{self.rows}x{self.cols}", *flags])

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor."""
        return self.rows == self.cols == -1

    def scale_shape(self, m: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of an m x k matrix: (), (m, 1), (1, k) or one per block."""
        if self.per_tensor:
            return ()
        return tuple(1 if step == -1 else -(-size // step) for size, step in ((m, self.rows), (k, self.cols)))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Operand(NamedTuple):
    """A quantised matrix: codes (or values held on the FP8 grid), FP32 scale, and the rows x cols one scale covers.

    power_of_2: every scale is known to be one, so that folding it into 16-bit values is exact.
    """

    data: torch.Tensor
    scale: torch.Tensor
    rows: int = -1
    cols: int = -1
    power_of_2: bool = False

    @property
    def scaled_along_k(self) -> bool:
        """Whether the scale changes along the columns, so that it cannot be applied after the sum."""
        return self.scale.dim() == 2 and self.cols != -1

    def t(self) -> Operand:
        """The transposed matrix, as a view."""
        scale = self.scale.t() if self.scale.dim() == 2 else self.scale
        return Operand(self.data.t(), scale, self.cols, self.rows, self.power_of_2)


class Slot(NamedTuple):
    """Where a cast reads its predicted scale and writes its counters: column `index` of a model's tables.

    live_2S: FP32; row 0 largest amax of this step (-1: none yet), row 1 the factor s (0: none yet).
    counts_CS: INT64, a row for each of COUNTERS.  record: whether this call's amax enters the history.
    host: both tables as NumPy arrays, where the caller has them at hand.
    """

    live_2S: torch.Tensor
    counts_CS: torch.Tensor
    index: int
    record: bool = True
    host: tuple | None = None

    @property
    def on_host(self) -> tuple:
        """NumPy's views of both tables (CPU only): an element costs a tenth of what indexing a tensor does."""
        return self.host or (self.live_2S.numpy(), self.counts_CS.numpy())


def quantize(x_MK: torch.Tensor, how: How, slot: Slot | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q_MK, scale) with x_MK ≈ q_MK * scale; q is FP8, or values on the FP8 grid where `how.held`.

    x_MK: FP32, BF16 or FP16, any strides.  scale: FP32, of shape `how.scale_shape(M, K)`.

    >>> q, scale = quantize(torch.tensor([[1.0, -2.0], [0.0, 4.0]]), How(torch.float8_e4m3fn, 1, -1, power_of_2=True))
    >>> (q.float() * scale).tolist(), scale.tolist()
    ([[1.0, -2.0], [0.0, 4.0]], [[0.0078125], [0.015625]])
    """
    if x_MK.numel() == 0:
        return _cast(x_MK.float(), x_MK, how, finite=True), x_MK.new_ones(
            how.scale_shape(*x_MK.shape), dtype=torch.float32
        )
    if how.per_tensor and x_MK.device.type == "cpu":
        return _quantize_on_host(x_MK, how, slot)
    return _quantize_groups(x_MK, how, slot)


def quantize_given(x_MK: torch.Tensor, how: How, scale: torch.Tensor) -> torch.Tensor:
    """FP8 codes of x under a given scale (x ≈ q * scale, of shape `how.scale_shape`); beyond its range q saturates.

    >>> quantize_given(torch.tensor([[900.0]]), How(torch.float8_e4m3fn, -1, -1), torch.tensor(0.5)).float().item()
    448.0
    """
    x = as_groups(x_MK, how.rows, how.cols)
    down, _, across, _ = x.shape
    s = torch.ones_like(scale) / scale
    y = x.float() * s.expand(how.scale_shape(*x_MK.shape)).reshape(down, 1, across, 1)
    return from_groups(saturating_cast(y, x, how.dtype), *x_MK.shape)


def _quantize_on_host(x_MK, how: How, slot: Slot | None):
    """Per tensor on a CPU: the scale is a Python float, so nothing is broadcast and finite tensors take no checks."""
    format = Format.of(how.dtype)
    low, high = torch.aminmax(x_MK)
    amax = max(-low.item(), high.item())
    bad = 0
    if not (finite := math.isfinite(amax)):
        mask = torch.isfinite(x_MK)
        bad = x_MK.numel() - int(mask.sum())
        amax = torch.where(mask, x_MK, 0).abs().max().item()
    s = float(slot.on_host[0][1, slot.index]) if slot is not None and how.delayed else 0.0
    saturated = 0
    if s == 0.0:
        s = scale_factor_of_float(amax, format.max, how.power_of_2)
    elif amax * s > format.max * SATURATES:
        saturated = int(_beyond(x_MK, format.max, s))
        s = scale_factor_of_float(amax, format.max, how.power_of_2)
    y_MK = x_MK * s if x_MK.dtype == torch.float32 else x_MK.float().mul_(s)
    q_MK = _cast(y_MK, x_MK, how, finite)
    if slot is not None:
        _count_on_host(slot, x_MK, q_MK, (saturated, bad, saturated > 0))
        if slot.record and not bad:
            _record_on_host(slot, amax, None if how.delayed else s)
    return q_MK, torch.scalar_tensor(1.0 / s)


def _quantize_groups(x_MK, how: How, slot: Slot | None):
    """Any granularity, any device, nothing read back by the host except the CPU's alarm for what is not finite."""
    format = Format.of(how.dtype)
    m, k = x_MK.shape
    on_cpu = x_MK.device.type == "cpu"
    x = as_groups(x_MK, how.rows, how.cols)  # [groups down, rows, groups across, columns]
    amax = x.abs().amax(dim=(1, 3)).float()
    finite = on_cpu and bool(torch.isfinite(amax).all())
    if not finite:
        amax = torch.where(torch.isfinite(x), x, 0).abs().amax(dim=(1, 3)).float()
    s = measured = scale_factor(amax, format.max, how.power_of_2)
    over = None
    if slot is not None and how.delayed:
        predicted = slot.live_2S[1, slot.index]
        over = (amax * predicted > format.max * SATURATES) & (predicted > 0)
        s = torch.where(over | (predicted == 0), measured, predicted)
    y = x.float() * s[:, None, :, None]
    q_MK = from_groups(_cast(y, x, how, finite), m, k)
    if slot is not None:
        _note(x_MK, q_MK, slot, how, (finite, over, amax, s))
    return q_MK, (torch.ones_like(s) / s).view(how.scale_shape(m, k))


def _note(x_MK, q_MK, slot: Slot, how: How, found: tuple) -> None:
    """Write one call of `_quantize_groups` to the slot: on the host for a CPU, without a sync for any other device."""
    finite, over, amax, s = found
    bad = 0 if finite else (~torch.isfinite(x_MK)).sum()
    lost, recast = 0, False
    if over is not None:
        lost, recast = _beyond(x_MK, Format.of(how.dtype).max, slot.live_2S[1, slot.index]), over.any()
    if x_MK.device.type == "cpu":
        _count_on_host(slot, x_MK, q_MK, (int(lost), int(bad), bool(recast)))
        if slot.record and not bad:
            _record_on_host(slot, amax.max().item(), None if how.delayed else s.min().item())
        return
    row = [1, x_MK.numel(), x_MK.numel(), lost, _flushed(x_MK, q_MK), bad, recast]
    counts, live = slot.counts_CS[:, slot.index], slot.live_2S[:, slot.index]
    counts.add_(torch.stack([torch.as_tensor(value, device=counts.device).long() for value in row]))
    if slot.record:
        clean = torch.as_tensor(bad == 0, device=live.device)
        live[0] = torch.where(clean, torch.maximum(live[0], amax.max()), live[0])
        if not how.delayed:
            live[1] = torch.where(clean, s.min(), live[1])


def _beyond(x_MK, maximum: float, s) -> torch.Tensor:
    """How many finite elements saturate under the factor s."""
    return (torch.where(torch.isfinite(x_MK), x_MK, 0).abs().float() * s > maximum * SATURATES).sum()


def _flushed(x_MK: torch.Tensor, q_MK: torch.Tensor) -> torch.Tensor:
    """How many elements were not zero and became zero."""
    magnitude = q_MK.view(torch.uint8) & 0x7F if q_MK.dtype.itemsize == 1 else q_MK
    return torch.count_nonzero(x_MK) - torch.count_nonzero(magnitude)


def _count_on_host(slot: Slot, x_MK, q_MK, events: tuple[int, int, bool]) -> None:
    """Add one call to the slot's counters."""
    _, counts = slot.on_host
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
    live, _ = slot.on_host
    if amax > live[0, slot.index]:
        live[0, slot.index] = amax
    if s is not None:
        live[1, slot.index] = s


def _cast(y: torch.Tensor, x: torch.Tensor, how: How, finite: bool) -> torch.Tensor:
    if how.held:
        if finite and y.numel() < FEW:
            return y.to(how.dtype).to(how.held)
        return round_to_grid(y, x, how.dtype, finite).to(how.held)
    return saturating_cast(y, x, how.dtype, finite)


def as_groups(x_MK: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """x as [groups down, rows, groups across, cols], padded with zeros where the last group is short; -1 = all."""
    m, k = x_MK.shape
    rows, cols = (m if rows == -1 else rows), (k if cols == -1 else cols)
    pad = (-k % cols, -m % rows)
    if any(pad):
        x_MK = torch.nn.functional.pad(x_MK, (0, pad[0], 0, pad[1]))
    return x_MK.reshape(-(-m // rows), rows, -(-k // cols), cols)


def from_groups(x: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """The m x k matrix of which `as_groups` made x."""
    down, rows, across, cols = x.shape
    x_MK = x.reshape(down * rows, across * cols)
    return x_MK if x_MK.shape == (m, k) else x_MK[:m, :k].contiguous()
