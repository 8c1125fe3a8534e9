"""Timing: turns, operands that rotate, an empty L2 cache before every timed call; never how long anything took."""

from types import SimpleNamespace

import pytest
import torch

from fp8engine.bench import timing
from fp8engine.bench.timing import CudaClock, Timing, WallClock, measure


class Scripted:
    """A clock that tells what it was told to, in order."""

    def __init__(self, seconds):
        self.script, self.count = list(seconds), 0

    def time(self, call):
        call()
        self.count += 1

    def seconds(self):
        return self.script[: self.count]


class Card:
    """torch.cuda, as far as the clock uses it; `log` is what the card was asked for, in order."""

    def __init__(self, l2: int):
        self.l2, self.log, self.made = l2, [], 0

    def get_device_properties(self, where):
        return SimpleNamespace(L2_cache_size=self.l2)

    def Event(self, enable_timing):
        assert enable_timing
        self.made += 1
        name = "start" if self.made % 2 else "end"
        at = self.made
        return SimpleNamespace(
            record=lambda: self.log.append(name), at=at, elapsed_time=lambda end, at=at: 1000.0 * (end.at - at)
        )

    def _sleep(self, cycles):
        self.log.append("spin")

    def synchronize(self, where):
        self.log.append("wait")


def test_variants_take_turns_and_see_the_turn():
    seen = []
    calls = {name: lambda turn, name=name: seen.append((name, turn)) for name in "ab"}
    measure(calls, WallClock(), turns=2, warmup=1)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_each_gets_its_own_times_without_the_warm_up():
    calls = {"a": lambda turn: None, "b": lambda turn: None}
    found = measure(calls, Scripted([99, 99, 1, 10, 2, 20, 3, 30]), turns=3, warmup=1)
    assert found["a"].samples == (1, 2, 3)
    assert found["b"].samples == (10, 20, 30)


def test_median_and_quartile_spread():
    found = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert found.median == 3.0  # one slow turn does not move it
    assert Timing((1.0, 2.0, 3.0)).spread == pytest.approx(1.0)  # quartiles 1 and 3 around 2
    assert Timing((2.0,)).spread == 0.0


def test_a_wall_clock_starts_anew_after_telling():
    clock = WallClock()
    clock.time(lambda: None)
    assert len(clock.seconds()) == 1
    assert clock.seconds() == []


def test_the_cache_is_emptied_before_each_timed_call_and_outside_its_time(monkeypatch: pytest.MonkeyPatch):
    card = Card(l2=4 << 20)
    clock = CudaClock(torch.device("cpu"), card)
    assert clock._buffer.nbytes == 8 << 20
    monkeypatch.setattr(clock, "_buffer", SimpleNamespace(zero_=lambda: card.log.append("flush")))
    measure({"a": lambda turn: card.log.append("a"), "b": lambda turn: card.log.append("b")}, clock, turns=2, warmup=1)
    one = ["flush", "spin", "start", "a", "end", "flush", "spin", "start", "b", "end"]
    assert card.log == one * 3 + ["wait"]  # the host waits once, at the end


def test_events_are_read_in_seconds_and_only_once():
    clock = CudaClock(torch.device("cpu"), Card(l2=0))
    assert clock._buffer.nbytes >= timing.SMALLEST_FLUSH  # a card that reports no L2 is flushed all the same
    clock.time(lambda: None)
    clock.time(lambda: None)
    assert clock.seconds() == [1.0, 1.0]  # each pair of this card's events is 1000 ms apart
    assert clock.seconds() == []
