"""A training step in CUDA graphs, which need no host: ways to run a variant of fp8engine/bench/steps.py on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8engine.bench.steps import WARM_UP, Forward, Pairs, Step, compiled, eager


def by_compile(made: nn.Module, pairs: Pairs) -> tuple[Forward, Step]:
    """(forward, step) in the graphs that torch.compile makes in its mode "reduce-overhead"."""
    forward, step = compiled(made, pairs, "reduce-overhead")

    def marked(turn: int) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(turn)

    return forward, marked


def whole(made: nn.Module, pairs: Pairs) -> tuple[Forward, Step]:
    """(forward, step) of eager code captured once and replayed, with the first pair at every turn."""
    forward, step = eager(made, pairs)
    graph, y = captured(step, pairs[0][1].device)
    return forward, lambda turn: (graph.replay(), y)[1]


def captured(step: Callable[[int], Any], where: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A step in a CUDA graph, and what it returns, which every replay writes."""
    side = torch.cuda.Stream(where)
    side.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(side):
        for turn in range(WARM_UP):
            step(turn)
    torch.cuda.current_stream(where).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = step(0)
    return graph, written
