"""History of every slot's samples over a training, for the report, TensorBoard and early warning.

A slot takes at most 16 kB, however long the training is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, overload

from fp8engine import _numpy as numpy
from fp8engine.auto.alarm import Alarm, Trend
from fp8engine.scaling.prediction import Measured, Prediction

RECENT, OLDER = 32, 96  # latest samples of a slot that are kept as they are; at most so many thinned ones before them


class Sample(NamedTuple):
    """One slot's statistics at a sampled step, and the predicted effect of its cast.

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

    @property
    def crest(self) -> float:
        """amax / rms; 0 of a tensor of zeros."""
        return self.amax / self.rms if self.rms > 0 else 0.0


ROW = [(name, "f8") for name in Sample._fields]  # cast: its place in `Samples.casts`
WORST = dict.fromkeys(("amax", "kurtosis", "flushed", "saturated"), "fmax")
WORST |= {"sqnr_db": "fmin", "nonfinite": "add"}


class Samples(Sequence[Sample]):
    """The samples of one slot, oldest first: the latest RECENT as they are, the older ones thinned.

    A thinned one is the worst of the samples in a span of steps, number by number (rms: so that amax / rms is the
    largest; nonfinite: their sum), with the step and the cast of the last.  Spans begin at multiples of their length,
    so that the slots of a model keep the same steps, and they double whenever OLDER are too few.

    >>> samples = Samples()
    >>> for step in range(5000):
    ...     samples.append(Sample(step, "E4M3/tensor", 9.0 if step == 77 else 2.0, 1.0, 3.0, 31.5, 0.0, 0.0, 0))
    >>> len(samples), samples[-2].step, (samples[0].step, samples[0].amax), samples[1][:3]
    (87, 4998, (127, 9.0), (255, 'E4M3/tensor', 2.0))
    """

    def __init__(self, samples: Iterable[Sample] = ()):
        self.span = 1  # steps that a thinned sample stands for
        self.casts: list[str] = []
        self.rows = numpy.empty(0, ROW)
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Enter the latest sample."""
        if len(self.rows) == RECENT + OLDER:
            self._thin()
        if sample.cast not in self.casts:
            self.casts.append(sample.cast)
        row = tuple(sample._replace(cast=self.casts.index(sample.cast)))
        self.rows = numpy.append(self.rows, numpy.array([row], ROW))

    def since(self, step: int) -> list[Sample]:
        """The samples of later steps."""
        return [self._sample(row) for row in self.rows[self.rows["step"] > step].tolist()]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index):
        found = self.rows[index].tolist()
        return [self._sample(row) for row in found] if isinstance(found, list) else self._sample(found)

    def _sample(self, row: tuple) -> Sample:
        found = Sample._make(row)
        return found._replace(step=int(found.step), cast=self.casts[int(found.cast)], nonfinite=int(found.nonfinite))

    def evenly(self, span: int = 1) -> list[Sample]:
        """All samples, the latest thinned like the older ones or all to a longer span, as a picture needs them."""
        rows = self.rows if span == self.span == 1 else self._worst(self.rows, span)
        return [self._sample(row) for row in rows.tolist()]

    def _thin(self) -> None:
        old, recent = self.rows[:-RECENT], self.rows[-RECENT:]
        while len(self._begins(old)) > OLDER // 2:
            self.span *= 2
        self.rows = numpy.concatenate([self._worst(old), recent])

    def _worst(self, rows: numpy.ndarray, span: int = 1) -> numpy.ndarray:
        """One row for each span, the one given or the samples' own if that is longer."""
        begins = self._begins(rows, span)
        found = rows[numpy.append(begins[1:], len(rows)) - 1]
        for key, worst in WORST.items():
            found[key] = getattr(numpy, worst).reduceat(rows[key], begins)
        crest = numpy.divide(rows["amax"], rows["rms"], out=numpy.zeros(len(rows)), where=rows["rms"] > 0)
        crest = numpy.fmax.reduceat(crest, begins)
        found["rms"] = numpy.divide(found["amax"], crest, out=numpy.zeros(len(found)), where=crest > 0)
        return found

    def _begins(self, rows: numpy.ndarray, span: int = 1) -> numpy.ndarray:
        """The first index of each span."""
        return numpy.flatnonzero(numpy.diff(rows["step"] // max(span, self.span), prepend=-1))


class Spread(NamedTuple):
    """The histogram of a slot's magnitudes at its latest sample.

    counts: elements of the sample by |x| / amax, eight bins an octave, the last one's |x| amax itself (prediction.py).
    """

    step: int
    amax: float
    counts: numpy.ndarray


class History:
    """Samples, trends and alarms by slot name; `tell` gives each alarm to every callable in `listeners`.

    remedies: slot -> a call that helps against its outliers, which its alarms propose.
    """

    def __init__(self):
        self.samples: dict[str, Samples] = {}
        self.spreads: dict[str, Spread] = {}
        self.trends: dict[str, Trend] = {}
        self.alarms: list[Alarm] = []
        self.told = 0  # alarms that the listeners know
        self.remedies: dict[str, str] = {}
        self.listeners: list[Callable[[Alarm], object]] = []

    def __getstate__(self) -> dict:
        return {**self.__dict__, "listeners": []}  # a copy calls nothing of the original's user

    def enter(self, step: int, slot: str, cast: str, measured: Measured, found: Prediction) -> None:
        """Add one slot's statistics and the prediction for its cast."""
        shares = found.sqnr_db, found.flushed, found.saturated
        sample = Sample(step, cast, measured.amax, measured.rms, measured.kurtosis, *shares, measured.nonfinite)
        self.samples.setdefault(slot, Samples()).append(sample)
        self.spreads[slot] = Spread(step, measured.amax, measured.tensor[0].astype(numpy.int32))
        alarm = self.trends.setdefault(slot, Trend(slot)).add(step, measured.crest)
        if alarm is not None:
            self.alarms.append(alarm._replace(remedy=self.remedies.get(slot, "")))

    def tell(self) -> None:
        """Give the alarms raised since to the listeners, whose errors are their user's."""
        untold, self.told = self.alarms[self.told :], len(self.alarms)
        for alarm in untold:
            for listener in list(self.listeners):  # a copy: a listener may remove itself
                listener(alarm)

    def emptied(self) -> History:
        """A history without samples, for the same listeners."""
        new = History()
        new.listeners, new.remedies = self.listeners, self.remedies
        return new

    def trends_to_dict(self) -> dict:
        """The trends as `trends_from_dict` takes them, so that a resumed run warns as the uninterrupted one."""
        return {slot: {"looks": list(trend.points), "warned": trend.warned} for slot, trend in self.trends.items()}


def trends_from_dict(found: Mapping) -> dict[str, Trend]:
    """The inverse of `History.trends_to_dict`."""
    return {slot: Trend(slot, map(tuple, kept["looks"]), kept["warned"]) for slot, kept in found.items()}
