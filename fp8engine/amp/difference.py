"""The difference between two runs of a model: hooks that see each module's output, and its relative error and SQNR.

    error = ||low - high||_2 / ||high||_2        SQNR = 10 log10(||high||^2 / ||low - high||^2) dB

Sums are taken in FP64 over the elements that are finite in both runs; the others are counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Difference:
    """Sums of squares of a reference (signal) and of the deviation from it (noise), over one or more tensors.

    nonfinite_low, nonfinite_high: how many elements are NaN or Inf.

    >>> difference = Difference()
    >>> difference.add(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    >>> round(difference.error, 4), round(difference.sqnr_db, 2)
    (0.2236, 13.01)
    """

    signal: float = 0.0
    noise: float = 0.0
    nonfinite_low: int = 0
    nonfinite_high: int = 0

    def add(self, low: torch.Tensor, high: torch.Tensor, rows: int | None = None) -> None:
        """Add two tensors of one shape.  rows: how many rows are converted to FP64 at once, by default all."""
        pairs = [(low, high)] if rows is None else zip(low.split(rows), high.split(rows), strict=True)
        for ours, theirs in pairs:
            finite_low, finite_high = ours.isfinite(), theirs.isfinite()
            wrong_low, wrong_high = int((~finite_low).sum()), int((~finite_high).sum())
            got, want = ours.double(), theirs.double()
            if wrong_low or wrong_high:
                both = finite_low & finite_high
                got, want = got[both], want[both]
            self.noise += (got - want).square().sum().item()
            self.signal += want.square().sum().item()
            self.nonfinite_low += wrong_low
            self.nonfinite_high += wrong_high

    @property
    def error(self) -> float:
        """Relative error over the finite elements: Inf where the reference is 0 and the other is not."""
        if self.signal:
            return math.sqrt(self.noise / self.signal)
        return math.inf if self.noise else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantisation-noise ratio in dB: Inf where nothing differs, NaN where an element is not finite."""
        if self.nonfinite_low or self.nonfinite_high:
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@contextlib.contextmanager
def forward_hooks(wanted: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Run the block with a hook on each module: hook(module, args, kwargs, output), after the module's forward."""
    with contextlib.ExitStack() as attached:
        for module, hook in wanted:
            attached.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield
