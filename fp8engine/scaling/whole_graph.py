"""Steps of a model that torch.compile has compiled as a whole, where `auto` decides: they begin between its graphs.

The hooks of the model's forward are part of what Dynamo traces.  It divides its graph at them, so that the controller
samples and decides as in eager code; the forward itself stays one graph.  With fullgraph=True nothing may be divided.

A decision compiles the forward anew, and so does the next sampled step.  Dynamo gives up compiling a function after
`recompile_limit` graphs of it (8), and runs it in eager code from then on: decisions take half of them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.errors import SamplingWarning

ONE_GRAPH = (
    "auto samples and decides between graphs, and fullgraph=True makes one of the whole model: its formats stay as "
    "they are now. Compile without fullgraph, compile the model's blocks, or compile its forward alone "
    "(model.forward = torch.compile(model.forward, fullgraph=True))"
)


def most_decisions() -> int:
    """In how many steps formats may change before graphs run out."""
    return _torch.recompile_limit() // 4


def begins_between(strict: bool) -> bool:
    """Whether a step may begin between graphs, asked while one is traced.

    In training it is said where it may not; strict: Dynamo raises its Unsupported instead, with the same words.
    """
    if _torch.may_divide():
        return True
    if torch.is_grad_enabled():
        if strict:
            _torch.graph_break(f"strict=True: {ONE_GRAPH}")
        _tell()
    return False


def _tell() -> None:
    warnings.warn(ONE_GRAPH, SamplingWarning, stacklevel=2)


_torch.constant_in_graphs(_tell)


@_torch.outside_of_graphs
def begin_between(state: Any, root: nn.Module | None) -> None:
    """The root's forward begins, as in eager code.  state: a ScalingState."""
    state.controller.compiled_whole = True
    try:
        state.begin_forward(root)
    finally:
        state.controller.compiled_whole = False


@_torch.outside_of_graphs
def end_between(state: Any, result: object) -> None:
    """The root's forward has ended, as in eager code."""
    state.end_forward(result=result)
