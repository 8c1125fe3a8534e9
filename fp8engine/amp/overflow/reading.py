"""Smallest and largest value of a tensor, taken in one reduction that the host does not wait for.

    low, high = aminmax(x)      NaN in x makes both NaN

That is all a search for overflow needs: amax = max(|low|, |high|); NaN; +Inf; and -Inf alone, which a mask puts there
on purpose far more often than an overflow does.  aminmax rather than a norm: on a CPU, torch 2.13 takes 65 us for
600,000 values against 1,550 us for vector_norm(x, inf) (one core).  On CUDA parameters and gradients are read by
`_foreach_norm`, one launch for all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8engine import _torch
from fp8engine._torch import is_functorch_wrapped_tensor
from fp8engine.amp.tensors import Stamp
from fp8engine.files import HostCopy

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False, slots=True)
class Reading:
    """Smallest and largest value of one tensor: tensors on its device, numbers once copied, None if never taken.

    returned: the watched model returned the tensor.
    """

    low: Any = None
    high: Any = None
    dtype: torch.dtype | None = None
    returned: bool = False

    @property
    def taken(self) -> bool:
        """Whether the tensor was read."""
        return self.low is not None

    @property
    def amax(self) -> float:
        """Largest magnitude; NaN where there is a NaN."""
        return max(abs(self.low), abs(self.high))

    @property
    def nan(self) -> bool:
        """Whether there is a NaN."""
        return self.taken and math.isnan(self.amax)

    @property
    def inf(self) -> bool:
        """Whether there is an Inf of either sign, and no NaN."""
        return not self.finite and not self.nan

    @property
    def finite(self) -> bool:
        """Whether nothing in it is NaN or Inf (or nothing is known)."""
        return not self.taken or math.isfinite(self.amax)

    @property
    def masked(self) -> bool:
        """-Inf, and neither NaN nor +Inf: what a mask leaves."""
        return self.taken and self.low == -math.inf and self.high < math.inf

    @property
    def made(self) -> str:
        """What an op that made NaN or Inf is told to have made; a mask is "-Inf"."""
        return "NaN" if self.nan else "-Inf" if self.masked else "Inf"

    @property
    def bad(self) -> bool:
        """NaN or +Inf, which no mask leaves."""
        return not self.finite and not self.masked


class Known:
    """Readings of tensors that were not written since."""

    def __init__(self):
        self._kept: dict[int, tuple[Stamp, Reading]] = {}

    def find(self, tensor: torch.Tensor) -> Reading | None:
        """The reading kept of this tensor, if it still holds."""
        kept = self._kept.get(id(tensor))
        return kept[1] if kept is not None and kept[0].unchanged(tensor) else None

    def keep(self, tensor: torch.Tensor, reading: Reading) -> Reading:
        """Keep a reading, and return it."""
        self._kept[id(tensor)] = Stamp(tensor), reading
        return reading


def largest(readings: Iterable[Reading]) -> float:
    """The largest finite magnitude among readings, NaN where there is none."""
    return max((r.amax for r in readings if r.taken and r.finite), default=math.nan)


def readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values to read: this rank's part, a complex number as two; None for integers and what holds no values."""
    if hasattr(tensor, "to_local"):  # DTensor
        tensor = tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in FLOATS or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return None if tensor.device.type == "meta" or is_functorch_wrapped_tensor(tensor) else tensor


def read(tensor: torch.Tensor) -> Reading:
    """One reduction; the host does not wait for it."""
    values = readable(tensor)
    return Reading() if values is None else Reading(*torch.aminmax(values), values.dtype)


def read_now(tensor: torch.Tensor) -> Reading:
    """A reading in numbers; the host waits for the device."""
    reading = read(tensor)
    if reading.taken:
        reading.low, reading.high = reading.low.item(), reading.high.item()
    return reading


def read_all(given: Sequence[torch.Tensor]) -> list[Reading]:
    """A reading of each; on CUDA in a few launches for all, which see magnitudes only."""
    found: list[Reading] = []
    together: defaultdict[Any, list[tuple[Reading, torch.Tensor]]] = defaultdict(list)
    for tensor in given:
        if not tensor.is_cuda or (values := readable(tensor)) is None:
            found.append(read(tensor))
        else:
            found.append(Reading(dtype=values.dtype))
            together[values.device, values.dtype].append((found[-1], values))
    for group in together.values():
        norms = _torch.foreach_norm([values for _, values in group], math.inf)
        for (reading, _), norm in zip(group, norms, strict=True):
            reading.low = reading.high = norm
    return found


class ReadingsCopy:
    """Readings being copied to the host, those of one device and dtype in one tensor."""

    def __init__(self, readings: Iterable[Reading]):
        groups: defaultdict[Any, list[Reading]] = defaultdict(list)
        for reading in readings:
            if isinstance(reading.low, torch.Tensor):
                groups[reading.low.device, reading.low.dtype].append(reading)
        self._groups = list(groups.values())
        self._copy = HostCopy(torch.stack([x for r in group for x in (r.low, r.high)]) for group in self._groups)

    def done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._copy.done()

    def finish(self) -> None:
        """Turn the readings into numbers; waits for the device until they are copied."""
        for group, copied in zip(self._groups, self._copy.wait(), strict=True):
            values = copied.tolist()
            for index, reading in enumerate(group):
                reading.low, reading.high = values[2 * index], values[2 * index + 1]
