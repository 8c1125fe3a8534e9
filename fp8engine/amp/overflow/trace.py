"""Calls of modules and readings of their tensors in a watched training loop, in order of time.

A pass is one outermost call of the model.  Its gradients come later and may be those of several passes.  A batch holds
the events from the beginning of one pass to the beginning of the next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8engine.amp.overflow.reading import Reading


class Call:
    """One call of one module."""

    __slots__ = ("inputs", "module", "name", "opwise", "parent", "recomputed", "sequence", "step")

    def __init__(self, name: str, module: nn.Module, parent: Call | None, step: int):
        self.name, self.parent, self.step = name, parent, step
        self.module = type(module)
        self.inputs: list[Reading] = []
        self.recomputed = False  # a checkpoint's second forward
        self.opwise = False  # its ops are checked one by one
        self.sequence = 0  # of the first node it could add to the autograd graph

    def around(self) -> Iterator[Call]:
        """This call and every call around it, from the inside."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True, eq=False)
class Creation:
    """One op that made NaN or Inf of inputs without.

    layer: whose forward it is part of.  op: as torch names it.  made: "NaN", "Inf" or "-Inf".  amax: of its inputs (of
    the gradients it was given).  operand: what it made bad.  parameter: the weight it read, or whose gradient it is.
    backward: it is a node of the autograd graph.
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
    """One reading, or one op that made NaN or Inf.

    kind: "input", "output"; "grad_output", "grad_input" (of the tensor whose own reading is `source`); "grad_weight"
    (as accumulated so far), "grad_before" (what was there when the watch began); "weight", "buffer", "scale"; or "op"
    (see creation).  name: of the layer or parameter.  loss_scale: filled in when the batch is judged.
    """

    kind: str
    name: str
    reading: Reading
    step: int
    call: Call | None = None
    source: Reading | None = None
    creation: Creation | None = None
    loss_scale: float | None = None

    @property
    def maker(self) -> Call | None:
        """The call whose forward made an output, or an input that nothing watched made; None outside the model."""
        if self.call is None or self.kind in ("output", "grad_output"):
            return self.call
        return self.call.parent


@dataclass
class Batch:
    """The events from one outermost call to the next.

    opwise: ops were checked.  without_gradient: parameters that had none when it began.  masking: calls that ran an op
    with an Inf among its arguments.
    """

    opwise: bool
    without_gradient: set[str] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    masking: list[Call] = field(default_factory=list)

    def creations(self) -> list[Creation]:
        """What ops of the forward made."""
        return [e.creation for e in self.events if e.creation is not None and not e.creation.backward]


class Trace:
    """Batches, and the call that is running in each thread.

    parameters: names by id.  sealed: finished batches; the owner of the recorder takes them out.  step: of the pass
    under way.  outermost: its call, while it runs.  closed: the watch is over, and nothing is recorded.
    """

    def __init__(self, parameters: dict[int, str]):
        self.parameters = parameters
        self.batch = Batch(opwise=False)
        self.sealed: list[Batch] = []
        self.step = -1
        self.outermost: Call | None = None
        self.closed = True
        self._thread = threading.local()

    def seal(self) -> None:
        """Close the batch, so that it can be judged; events that follow go to a new one."""
        if self.batch.events:
            self.sealed.append(self.batch)
        self.batch = Batch(self.batch.opwise)

    def add(self, event: Event) -> None:
        """Record an event, if anything was read."""
        if event.reading.taken:
            self.batch.events.append(event)

    def created(self, creation: Creation) -> None:
        """Record that an op made NaN or Inf."""
        step = creation.call.step if creation.call else self.step
        event = Event("op", creation.layer, Reading(), step, creation.call, creation=creation)
        self.batch.events.append(event)

    def masked(self) -> None:
        """Record that the running call has an op with an Inf among its arguments: a mask."""
        call = self.current()
        if call is not None and (not self.batch.masking or self.batch.masking[-1] is not call):
            self.batch.masking.append(call)

    @property
    def stack(self) -> list[Call]:
        """The calls that run in this thread, innermost last."""
        if not hasattr(self._thread, "calls"):
            self._thread.calls = []
        return self._thread.calls

    def current(self) -> Call | None:
        """The innermost call that is running in this thread; in a thread the model has started, the outermost."""
        return self.stack[-1] if self.stack else self.outermost

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The recorder's own ops in the block are not checked."""
        depth = getattr(self._thread, "quiet", 0)
        self._thread.quiet = depth + 1
        try:
            yield
        finally:
            self._thread.quiet = depth

    @property
    def is_quiet(self) -> bool:
        """Whether this thread is in such a block."""
        return getattr(self._thread, "quiet", 0) > 0
