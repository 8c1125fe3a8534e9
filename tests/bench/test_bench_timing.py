"""Timing: turns, an empty L2 cache before every timed call, limits from times; never how long anything took."""

from types import SimpleNamespace

import pytest
import torch
from ticks import Ticks

from fp8engine.bench import timing
from fp8engine.bench.harness import Limits, half, limits
from fp8engine.bench.timing import CudaClock, Timing, WallClock, measure
from fp8engine.ops import device


class Card:
    """torch.cuda, as far as the clock uses it; `log` is what the card was asked for, in order."""

    def __init__(self, l2: int):
        self.l2, self.log, self.made = l2, [], 0

    def get_device_properties(self, where):
        return SimpleNamespace(L2_cache_size=self.l2)

    def Event(self, enable_timing):
        assert enable_timing
        self.made += 1
        name, at = "start" if self.made % 2 else "end", self.made
        return SimpleNamespace(
            record=lambda: self.log.append(name), at=at, elapsed_time=lambda end: 1000.0 * (end.at - at)
        )

    def _sleep(self, cycles):
        self.log.append("spin")

    def synchronize(self, where):
        self.log.append("wait")


def test_variants_take_turns_and_each_gets_its_own_times_without_the_warm_up():
    seen = []
    calls = {name: lambda turn, name=name: seen.append((name, turn)) for name in "ab"}
    found = measure(calls, Ticks(6), turns=2, warmup=1)
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert (found["a"].samples, found["b"].samples) == ((3, 5), (4, 6))


def test_median_and_quartile_spread():
    assert Timing((1.0, 2.0, 3.0, 4.0, 100.0)).median == 3.0  # one slow turn does not move it
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
    for _ in range(2):
        clock.time(lambda: None)
    assert clock.seconds() == [1.0, 1.0]  # each pair of this card's events is 1000 ms apart
    assert clock.seconds() == []


def test_limits_count_two_operations_a_product_and_a_copy_twice():
    """On a clock on which the matmul takes 1 s and the copy 2 s."""
    assert limits(torch.device("cpu"), Ticks(2), side=16, copied=1000) == Limits(2 * 16**3 / 1.0, 2 * 1000 / 2.0)


def test_a_v100_is_measured_in_fp16(monkeypatch: pytest.MonkeyPatch):
    for capability, dtype in (((7, 0), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(device, "capability", lambda where, capability=capability: capability)
        assert (half(torch.device("cuda")), half(torch.device("cpu"))) == (dtype, torch.bfloat16)
