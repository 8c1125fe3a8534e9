"""The words of a watch: calls of modules, events in order of time, the batch between two passes, names of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8engine._torch import plain_name
from fp8engine.amp.readings import Reading


class Call:
    """One call of one module."""

    __slots__ = (
        "compiled",
        "inputs",
        "module",
        "name",
        "outputs",
        "parent",
        "recomputed",
        "sequence",
        "step",
        "watched",
    )

    def __init__(self, name: str, module: nn.Module, parent: Call | None, step: int):
        self.name, self.parent, self.step = name, parent, step
        self.module = type(module)
        self.inputs: list[Reading] = []
        self.outputs: list[Reading] = []
        self.recomputed = False  # a checkpoint's second forward
        self.watched = False  # op by op
        self.sequence = 0  # of the first node it could add to the autograd graph

    def within(self, other: Call) -> bool:
        """Whether this call is `other` or was made inside it."""
        call: Call | None = self
        while call is not None and call is not other:
            call = call.parent
        return call is not None


@dataclass(frozen=True, eq=False)
class Creation:
    """One op that made something bad.

    layer: whose forward it is part of.  op: as torch names it.  amax: of its inputs (of the gradients it was given).
    made: "NaN", "Inf" or "-Inf".  operand: what it made bad.  parameter: the weight it read, or whose gradient it is.
    """

    layer: str
    op: str
    made: str
    amax: float
    dtype: torch.dtype | None
    operand: str
    parameter: str | None = None
    backward: bool = False
    call: Call | None = None


@dataclass(eq=False)
class Event:
    """What was seen.

    kind: "input", "output"; "grad_output", "grad_input" (of the tensor whose first sight was `source`); "grad_weight"
    (as accumulated so far), "grad_before" (what was there when the watch began); "weight", "buffer", "scale"; or "node"
    (of the autograd graph: it made a bad gradient out of good ones).  name: of the layer or parameter.
    """

    kind: str
    name: str
    reading: Reading
    step: int
    call: Call | None = None
    source: Reading | None = None
    creation: Creation | None = None


@dataclass
class Batch:
    """The events between two outermost calls, and the ops that made something bad, where ops were watched."""

    opwise: bool
    zeroed: set[str] = field(default_factory=set)  # parameters without a gradient when it began
    events: list[Event] = field(default_factory=list)
    creations: list[Creation] = field(default_factory=list)
    asked: list[Call] = field(default_factory=list)  # calls with an op that was told to put in an Inf

    def readings(self) -> Iterator[Reading]:
        """Every reading, those of a call's inputs and outputs included through their events."""
        return (event.reading for event in self.events)


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be hooked, by its name in the model before it was wrapped."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield (plain_name(model, name), module)


def named(model: nn.Module, held: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Parameters or buffers by such names."""
    return ((plain_name(model, name), tensor) for name, tensor in held)


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs a compiled graph: torch.compile(module), or module.compile()."""
    return hasattr(module, "_orig_mod") or compiled_in_place(module)


def compiled_in_place(module: nn.Module) -> bool:
    """Whether module.compile() was called: its hooks are compiled with it."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compiled_parts(module: Any) -> Iterator[nn.Module]:
    """The modules whose hooks are part of the compiled graph."""
    return module._orig_mod.modules() if hasattr(module, "_orig_mod") else (m for m in module.modules() if m != module)
