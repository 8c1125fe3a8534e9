"""Timing of calls in turns: operands rotate, the L2 cache is emptied before each call, and nothing waits inside.

    turn 0: a(0) b(0) c(0)    turn 1: a(1) b(1) c(1)    ...        median and quartile spread over the turns

A slow second hits every variant.  The turn's number goes to the call, which picks its operands by it.

On CUDA the time is that between two events around the call.  Before each pair, outside it:
- a buffer of twice the L2 cache is written, so that no operand is still in it;
- the card spins for 0.5 ms, so that the host, which was seen to need over 100 us for a launch, is ahead when the clock
  starts.
The whole series is queued, and the host waits once, at its end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fp8engine.ops.card_trials import HEAD_START

TURNS, WARMUP = 30, 3  # turns that count, and those before them: compilation, clocks, caches of descriptors
SMALLEST_FLUSH = 1 << 20  # bytes, where a card reports no L2 cache


@dataclass(frozen=True)
class Timing:
    """One variant's times.  samples: seconds of each turn.

    >>> Timing((3.0, 1.0, 2.0, 4.0)).median
    2.5
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median; 0 for one sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / self.median


class Clock(Protocol):
    """Times one call after another."""

    def time(self, call: Callable[[], object]) -> None:
        """Run or queue one timed call."""
        ...

    def seconds(self) -> list[float]:
        """Seconds of each call since `seconds` was last called, in order.  Waits for the device."""
        ...


class WallClock:
    """The host's clock, for a CPU: a call is done when it returns."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def time(self, call: Callable[[], object]) -> None:
        """Run one call."""
        start = time.perf_counter()
        call()
        self._seconds.append(time.perf_counter() - start)

    def seconds(self) -> list[float]:
        """Seconds of each call since `seconds` was last called, in order."""
        found, self._seconds = self._seconds, []
        return found


class CudaClock:
    """CUDA events around each call, on an empty L2 cache.

    card: the part of torch.cuda that it uses (Event, get_device_properties, _sleep, synchronize).
    """

    def __init__(self, where: torch.device, card: Any = torch.cuda):
        size = max(2 * card.get_device_properties(where).L2_cache_size, SMALLEST_FLUSH)
        self._card, self._where = card, where
        self._buffer = torch.empty(size, dtype=torch.uint8, device=where)
        self._events: list[tuple[Any, Any]] = []

    def time(self, call: Callable[[], object]) -> None:
        """Queue one call between two events."""
        start, end = (self._card.Event(enable_timing=True) for _ in range(2))
        self._buffer.zero_()
        self._card._sleep(HEAD_START)
        start.record()
        call()
        end.record()
        self._events.append((start, end))

    def seconds(self) -> list[float]:
        """Seconds of each call since `seconds` was last called, in order.  Waits for the card."""
        self._card.synchronize(self._where)
        found = [start.elapsed_time(end) / 1e3 for start, end in self._events]
        self._events = []
        return found


def clock(where: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock(where) if where.type == "cuda" else WallClock()


def measure(
    calls: Mapping[str, Callable[[int], object]], clock: Clock, turns: int = TURNS, warmup: int = WARMUP
) -> dict[str, Timing]:
    """Time every call, in turns.  A call takes the number of its turn, from 0, warm-up included.

    >>> sorted(measure({"a": lambda turn: None, "b": lambda turn: turn}, WallClock(), turns=4))
    ['a', 'b']
    """
    for turn in range(warmup + turns):
        for call in calls.values():
            clock.time(lambda call=call, turn=turn: call(turn))
    times, count = clock.seconds(), len(calls)
    return {name: Timing(tuple(times[warmup * count + i :: count])) for i, name in enumerate(calls)}
