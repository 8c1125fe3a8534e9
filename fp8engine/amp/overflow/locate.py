"""Location of the overflows of a pass, in the first modules with finite inputs and an output that is not.

Forward, each bad event points to the forward that made it:
    a weight that is NaN or Inf before the pass       -> that weight; its module is a victim of the step before
    an input of the model                             -> the data
    an input of a module that nothing watched made    -> the forward around that module, between its parts
    an output                                         -> the module that returned it
It is named if its own inputs were finite and nothing in it was named before.  Of a pass watched op by op the op that
made it is known too.  -Inf alone is a mask until an op is seen to have made it, except from layers of torch.nn without
parts, which mask nothing: Linear, convolutions, norms.

Backward, if the forward was finite: where the pass was watched op by op, the first node of the autograd graph that made
a bad gradient of good ones.  Otherwise only the neighbourhood is known, and the finding is marked as a guess:
    the gradient that came into the model was bad     -> outside: the loss, or a loss scale that is too large
    the gradient of an output or input is bad         -> the module that got the last good gradient before it
    only a weight's gradient is bad                   -> the module that holds the weight
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp8engine.amp.overflow.finding import Finding
from fp8engine.amp.overflow.reading import Reading, largest
from fp8engine.amp.overflow.trace import Batch, Call, Event


@dataclass
class Seen:
    """What a batch has shown so far.

    found: in the forward.  ops: what ops of its forward made.  making, masking: calls with such an op, or with a mask,
    inside.  overflowed: calls with an overflow inside.  bad: readings.  bad_weights: layers that hold one.  gradient:
    the first bad one.  last_good: the gradient before it.  given: modules whose grad_output was finite before it.
    weights: those whose gradient became bad.
    """

    found: list[Finding] = field(default_factory=list)
    ops: list[Event] = field(default_factory=list)
    making: set[Call] = field(default_factory=set)
    masking: set[Call] = field(default_factory=set)
    overflowed: set[Call] = field(default_factory=set)
    bad: set[Reading] = field(default_factory=set)
    bad_weights: list[str] = field(default_factory=list)
    gradient: Finding | None = None
    last_good: Event | None = None
    given: dict[str, None] = field(default_factory=dict)
    weights: list[Event] = field(default_factory=list)


class Locator:
    """Turns batches into findings; remembers the weights it has named and the masks it has seen made.

    `begin` a batch, `read` its events in order of time, `end` it.  seen: what they have shown.  layers: the modules by
    name.  compiled: the names of those whose parts cannot be seen.
    """

    def __init__(self, layers: dict[str, nn.Module], compiled: set[str]):
        self._layers, self._compiled = layers, compiled
        self.seen = Seen()
        self._named: set[str] = set()  # weights
        self._stale: set[str] = set()  # parameters whose gradient was bad before: accumulating leaves it so
        self._masks: set[str] = set()  # modules that were seen to put in -Inf on purpose
        self._maybe_masks: set[str] = set()  # modules whose -Inf only their ops can tell from a mask

    @property
    def undecided(self) -> bool:
        """Whether some -Inf may be a mask or an overflow, which a pass watched op by op will tell."""
        return bool(self._maybe_masks - self._masks)

    def begin(self, batch: Batch) -> None:
        """Forget what the batch before has shown."""
        self.seen = Seen()
        self._stale -= batch.without_gradient

    def read(self, event: Event) -> None:
        """Take in one event."""
        seen = self.seen
        if event.kind in ("weight", "buffer"):
            seen.found += self._weight(event, seen)
        elif event.kind == "op":
            seen.ops.append(event)
            seen.making.update(event.around())
        elif event.kind == "mask":
            seen.masking.update(event.around())
        elif event.kind in ("input", "output"):
            seen.found += self._forward(event, seen) if self._overflows(event, seen) else []
        elif event.kind in ("grad_weight", "grad_before"):
            self._weight_gradient(event, seen)
        elif seen.gradient is None:
            self._gradient(event, seen)

    def end(self) -> list[Finding]:
        """The findings of the batch, the first in time first."""
        seen = self.seen
        # After a forward gone bad its gradients are bad too, which is no overflow of their own.
        backward = None if seen.bad or seen.bad_weights else self._first_gradient(seen)
        return [*seen.found, backward] if backward else seen.found

    def _weight(self, event: Event, seen: Seen) -> list[Finding]:
        if event.reading.finite or (event.kind == "buffer" and event.reading.masked):
            return []
        new = not seen.bad_weights and event.name not in self._named
        layer = self._owner(event)
        self._named.add(event.name)
        seen.bad_weights.append(layer)
        return [_finding(event, layer, "weight", parameter=event.name)] if new else []

    def _owner(self, parameter: Event) -> str:
        """The module that holds a parameter."""
        layer = parameter.name.rpartition(".")[0]
        while layer and layer not in self._layers:
            layer = layer.rpartition(".")[0]
        return layer

    def _is_leaf(self, layer: str) -> bool:
        """Whether a module has no parts."""
        return not list(self._layers[layer].children())

    def _overflows(self, event: Event, seen: Seen) -> bool:
        """Whether a reading that is not finite is overflow rather than a mask."""
        reading, call, maker = event.reading, event.call, event.maker
        if reading.finite or reading.nan or call is None or maker is None:
            return reading.bad
        if call.opwise:
            if maker in seen.making:
                return True
            if reading.masked or maker in seen.masking:
                self._masks.add(maker.name)
                return False
        if not reading.masked:
            return True
        if event.kind == "input" or any(given.inf for given in call.inputs):
            return False
        if type(call.module).__module__.startswith("torch.nn.modules") and self._is_leaf(call.name):
            return True
        self._maybe_masks.add(call.name)
        return False

    def _forward(self, event: Event, seen: Seen) -> list[Finding]:
        culprit = event.maker
        known = culprit in seen.overflowed if culprit else bool(seen.overflowed)
        seen.overflowed.update(event.around())
        seen.bad.add(event.reading)
        if known or any(inside(layer, culprit.name if culprit else "") for layer in seen.bad_weights):
            return []
        if culprit is None:
            return [_finding(event, "", "input")]
        if any(reading.bad or reading in seen.bad for reading in culprit.inputs):
            return []
        made = [op for op in seen.ops if op.call is culprit]
        if not made:
            return [_finding(event, culprit.name, "output", input_amax=largest(culprit.inputs))]
        return [_found_op(event, next((op for op in made if op.reading.bad), made[0]))]

    def _weight_gradient(self, event: Event, seen: Seen) -> None:
        stale = event.kind == "grad_before" or event.name in self._stale
        (self._stale.discard if event.reading.finite else self._stale.add)(event.name)
        if not stale and not event.reading.finite:
            seen.weights.append(event)

    def _gradient(self, event: Event, seen: Seen) -> None:
        """A gradient of a tensor or a node that made one bad, before anything was bad."""
        if event.kind == "node":
            seen.gradient = _found_op(event, event)
        elif event.kind in ("grad_output", "grad_input"):
            if not event.reading.finite:
                seen.gradient = _guess(event, seen.last_good or event)
            elif event.kind == "grad_output":
                seen.given.setdefault(event.name)
            seen.last_good = event

    def _first_gradient(self, seen: Seen) -> Finding | None:
        if seen.gradient is not None and seen.gradient.exact:
            return seen.gradient
        # Gradients of weights are read when the whole backward has ended, so time does not order them: a layer that was
        # given a finite gradient made its own weight's.
        first_of = {self._owner(event): event for event in reversed(seen.weights)}
        for layer in seen.given:
            if layer in first_of and self._is_leaf(layer):
                return self._of_weight(first_of[layer])
        return self._of_weight(seen.weights[0]) if seen.gradient is None and seen.weights else seen.gradient

    def _of_weight(self, event: Event) -> Finding:
        layer = self._owner(event)
        for region in self._compiled:  # whose gradients come all at once
            if inside(layer, region):
                return _finding(event, region, "grad_weight", exact=False)
        return _finding(event, layer, "grad_weight", parameter=event.name, exact=False)


def _guess(event: Event, near: Event) -> Finding:
    """A bad gradient: of the module whose gradient was the last good one, or of the forward around it."""
    if event.source is not None and event.source.returned:
        return _finding(event, None, "grad_output")
    return _finding(event, near.maker.name if near.maker else near.name, "grad_input", exact=False)


def _found_op(event: Event, made: Event) -> Finding:
    """A bad reading whose op is known; made: the event of that op."""
    return _finding(event, made.name, made.operand, op=made.op, input_amax=made.input_amax, parameter=made.parameter)


def _finding(event: Event, layer: str | None, operand: str, **more: Any) -> Finding:
    reading = event.reading
    more |= {"output_amax": reading.amax, "dtype": reading.dtype, "loss_scale": event.loss_scale}
    return Finding(layer, operand, event.step, **more)


def inside(layer: str, of: str) -> bool:
    """Whether a layer is another one or a part of it, by their names."""
    return not of or layer == of or layer.startswith(of + ".")


def same_overflow(seen: Finding, first: Finding, compiled: set[str]) -> bool:
    """Whether a finding with its op is of the same overflow as an earlier one without.

    It is in the same layer, or nearer than a guess of a backward could tell, or inside a compiled region, where nothing
    could be seen before.  compiled: names of these.
    """
    if seen.op is None or first.op is not None or seen.backward != first.backward or first.layer is None:
        return False
    if seen.layer == first.layer or first.backward:
        return True
    return first.layer in compiled and inside(seen.layer or "", first.layer)
