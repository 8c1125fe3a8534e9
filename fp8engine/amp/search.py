"""The search for a loss scale, told apart from a layer whose gradient overflows by itself.

A loss scaler begins too high on purpose, skips the steps whose gradients overflow, and lowers the scale until they do
not.  The layer that overflowed first is then not ill: its gradient is the largest, and a smaller scale cures it.  So a
gradient that overflowed while the forward was finite makes a layer guilty only if

    it overflows where the scale is below 1: the unscaled gradient is beyond FP16,
    it has twice overflowed at a scale at which no step had failed: the gradient has grown, not the scale,
    or the op that made it Inf or NaN works in FP32 or BF16, whose range no loss scale comes near.
"""

from __future__ import annotations

from collections import Counter

import torch

from fp8engine.amp.events import Batch
from fp8engine.amp.verdict import BACKWARD, Finding

AGAIN = 2  # once is noise of the batches, which every scaler lives with
WIDE = (torch.float32, torch.float64, torch.bfloat16)


class ScaleSearch:
    """Follows the steps of one scaler.  lowest: the smallest scale, of at least 1, at which a step has passed."""

    def __init__(self):
        self.lowest: float | None = None
        self._again: Counter[int] = Counter()
        self._scale = 1.0
        self._step: int | None = None  # the step under way, once it has gradients
        self._finite = True  # and whether all of these are finite

    def guilty(self, index: int, finding: Finding) -> bool:
        """Whether the layer is to blame for what was found now.  index: which overflow it is, each time it comes."""
        scale = finding.loss_scale
        if not finding.backward or scale is None:
            return True
        if self.lowest is not None and scale <= self.lowest:
            self.lowest = None
            self._again[index] += 1
        wide = finding.op is not None and finding.dtype in WIDE
        return scale < 1 or wide or self._again[index] >= AGAIN

    def follow(self, batch: Batch) -> float | None:
        """Take a batch, after its findings; the scale, if a step has passed with it."""
        passed = None
        for event in batch.events:
            if event.kind in BACKWARD:
                self._finite = event.reading.finite and (self._finite or self._step is None)
                self._step = event.step
            elif event.kind == "scale":
                if self._step is not None and event.step > self._step:
                    if self._finite and self._scale >= 1:
                        passed = self._scale
                        self.lowest = min(passed, self.lowest or passed)
                    self._step = None
                self._scale = event.reading.high
        return passed
