"""Early warning: a tensor whose largest values grow away from the rest, long before anything saturates.

    r(t) = log2(amax / rms) of the slot at look t        slope: least squares of r over the last WINDOW looks

An alarm is raised once when the trend line has risen by `RISE` powers of two over the window and now stands above
`FLOOR`; a second one when it has risen as much again.  Growing outliers are how FP8 runs diverge: SwiGLU's channels do
it late in training (arXiv 2409.12517), and kurtosis tells it early (arXiv 2505.20524).
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

WINDOW = 16  # looks
FEWEST = 6  # looks before a trend is one
RISE = 2.0  # powers of two: amax/rms four times what it was
FLOOR = math.log2(16)  # amax/rms of 16: a Gaussian's is 5, a Laplace's 12, at a million elements


class Alarm(NamedTuple):
    """A named warning.  ratio: amax/rms now.  growth: times what it was `steps` training steps ago."""

    step: int
    slot: str
    ratio: float
    growth: float
    steps: int

    def __str__(self) -> str:
        return f"step {self.step} {self.slot}: amax/rms x{self.growth:.0f} in {self.steps} steps, now {self.ratio:.0f}"


class Trend:
    """The recent past of one slot's amax/rms.

    >>> trend = Trend("up.input")
    >>> found = [trend.look(16 * i, 2.0 ** (i / 2)) for i in range(10)]
    >>> print(*[alarm for alarm in found if alarm])
    step 128 up.input: amax/rms x16 in 128 steps, now 16
    """

    def __init__(self, slot: str):
        self.slot = slot
        self.looks: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.warned = -math.inf  # where the trend line stood at the last alarm

    def look(self, step: int, ratio: float) -> Alarm | None:
        """Enter a look; the alarm that it raises."""
        if not (ratio > 0 and math.isfinite(ratio)):
            return None
        self.looks.append((step, math.log2(ratio)))
        if len(self.looks) < FEWEST:
            return None
        rise, now = self._line()
        if rise < RISE or now < max(FLOOR, self.warned + RISE):
            return None
        self.warned = now
        return Alarm(step, self.slot, ratio, 2.0**rise, step - self.looks[0][0])

    def _line(self) -> tuple[float, float]:
        """(rise over the window, height now) of the least-squares line, in powers of two."""
        steps = [step for step, _ in self.looks]
        mean_x = sum(steps) / len(steps)
        mean_y = sum(r for _, r in self.looks) / len(self.looks)
        spread = sum((x - mean_x) ** 2 for x in steps)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in self.looks) / spread if spread else 0.0
        return slope * (steps[-1] - steps[0]), mean_y + slope * (steps[-1] - mean_x)
