"""Calls of modules and readings of their tensors in a watched training loop, in order of time.

A pass is one outermost call of the model.  Its gradients come later and may be those of several passes.  A batch holds
the events from the beginning of one pass to the beginning of the next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp8engine.amp.overflow.reading import Reading


@dataclass(eq=False, slots=True)
class Call:
    """One call of one module.

    recomputed: a checkpoint's second forward.  opwise: its ops are checked one by one.  sequence: of the first node
    that it could add to the autograd graph.  overflowed: an overflow was found in it (locate.py).
    """

    name: str
    module: nn.Module
    parent: Call | None
    step: int
    recomputed: bool
    opwise: bool
    inputs: list[Reading] = field(default_factory=list)
    sequence: int = 0
    overflowed: bool = False


@dataclass(eq=False)
class Event:
    """One reading of one tensor.

    kind: "input", "output"; "grad_output", "grad_input" (of the tensor whose own reading is `source`); "grad_weight"
    (as accumulated so far), "grad_before" (what was there when a pass, or the watch, began); "weight", "frozen" (one
    that is not trained), "buffer", "scale"; or what an op of a pass watched op by op made: "op", NaN or Inf of inputs
    without; "node", the same in the backward, and "hidden", what a node was given there and did not pass on; "log",
    -Inf of zeros and ones; "mask", an Inf that was among an op's arguments.  name: of the layer or parameter.  scale:
    the loss scale's reading, where there is a scaler.  made: of an "op" or a "node", operand, op, input_amax and
    parameter of its Finding.
    """

    kind: str
    name: str
    reading: Reading
    step: int
    scale: Reading | None
    call: Call | None = None
    source: Reading | None = None
    made: dict[str, Any] = field(default_factory=dict)

    def around(self) -> Iterator[Call]:
        """The call that it is of and every call around that one, from the inside; none outside the model."""
        call = self.call
        while call is not None:
            yield call
            call = call.parent

    @property
    def loss_scale(self) -> float | None:
        """The loss scale as a number, once it is on the host."""
        return self.scale.high if self.scale else None

    @property
    def arrived(self) -> bool:
        """Whether it is a gradient where a backward ends: of a weight, or of what was given to the model."""
        return self.kind == "grad_weight" or (self.kind == "grad_input" and self.maker is None)

    @property
    def maker(self) -> Call | None:
        """The call whose forward made an output, or an input that nothing watched made; None outside the model."""
        if self.call is None or self.kind in ("output", "grad_output"):
            return self.call
        return self.call.parent


@dataclass
class Batch:
    """The events from one outermost call to the next.  opwise: ops were checked."""

    opwise: bool
    events: list[Event] = field(default_factory=list)


class _Thread(threading.local):
    """The calls that run in one thread, innermost last; whether the recorder itself is at work there."""

    def __init__(self):
        self.calls: list[Call] = []
        self.quiet = False


class Trace:
    """Batches, and the call that is running in each thread.

    parameters: names by id.  step: the one under way.  done: is given each batch once it is finished.  scale: the
    latest loss scale.  outermost: the call of the pass, while it runs.  closed: nothing is recorded.
    """

    def __init__(self, parameters: dict[int, str], step: int, done: Callable[[Batch], None]):
        self.parameters, self.step, self.done = parameters, step, done
        self.batch = Batch(opwise=False)
        self.scale: Reading | None = None
        self.outermost: Call | None = None
        self.closed = True
        self.thread = _Thread()

    def seal(self) -> None:
        """Close the batch, so that it can be judged; events that follow go to a new one, for whose gradients the same
        was there before."""
        before = [event for event in self.batch.events if event.kind == "grad_before"]
        batch, self.batch = self.batch, Batch(self.batch.opwise, before)
        self.done(batch)

    def add(self, kind: str, reading: Reading, call: Call | None = None, name: str = "", **more: Any) -> None:
        """Record a reading, if anything was read, under the name of its call, if it has one; `more` as in Event."""
        if reading.taken:
            name, step = (call.name, call.step) if call else (name, self.step)
            self.batch.events.append(Event(kind, name, reading, step, self.scale, call, **more))

    def current(self) -> Call | None:
        """The innermost call that is running in this thread; in a thread the model has started, the outermost."""
        return self.thread.calls[-1] if self.thread.calls else self.outermost

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The recorder's own ops in the block are not checked."""
        before, self.thread.quiet = self.thread.quiet, True
        try:
            yield
        finally:
            self.thread.quiet = before
