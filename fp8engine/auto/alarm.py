"""Early warning of growing outliers: the trend of amax / rms of a slot, long before anything saturates.

    r(t) = log2(amax / rms) of the slot at sample t        slope: least squares of r over the last WINDOW samples

An alarm is raised once when the trend line has risen by `RISE` powers of two over the window and now stands above
`FLOOR`; a second one when it has risen as much again.  Growing outliers are how FP8 runs diverge: SwiGLU's channels do
it late in training (arXiv 2409.12517), and kurtosis tells it early (arXiv 2505.20524).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

WINDOW = 16  # samples
FEWEST = 6  # samples from which a trend is computed
RISE = 2.0  # powers of two: amax/rms four times what it was
FLOOR = math.log2(16)  # amax/rms of 16: a Gaussian's is 5, a Laplace's 12, at a million elements


class Alarm(NamedTuple):
    """A named warning.  ratio: amax/rms now.  growth: times what it was `steps` training steps ago.

    remedy: a call that helps, where one is known: of the input of a gated MLP's down-projection.
    """

    step: int
    slot: str
    ratio: float
    growth: float
    steps: int
    remedy: str = ""

    def __str__(self) -> str:
        grown = f"x{self.growth:.0f} in {self.steps} steps, now {self.ratio:.0f}"
        return f"step {self.step} {self.slot}: amax/rms {grown}" + f"; remedy: {self.remedy}" * bool(self.remedy)


class Trend:
    """The trend of one slot's amax/rms over its latest samples.

    >>> trend = Trend("up.input")
    >>> found = [trend.add(16 * i, 2.0 ** (i / 2)) for i in range(10)]
    >>> print(*[alarm for alarm in found if alarm])
    step 128 up.input: amax/rms x16 in 128 steps, now 16
    """

    def __init__(self, slot: str, points: Iterable[tuple[int, float]] = (), warned: float = -math.inf):
        self.slot = slot
        self.points = deque(points, maxlen=WINDOW)
        self.warned = warned  # height of the trend line at the last alarm

    def add(self, step: int, ratio: float) -> Alarm | None:
        """Add a sample; returns the alarm that it raises."""
        if not (ratio > 0 and math.isfinite(ratio)):
            return None
        self.points.append((step, math.log2(ratio)))
        if len(self.points) < FEWEST or self.points[0][0] == step:
            return None
        steps, heights = zip(*self.points, strict=True)
        slope, start = statistics.linear_regression(steps, heights)
        rise, now = slope * (steps[-1] - steps[0]), start + slope * steps[-1]
        if rise < RISE or now < max(FLOOR, self.warned + RISE):
            return None
        self.warned = now
        return Alarm(step, self.slot, ratio, 2.0**rise, steps[-1] - steps[0])
