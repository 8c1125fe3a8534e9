"""A report as TensorBoard events: scalars of each slot over time, histograms of its magnitudes, decisions as text.

    amax/SLOT sqnr/SLOT flushed/SLOT saturated/SLOT crest/SLOT format/SLOT    scalars; format is an index into FORMATS
    scale/SLOT                                                                as it is when written
    log2_magnitude/SLOT                                                       a histogram of log2 |x|, an octave a bin
    decisions, alarms                                                         text, a line for each

Under `auto` a slot has a point for each sample, at the step that was sampled; under a fixed recipe one for each write,
with shares counted since the start and no SQNR, which is not measured there.  What is not finite has no point.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Self

from fp8engine.auto import Alarm
from fp8engine.auto.history import Sample, Spread
from fp8engine.errors import ReportError
from fp8engine.numerics import formats
from fp8engine.report.facts import Facts
from fp8engine.report.folded import measured
from fp8engine.report.state import slot_name
from fp8engine.scaling.table import ROLES

FORMATS = tuple(formats.FORMATS)
OCTAVE = 8  # bins of a Spread


class EventWriter:
    """Writes reports of one model into a folder; each write adds what is new since the last.

    Raises ReportError where tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, logdir: str | os.PathLike):
        try:
            from torch.utils.tensorboard.writer import SummaryWriter  # needs the optional package tensorboard
        except ImportError as error:
            raise ReportError(
                f"TensorBoard's events need its package ({error}): pip install 'fp8engine[report]'"
            ) from error
        try:
            self.events = SummaryWriter(os.fspath(logdir))
        except OSError as error:
            raise ReportError(f"cannot write in {os.fspath(logdir)}: {error.strerror or error}") from error
        self.seen: dict[str, int] = {}  # slot -> step of the last sample written
        self.first: dict[str, Sample] = {}  # slot -> the first of its samples then, without its rms
        self.told: set[tuple] = set()  # decisions and alarms written, with their tags

    def write_report(self, report: Facts, step: int = 0) -> None:
        """Add what is new in a report; `step` is where numbers without a step of their own go."""
        for slot, samples in report.auto.samples.items():
            first = samples[0]._replace(rms=0.0)  # a thinned one's is rounded again
            before = self.first.setdefault(slot, first)
            if first.step <= before.step and repr(first) != repr(before):  # a training that forgets its evaluations
                del self.seen[slot]
            self.first[slot] = first
            for sample in samples.since(self.seen.get(slot, -1)):
                self._sample(slot, sample)
            spread = report.auto.spreads.get(slot)
            if spread is not None and spread.step > self.seen.get(slot, -1):
                self._histogram(slot, spread)
            self.seen[slot] = samples[-1].step
        for layer in report.layers:
            for role in ROLES:
                self._slot(slot_name(layer["name"], role), layer[role], step)
        self._texts(report)
        self.events.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sample(self, slot: str, sample: Sample) -> None:
        numbers = {"amax": sample.amax, "sqnr": sample.sqnr_db, "flushed": sample.flushed}
        numbers |= {"saturated": sample.saturated, "crest": sample.crest or math.nan}  # no crest of a tensor of zeros
        self._scalars(slot, numbers, sample.step, sample.cast.partition("/")[0])

    def _slot(self, slot: str, numbers: Mapping, step: int) -> None:
        """The numbers of the scaling table; of a sampled slot only its scale, which samples do not hold."""
        if not numbers.get("calls"):
            return
        self._scalars(slot, {"scale": numbers["scale"]}, step)
        if slot not in self.seen:
            shares = {"flushed": measured(numbers, "underflowed"), "saturated": measured(numbers, "saturated")}
            self._scalars(slot, {"amax": numbers["amax"], **shares}, step, numbers["format"])

    def _scalars(self, slot: str, numbers: Mapping[str, float | None], step: int, format: str = "") -> None:
        if format in FORMATS:
            numbers = {**numbers, "format": FORMATS.index(format)}
        for key, value in numbers.items():
            if value is not None and math.isfinite(value):
                self.events.add_scalar(f"{key}/{slot}", value, step)

    def _histogram(self, slot: str, spread: Spread) -> None:
        """Counts by octaves, lowest first; the first octave holds zeros too and is left out."""
        octaves = spread.counts.reshape(-1, OCTAVE).sum(1)[1:].tolist()
        if not (spread.amax > 0 and sum(octaves)):
            return
        top = math.log2(spread.amax)  # where the last bin begins: it holds amax alone
        edges = [top + 1 / OCTAVE + i for i in range(1 - len(octaves), 1)]  # upper ends
        middles = [edge - 0.5 for edge in edges]
        self.events.add_histogram_raw(
            f"log2_magnitude/{slot}",
            min=edges[0] - 1,
            max=top,
            num=sum(octaves),
            sum=sum(count * middle for count, middle in zip(octaves, middles, strict=True)),
            sum_squares=sum(count * middle**2 for count, middle in zip(octaves, middles, strict=True)),
            bucket_limits=edges,
            bucket_counts=octaves,
            global_step=spread.step,
        )

    def _texts(self, report: Facts) -> None:
        """Each decision and alarm as a line of code, so that no name is taken for Markdown."""
        lines: dict[tuple[str, int], list[str]] = defaultdict(list)
        for each in report.decisions:
            change = f"{each['slot']} {each['before']} -> {each['after']}: {each['why']}"
            lines["decisions", each["step"]].append(change)
        for each in report.alarms:
            lines["alarms", each["step"]].append(str(Alarm(**each)))
        for (tag, step), texts in lines.items():
            new = [text for text in texts if (tag, step, text) not in self.told]
            self.told |= {(tag, step, text) for text in new}
            if new:
                self.events.add_text(tag, "".join(f"    {text}\n" for text in new), step)
