"""Location of the overflows of a pass, in the first modules with finite inputs and an output that is not.

Forward, each bad event points to the forward that made it:
    a weight that is NaN or Inf before the pass       -> that weight; its module is a victim of the step before
    an input of the model                             -> the data
    an input of a module that nothing watched made    -> the forward around that module, between its parts
    an output                                         -> the module that returned it
It is named if its own inputs were finite and nothing in it was named before.  Of a pass watched op by op the op that
made it is known too.  -Inf alone is a mask until an op is seen to have made it, or until what comes of it is NaN or
+Inf, except from layers of torch.nn without parts, which mask nothing: Linear, convolutions, norms.

Backward, if the forward was finite and a bad gradient arrives at a weight or leaves the model: where the pass was
watched op by op, the first node of the autograd graph that made a bad gradient of good ones.  Otherwise only the
neighbourhood is known, and the finding is marked as a guess:
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
    inside.  suspects: events of -Inf alone, of which nothing finite has come yet.  overflowed: calls with an overflow
    inside.  bad: readings.  bad_weights: layers that hold one.  nodes: that made a bad gradient.  hidden: those of them
    whose bad gradient another node took and gave good ones.  guess: of the first bad gradient of a tensor.  last_good:
    the gradient before it.  given: modules whose grad_output was finite before it.  weights: those whose gradient
    became bad.  spoils: whether a bad gradient has arrived where the backward ends; None while none was read there.
    """

    found: list[Finding] = field(default_factory=list)
    ops: list[Event] = field(default_factory=list)
    making: set[Call] = field(default_factory=set)
    masking: set[Call] = field(default_factory=set)
    suspects: list[Event] = field(default_factory=list)
    overflowed: set[Call] = field(default_factory=set)
    bad: set[Reading] = field(default_factory=set)
    bad_weights: list[str] = field(default_factory=list)
    nodes: list[Finding] = field(default_factory=list)
    hidden: list[Finding] = field(default_factory=list)
    guess: Finding | None = None
    last_good: Event | None = None
    given: dict[str, None] = field(default_factory=dict)
    weights: list[Event] = field(default_factory=list)
    spoils: bool | None = None


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
        if event.arrived:
            seen.spoils = bool(seen.spoils) or not event.reading.finite
        if event.kind in ("weight", "buffer"):
            seen.found += self._weight(event, seen)
        elif event.kind == "op":
            seen.ops.append(event)
            seen.making.update(event.around())
        elif event.kind == "mask":
            seen.masking.update(event.around())
        elif event.kind in ("input", "output"):
            for overflow in self._overflows(event, seen):
                seen.found += self._forward(overflow, seen)
        elif event.kind in ("grad_weight", "grad_before"):
            self._weight_gradient(event, seen)
        elif event.kind == "node" and (seen.guess is None or seen.nodes or seen.hidden):
            seen.nodes.append(_found_op(event, event))
        elif event.kind == "hidden" and seen.nodes:
            seen.hidden.append(seen.nodes.pop())
        elif event.kind in ("grad_output", "grad_input"):
            self._gradient(event, seen)

    def end(self) -> list[Finding]:
        """The findings of the batch, the first in time first."""
        seen = self.seen
        # After a forward gone bad its gradients are bad too, which is no overflow of their own.
        if seen.bad or seen.bad_weights or seen.spoils is False:
            seen.guess = None
            return seen.found
        node = next(iter([*seen.nodes, *seen.hidden]), None)
        seen.guess = self._first_gradient(seen) or (node if seen.spoils else None)
        return [*seen.found, node or seen.guess] if seen.guess else seen.found

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

    def _overflows(self, event: Event, seen: Seen) -> list[Event]:
        """The event if it is overflow rather than a mask, after those of -Inf that led to it."""
        reading, call, maker = event.reading, event.call, event.maker
        if call is None or maker is None:
            return [event] if reading.bad else []
        if reading.finite:
            seen.suspects = [one for one in seen.suspects if not _leads(one, maker)]
            return []
        if maker in seen.overflowed or not seen.bad.isdisjoint(maker.inputs):  # it passes on what was found
            return [event]
        if call.opwise and not reading.nan:
            if maker in seen.making:
                return [event]
            if reading.masked or maker in seen.masking:
                self._masks.add(maker.name)
                return []
        if not reading.masked:
            return [*self._led_to(event, seen), event]
        passed_on = event.kind == "input" or any(given.inf for given in call.inputs)
        if not passed_on and type(call.module).__module__.startswith("torch.nn.modules") and self._is_leaf(call.name):
            return [event]
        seen.suspects.append(event)
        if not passed_on:
            self._maybe_masks.add(call.name)
        return []

    def _led_to(self, event: Event, seen: Seen) -> list[Event]:
        """The -Inf that a bad event comes of, from the layer that made it of finite numbers; none if that is a mask."""
        calls, led = [event.maker], []
        for one in reversed(seen.suspects):
            if any(call and _leads(one, call) for call in calls):
                calls.append(one.maker)
                led.append(one)
        while led and not self._may_overflow(led[-1]):
            led.pop()
        return led[::-1]

    def _may_overflow(self, event: Event) -> bool:
        """Whether the maker of -Inf was given finite numbers, of which it can have made it, and no mask."""
        call = event.call
        return (
            call is not None
            and event.kind == "output"
            and call.name not in self._masks
            and any(given.taken for given in call.inputs)
            and not any(given.inf for given in call.inputs)
        )

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
        """A gradient of a tensor."""
        if seen.guess is not None:
            return
        if not event.reading.finite:
            seen.guess = _guess(event, seen.last_good or event)
        elif event.kind == "grad_output":
            seen.given.setdefault(event.name)
        seen.last_good = event

    def _first_gradient(self, seen: Seen) -> Finding | None:
        # Gradients of weights are read when the whole backward has ended, so time does not order them: a layer that was
        # given a finite gradient made its own weight's.
        first_of = {self._owner(event): event for event in reversed(seen.weights)}
        for layer in seen.given:
            if layer in first_of and self._is_leaf(layer):
                return self._of_weight(first_of[layer])
        return self._of_weight(seen.weights[0]) if seen.guess is None and seen.weights else seen.guess

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


def _leads(event: Event, call: Call) -> bool:
    """Whether a call was given a reading, or has it from a part of its own."""
    return event.reading in call.inputs or (event.call is not call and call in event.around())


def inside(layer: str, of: str) -> bool:
    """Whether a layer is another one or a part of it, by their names."""
    return not of or layer == of or layer.startswith(of + ".")
