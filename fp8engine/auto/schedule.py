"""Schedule of samples: one training step in each interval, at a pseudo-random place in it; and early ones.

A fixed place would meet the same task of a training whose tasks come in turns, or the same microbatch of every
optimizer step.  The place is a function of the interval's number alone, so that a plan, a resumed run and every rank
sample the same steps.

An early sample is asked for by the amaxes that every cast leaves in the table: where one has left the range that the
samples of its layer had, by MOVED times, the layer is sampled in the next steps, at most TRIES times in an interval
without meeting such an amax.  Several ranks look at the first one's amaxes, as they decide on its samples; a look costs
them a broadcast, and so only every LOOKS-th step is looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fp8engine import _numpy as numpy

MOVED = 4.0  # times
TRIES = 4  # early samples of a layer in an interval
LOOKS = 4  # steps from one look of several ranks at the amaxes to the next


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


def looks(step: int, several: bool) -> bool:
    """Whether the amaxes of the step before this one are looked at.  several: by several ranks, which then agree."""
    return not several or (step > 0 and step % LOOKS == 0)


class Moves:
    """The range of the amaxes of each layer's operands over its samples, and which have left it.

    A layer whose amax has left the range by MOVED times is sampled in the next step, and in the ones after it until a
    sample has met such an amax: of tasks that come in turns the next step is another one.  With each sample of all
    layers the range narrows by half towards what that sample has met.

    ranges: [3, layers, 3]: the least amax of each operand, the largest, and one that is looked for, 0 for none.
    tries: early samples of each layer in the interval of that number.
    """

    def __init__(self, ranges: numpy.ndarray | None = None, number: int = -1, tries: Iterable[tuple[int, int]] = ()):
        self.ranges = numpy.zeros((3, 0, 3)) if ranges is None else ranges
        self.number, self.tries = number, dict(tries)

    def sampled(self, layers: Iterable[int], amax: numpy.ndarray, narrow: bool) -> None:
        """These layers were sampled while the table held these amaxes.  narrow: whether all layers were."""
        amax = numpy.where(numpy.isfinite(amax) & (amax > 0), amax, 0.0)
        if self.ranges.shape[1:] != amax.shape:
            self.ranges = numpy.stack([amax, amax, numpy.zeros_like(amax)])
            return
        for layer in layers:
            now, (least, most, wanted) = amax[layer], self.ranges[:, layer]
            low, high = (least * 2.0, most / 2.0) if narrow else (least, most)
            low = numpy.where(now > 0, numpy.where(low > 0, numpy.minimum(low, now), now), least)
            high = numpy.where(now > 0, numpy.maximum(high, now), most)
            wanted = numpy.where(self._beyond(wanted, low, high), wanted, 0.0)
            self.ranges[:, layer] = low, high, wanted
            if not wanted.any():
                self.tries.pop(layer, None)

    def moved(self, amax: numpy.ndarray, number: int) -> set[int]:
        """Layers to sample early, in the interval of that number."""
        if self.ranges.shape[1:] != amax.shape:
            return set()
        if number != self.number:
            self.tries, self.number = {}, number
        low, high, wanted = self.ranges
        amax = numpy.where(numpy.isfinite(amax) & (amax > 0), amax, 0.0)
        wanted[:] = numpy.where(self._beyond(amax, low, high), amax, wanted)
        far = numpy.flatnonzero((wanted > 0).any(1)).tolist()
        found = {layer for layer in far if self.tries.get(layer, 0) < TRIES}
        for layer in found:
            self.tries[layer] = self.tries.get(layer, 0) + 1
        return found

    @staticmethod
    def _beyond(amax: numpy.ndarray, low: numpy.ndarray, high: numpy.ndarray) -> numpy.ndarray:
        return (amax > 0) & (high > 0) & ((amax > MOVED * high) | (amax < low / MOVED))
