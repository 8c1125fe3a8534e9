"""What was seen of every slot: for the report's pictures, TensorBoard and early warning."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy

from fp8engine.controller.alarm import Alarm, Trend
from fp8engine.prediction import Measured, Prediction

LOOKS = 1024  # of a slot that are remembered


class Look(NamedTuple):
    """What one slot held at a watched step, and what its cast was predicted to do to it.

    cast: as "E4M3/tensor".  flushed, saturated: shares of the elements.
    """

    step: int
    cast: str
    amax: float
    rms: float
    kurtosis: float
    sqnr_db: float
    flushed: float
    saturated: float
    nonfinite: int


class Spread(NamedTuple):
    """Where the magnitudes of a slot lay at its latest look.

    counts: elements of the sample by |x| / amax, eight bins an octave, the last one's |x| amax itself (prediction.py).
    """

    step: int
    amax: float
    counts: numpy.ndarray


class History:
    """Looks, trends and alarms by slot name; each alarm is also given to every callable in `listeners`."""

    def __init__(self):
        self.looks: dict[str, deque[Look]] = {}
        self.spreads: dict[str, Spread] = {}
        self.trends: dict[str, Trend] = {}
        self.alarms: list[Alarm] = []
        self.listeners: list[Callable[[Alarm], object]] = []

    def __getstate__(self) -> dict:
        return {**self.__dict__, "listeners": []}  # a copy warns nobody until it is asked to

    def enter(self, step: int, slot: str, cast: str, measured: Measured, found: Prediction) -> None:
        """One slot was looked at."""
        looks = self.looks.setdefault(slot, deque(maxlen=LOOKS))
        amax, rms, kurtosis = float(measured.amax), float(measured.rms), float(measured.kurtosis)
        sqnr, flushed, saturated = (float(number) for number in found[:3])
        looks.append(Look(step, cast, amax, rms, kurtosis, sqnr, flushed, saturated, int(measured.nonfinite)))
        self.spreads[slot] = Spread(step, float(measured.amax), measured.tensor[0].astype(numpy.int64))
        alarm = self.trends.setdefault(slot, Trend(slot)).look(step, measured.crest)
        if alarm is not None:
            self.alarms.append(alarm)
            for listener in list(self.listeners):  # one may end its own listening
                listener(alarm)

    def trends_to_dict(self) -> dict:
        """What `trends_from_dict` takes: warnings go on where they were."""
        return {slot: {"looks": list(trend.looks), "warned": trend.warned} for slot, trend in self.trends.items()}


def trends_from_dict(found: Mapping) -> dict[str, Trend]:
    """The inverse of `History.trends_to_dict`."""
    trends = {slot: Trend(slot) for slot in found}
    for slot, kept in found.items():
        trends[slot].looks.extend((int(step), float(ratio)) for step, ratio in kept["looks"])
        trends[slot].warned = float(kept["warned"])
    return trends
