"""What is measured beside our kernels, without a card and with a fake: Inductor's casts, graphs, the host's time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import graphs, peers
from benchmarks.peers import Graph
from fp8engine.bench import linear
from fp8engine.bench.cases import Shape
from fp8engine.bench.harness import Limits, Timer, line
from fp8engine.bench.timing import WallClock

CPU = torch.device("cpu")
TIMER = Timer(WallClock(), 2)


@pytest.mark.parametrize("done", [False, True])
def test_the_host_is_timed_while_the_card_is_busy(done: bool):
    """Nothing else can tell the host's time from the card's.  done: whether the card was done first."""
    calls = []
    event = SimpleNamespace(record=lambda: calls.append("record"), query=lambda: (calls.append("query"), done)[1])
    card: Any = SimpleNamespace(
        Event=lambda: event,
        _sleep=lambda cycles: calls.append("sleep"),
        synchronize=lambda where: calls.append("wait"),
    )
    x: Any = SimpleNamespace(device=torch.device("cuda", 0))
    found = linear.host_us(lambda x: calls.append("forward"), x, card)
    assert calls == ["wait", "sleep", "record", *["forward"] * linear.HOST_CALLS, "query", "wait"]
    assert (found is None) == done


@pytest.mark.parametrize("recipe", [None, "current", "blockwise"])
def test_without_a_card_the_host_is_timed_and_there_is_no_graph(recipe: str | None):
    eager, graph = peers.graphs(Graph(Shape(8, 16, 32), recipe), CPU, TIMER)
    assert (eager["correct"], eager["host_us"] > 0) == (True, True)
    assert (graph["correct"], "seconds" in graph) == (None, False)
    assert "host" in line(eager)
    assert "8x16x32 cannot run: " in " ".join(line(graph).split())


@pytest.mark.parametrize("wrong", [False, True])
def test_a_graph_is_timed_where_it_computes_what_eager_code_does(monkeypatch: pytest.MonkeyPatch, wrong: bool):
    def capture(step, where):
        return SimpleNamespace(replay=lambda: None), tuple(part.clone() * (-1 if wrong else 1) for part in step(0))

    monkeypatch.setattr(graphs, "captured", capture)
    _, graph = peers.graphs(Graph(Shape(8, 16, 32), "current"), CPU, TIMER)
    assert graph["correct"] is ("over_eager" in graph) is not wrong


CASTS = {
    "right": lambda codes: codes,
    "another code": lambda codes: codes.view(torch.uint8).bitwise_xor(1).view(torch.float8_e4m3fn),
    "of nothing": torch.zeros_like,
}


@pytest.mark.parametrize("which", CASTS)
def test_inductors_casts_are_checked(monkeypatch: pytest.MonkeyPatch, which: str):
    monkeypatch.setattr(torch, "compile", lambda cast, fullgraph: lambda x: CASTS[which](cast(x)))
    ours, given, own = peers.inductor_casts((64, 96), CPU, TIMER, Limits(1e9, 1e9))
    assert ours["correct"]
    assert given["correct"] is ("of_copy" in given) is own["correct"] is (which == "right")
