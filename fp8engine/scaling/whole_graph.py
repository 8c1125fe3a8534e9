"""Steps of a model that torch.compile has compiled as a whole, where `auto` decides: they begin between its graphs.

The hooks of the model's forward are part of what Dynamo traces.  It divides its graph at them, so that the controller
samples and decides as in eager code; the forward itself stays one graph.  With fullgraph=True nothing may be divided.

A decision compiles the forward anew, and so does the next sampled step.  Dynamo gives up compiling a function after
`recompile_limit` graphs of it (8), and runs it in eager code from then on: decisions take half of them.  Of blocks
compiled one by one nobody counts the graphs: with fullgraph=True, where Dynamo ends the training instead, that is said
when the first is traced.
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


ENOUGH = 64  # graphs of one function: two for each set of formats that a block has had
FEW_GRAPHS = (
    "auto's decisions compile a function anew for every set of formats, and where fullgraph=True compiles it, torch "
    "ends the training (FailOnRecompileLimitHit) after torch._dynamo.config.recompile_limit graphs, which is {}: "
    f"set it to {ENOUGH}, or compile without fullgraph"
)


def most_decisions() -> int:
    """In how many steps formats may change before graphs run out."""
    return _torch.recompile_limit() // 4


def begins_between(state: Any) -> bool:
    """Whether a step may begin between graphs, asked while one is traced; in training it is said where it may not.

    state: a ScalingState.
    """
    if _torch.may_divide():
        return True
    state.formats_stay = True
    if torch.is_grad_enabled():
        _tell(state, ONE_GRAPH)
    return False


def check_limit(state: Any) -> None:
    """Tell, when a layer's graph is traced for training, that decisions may take more graphs than there may be."""
    if state.on_step is not None and not state.formats_stay and _few_graphs():
        _tell(state, FEW_GRAPHS.format(_torch.recompile_limit()))


def _tell(state: Any, what: str) -> None:
    """Warn; under strict=True Dynamo raises its Unsupported instead, with the same words."""
    if state.controller.failures.strict:
        _torch.graph_break(f"strict=True: {what}")
    _warn(what)


@_torch.constant_in_graphs
def _warn(what: str) -> None:
    warnings.warn(what, SamplingWarning, stacklevel=2)


@_torch.constant_in_graphs
def _few_graphs() -> bool:
    """Whether the limit is low for a graph that may not be divided: true once, in a function's first graph."""
    if _torch.may_divide() or _torch.recompile_limit() >= ENOUGH or not _torch.first_graph():
        return False
    graph = vars(_torch.traced_graph())
    told = "_fp8engine_told" in graph
    graph["_fp8engine_told"] = True
    return not told


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
