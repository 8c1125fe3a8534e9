"""Schedule of samples: one training step in each interval, at a pseudo-random place in it; and early ones.

A fixed place would meet the same task of a training whose tasks come in turns, or the same microbatch of every
optimizer step.  The place is a function of the interval's number alone, so that a plan, a resumed run and every rank
sample the same steps.

An early sample is asked for by the amaxes that every cast leaves in the table: where one has moved by MOVED times since
its layer was sampled, up or down, the layer is sampled in the next step, at most TRIES times in an interval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fp8engine import _numpy as numpy

MOVED = 4.0  # times
TRIES = 4  # early samples of a layer in an interval


def sampled_step(number: int, interval: int) -> int:
    """The step that is sampled in the interval of that number: steps number * interval and the interval - 1 after it.

    The first is the first step of all, because nothing is decided before it.

    >>> [sampled_step(number, 16) for number in range(5)]
    [0, 19, 43, 58, 75]
    """
    if number == 0:
        return 0
    seed = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return number * interval + int.from_bytes(seed, "little") % interval


def is_sampled(step: int, interval: int) -> bool:
    """Whether all layers are sampled in a step; a step before the first counts as the first."""
    return max(step, 0) == sampled_step(max(step, 0) // interval, interval)


class Moves:
    """The amaxes of each layer's operands at its last sample, [layers, 3], and which have moved since."""

    def __init__(self):
        self.amax: numpy.ndarray | None = None
        self.tries: dict[int, int] = {}
        self.number = -1  # of the interval that `tries` counts in

    def sampled(self, layers: Iterable[int], amax: numpy.ndarray) -> None:
        """These layers were sampled while the table held these amaxes."""
        if self.amax is None or self.amax.shape != amax.shape:
            self.amax = numpy.where(numpy.isin(numpy.arange(len(amax)), list(layers))[:, None], amax, -1.0)
            return
        for layer in layers:
            self.amax[layer] = amax[layer]

    def moved(self, amax: numpy.ndarray, number: int) -> set[int]:
        """Layers to sample early, in the interval of that number."""
        if self.amax is None or self.amax.shape != amax.shape:
            return set()
        if number != self.number:
            self.tries, self.number = {}, number
        known = (self.amax > 0) & (amax > 0) & numpy.isfinite(amax)
        ratio = numpy.divide(amax, self.amax, out=numpy.ones_like(amax), where=known)
        far = numpy.flatnonzero(((ratio > MOVED) | (ratio < 1 / MOVED)).any(1)).tolist()
        found = {layer for layer in far if self.tries.get(layer, 0) < TRIES}
        for layer in found:
            self.tries[layer] = self.tries.get(layer, 0) + 1
        return found
