"""What a process of the run does: a group's work on the card, or its share of the kernels without one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.card import launchers, measure, pack, pretend
from benchmarks.card.records import Sink, read
from fp8engine.bench import harness
from fp8engine.ops import device

MARGIN = 0.15  # of a group's time: nothing new is begun in it
STARTING = 10.0  # seconds that importing and making a CUDA context may take


def work(name: str, file: Path, cache: Path, seconds: float) -> None:
    """One group, on the card."""
    sink = Sink(file, name)
    sink.begin("the CUDA context")
    where = card()
    if not device.has_fp8(where):
        sink.write("note", text=f"not measured: {device.name(where)} has no FP8 Tensor Cores")
        return
    pack.stable_keys()
    launchers.use(cache)
    counts = pack.Counts(cache)
    if not any(record["kind"] == "machine" for record in read(file)[0]):
        sink.write("machine", **harness.machine(where))
    try:
        stop = time.perf_counter() + max(seconds * (1 - MARGIN) - STARTING, seconds / 3)
        measure.WORK[name](measure.Group(where, sink, stop))
        torch.cuda.synchronize(where)
    finally:
        sink.write("kernels", pack=counts.pack, cache=counts.cache, compiled=counts.compiled)


def card() -> torch.device:
    """The card on which this process measures, made current."""
    where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(where)
    return where


def warm(share: pretend.Share, file: Path, cache: Path, groups: Sequence[str]) -> None:
    """A share of the kernels of these groups, in their order, and the C code that launches each."""
    os.nice(10)
    launchers.use(cache)
    launcher = pretend.built if torch.cuda.is_available() else pretend.nothing
    _compile(share, file, cache, groups, launcher)


def _compile(share: pretend.Share, file: Path, cache: Path, groups: Sequence[str], launcher) -> None:
    torch.set_num_threads(1)
    pack.stable_keys()
    with pretend.pretending(share, launcher) as where:
        for name in groups:
            sink, counts, start = Sink(file, name), pack.Counts(cache), time.perf_counter()
            measure.WORK[name](measure.Group(where, _Quiet(sink), float("inf")))
            sink.write(
                "warm",
                index=share.index,
                of=share.of,
                pack=counts.pack,
                cache=counts.cache,
                compiled=counts.compiled,
                seconds=round(time.perf_counter() - start, 1),
            )


class _Quiet(Sink):
    """Keeps what could not be followed, and nothing else: without a card there are no results."""

    def __init__(self, sink: Sink):
        super().__init__(sink.path, sink.group)

    def write(self, kind: str, **fields) -> None:
        """Only an error: values, and so what is wrong with them, are not there."""
        if kind == "check" and fields.get("raised"):
            super().write("unfollowed", what=fields["name"], why=fields["wrong"])
