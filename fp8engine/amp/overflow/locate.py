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

import math
from dataclasses import dataclass, field, replace
from typing import Any

from fp8engine.amp.overflow.finding import Finding
from fp8engine.amp.overflow.reading import Reading, largest
from fp8engine.amp.overflow.trace import Batch, Call, Creation, Event


@dataclass
class Seen:
    """What a batch has shown so far: calls with an overflow inside, bad readings, layers whose weights are bad."""

    overflowed: set[Call] = field(default_factory=set)
    bad: set[Reading] = field(default_factory=set)
    bad_weights: list[str] = field(default_factory=list)


class Locator:
    """Turns batches into findings; remembers the weights it has named and the masks it has seen made.

    leaves: names of the modules without parts.  names: of all.  compiled: of those whose parts cannot be seen.
    """

    def __init__(self, leaves: set[str], names: set[str], compiled: set[str]):
        self._leaves, self._names, self._compiled = leaves, names, compiled
        self._scale: float | None = None
        self._named: set[str] = set()  # weights
        self._stale: set[str] = set()  # parameters whose gradient was bad before: accumulating leaves it so
        self._masks: set[str] = set()  # modules that were seen to put in -Inf on purpose
        self._maybe_masks: set[str] = set()  # modules whose -Inf only their ops can tell from a mask

    @property
    def undecided(self) -> bool:
        """Whether some -Inf may be a mask or an overflow, which a pass watched op by op will tell."""
        return bool(self._maybe_masks - self._masks)

    def locate(self, batch: Batch) -> list[Finding]:
        """The findings of one batch, the first in time first."""
        found: list[Finding] = []
        seen, creations = Seen(), batch.creations()
        for event in batch.events:
            if event.kind == "scale":
                self._scale = event.reading.high
            event.loss_scale = self._scale
            if event.kind in ("weight", "buffer"):
                found += self._weight(event, seen)
            elif event.kind in ("input", "output") and self._overflows(event, batch, creations):
                found += self._forward(event, creations, seen)
        backward = self._backward(batch)
        if backward and not seen.bad and not seen.bad_weights:  # else it is a gradient of a forward gone bad
            found.append(backward)
        return found

    def _weight(self, event: Event, seen: Seen) -> list[Finding]:
        if event.reading.finite or (event.kind == "buffer" and event.reading.masked):
            return []
        new = not seen.bad_weights and event.name not in self._named
        layer = self._owner(event.name)
        self._named.add(event.name)
        seen.bad_weights.append(layer)
        return [_finding(event, layer, "weight", parameter=event.name)] if new else []

    def _owner(self, parameter: str) -> str:
        """The module that holds a parameter."""
        layer = parameter.rpartition(".")[0]
        while layer and layer not in self._names:
            layer = layer.rpartition(".")[0]
        return layer

    def _overflows(self, event: Event, batch: Batch, creations: list[Creation]) -> bool:
        """Whether a reading that is not finite is overflow rather than a mask."""
        reading, call, maker = event.reading, event.call, event.maker
        if reading.finite or reading.nan or call is None or maker is None:
            return reading.bad
        if batch.opwise and call.opwise:
            if any(made.call is not None and maker in made.call.around() for made in creations):
                return True
            if reading.masked or any(maker in masking.around() for masking in batch.masking):
                self._masks.add(maker.name)
                return False
        if not reading.masked:
            return True
        if event.kind == "input" or any(given.inf for given in call.inputs):
            return False
        if call.module.__module__.startswith("torch.nn.modules") and call.name in self._leaves:
            return True
        self._maybe_masks.add(call.name)
        return False

    def _forward(self, event: Event, creations: list[Creation], seen: Seen) -> list[Finding]:
        culprit = event.maker
        known = culprit in seen.overflowed if culprit else bool(seen.overflowed)
        seen.overflowed.update(event.call.around() if event.call else ())
        seen.bad.add(event.reading)
        if known or any(_inside(layer, culprit.name if culprit else "") for layer in seen.bad_weights):
            return []
        if culprit is None:
            return [_finding(event, "", "input")]
        if any(reading.bad or reading in seen.bad for reading in culprit.inputs):
            return []
        made = [creation for creation in creations if creation.call is culprit]
        if not made:
            return [_finding(event, culprit.name, "output", input_amax=largest(culprit.inputs))]
        first = next((creation for creation in made if creation.made != "-Inf"), made[0])
        weight = first.parameter if first.operand == "weight" else None
        return [_finding(event, culprit.name, first.operand, op=first.op, input_amax=first.amax, parameter=weight)]

    def _backward(self, batch: Batch) -> Finding | None:
        self._stale -= batch.without_gradient
        found = last_good = None
        good: dict[
            str, int
        ] = {}  # modules whose grad_output was finite before the first bad gradient, in order of time
        weights: list[tuple[str, Event]] = []  # (owner, gradient) of weights whose gradient became bad
        for event in batch.events:
            if event.kind in ("grad_weight", "grad_before"):
                stale = event.kind == "grad_before" or event.name in self._stale
                (self._stale.discard if event.reading.finite else self._stale.add)(event.name)
                if not stale and not event.reading.finite:
                    weights.append((self._owner(event.name), event))
            elif found is None and event.creation is not None and event.creation.backward:
                found = _node(event, event.creation)
            elif found is None and event.kind in ("grad_output", "grad_input"):
                if not event.reading.finite:
                    found = _gradient(event, last_good)
                elif event.kind == "grad_output":
                    good.setdefault(event.name, len(good))
                last_good = event
        if found is not None and found.exact:
            return found
        # Gradients of weights are read when the whole backward has ended, so time does not order them: a layer that was
        # given a finite gradient made its own weight's.
        made = [(good[owner], event) for owner, event in weights if owner in good and owner in self._leaves]
        if made:
            return self._weight_gradient(min(made, key=lambda one: one[0])[1])
        return self._weight_gradient(weights[0][1]) if found is None and weights else found

    def _weight_gradient(self, event: Event) -> Finding:
        layer = self._owner(event.name)
        for region in self._compiled:  # whose gradients come all at once
            if _inside(layer, region):
                return _finding(event, region, "grad_weight", exact=False)
        return _finding(event, layer, "grad_weight", parameter=event.name, exact=False)


def _gradient(event: Event, last_good: Event | None) -> Finding:
    """A bad gradient: of the module whose gradient was the last good one, or of the forward around it."""
    if event.source is not None and event.source.returned:
        return _finding(event, None, "grad_output")
    near = last_good or event
    return _finding(event, near.maker.name if near.maker else near.name, "grad_input", exact=False)


def _node(event: Event, made: Creation) -> Finding:
    found = _finding(event, made.layer, made.operand, op=made.op, input_amax=made.amax, parameter=made.parameter)
    return replace(found, dtype=made.dtype, output_amax=math.nan if made.made == "NaN" else math.inf)


def _finding(event: Event, layer: str | None, operand: str, **more: Any) -> Finding:
    reading = event.reading
    bad = {"output_amax": reading.amax, "dtype": reading.dtype} if reading.taken else {}
    return Finding(layer, operand, event.step, loss_scale=event.loss_scale, **bad, **more)


def _inside(layer: str, of: str) -> bool:
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
    return first.layer in compiled and _inside(seen.layer or "", first.layer)
