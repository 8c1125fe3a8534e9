"""Steps of a model that torch.compile has compiled as a whole, where `auto` decides: they begin between its graphs.

The hooks of the model's forward are part of what Dynamo traces.  It divides its graph at them, so that the controller
samples and decides as in eager code; the forward itself stays one graph.  With fullgraph=True nothing may be divided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fp8engine import _torch
from fp8engine.errors import SamplingWarning

ONE_GRAPH = (
    "auto samples and decides between graphs, and fullgraph=True makes one of the whole model: its formats stay as "
    "they are now. Compile without fullgraph, compile the model's blocks, or compile its forward alone "
    "(model.forward = torch.compile(model.forward, fullgraph=True))"
)


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
def between_graphs(function: Callable, *arguments: Any) -> None:
    """Call a function in eager code, from code that Dynamo traces."""
    function(*arguments)
