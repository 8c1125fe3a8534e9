"""Location of the overflows of a pass, in the first modules with finite inputs and an output that is not.

Forward, each bad event points to the forward that made it:
    a weight that became NaN or Inf before the pass   -> that weight; its module is a victim of the step before
    one that was so from the beginning, or an input   -> that weight, or the data, once an output comes out bad by it
    an input of a module that nothing watched made    -> the forward around that module, between its parts
    an output                                         -> the module that returned it
It is named if its own inputs were finite and nothing in it was named before.  Of a pass watched op by op the op that
made it is known too.  -Inf alone is a mask until an op is seen to have made it, or until what comes of it is NaN or
+Inf, except from layers of torch.nn with weights, which mask nothing: Linear, convolutions, norms.  A layer that was
named for an Inf which its ops then show to be a mask is named no longer.

Backward, if the forward was finite and a bad gradient arrives at a weight or leaves the model: where the pass was
watched op by op, the first node of the autograd graph that made a bad gradient of good ones.  Otherwise only the
neighbourhood is known, and the finding is marked as a guess:
    the gradient that came into the model was bad     -> outside: the loss, or a loss scale that is too large
    the gradient of an output or input is bad         -> the module that got the last good gradient before it
    only a weight's gradient is bad                   -> the module that holds the weight
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from fp8engine.amp.overflow.reading import Reading, largest
from fp8engine.amp.overflow.report import Finding
from fp8engine.amp.overflow.trace import Batch, Call, Event


@dataclass
class Seen:
    """What a batch has shown so far.

    found: its findings, first in time first.  guess: what its gradients would have shown without their ops.  ops:
    events of ops of the forward that made NaN or Inf, whether it did harm or not, or a mask.  cleared: layers that were
    named for what is a mask.  suspects: events of -Inf alone, of which nothing finite has come yet.  bad: readings of
    the forward.  bad_weights, bad_inputs: what the model was given, which may do no harm.
    """

    found: list[Finding] = field(default_factory=list)
    guess: Finding | None = None
    ops: list[Event] = field(default_factory=list)
    cleared: set[str] = field(default_factory=set)
    suspects: list[Event] = field(default_factory=list)
    bad: set[Reading] = field(default_factory=set)
    bad_weights: list[Event] = field(default_factory=list)
    bad_inputs: dict[Reading, Event] = field(default_factory=dict)

    def inside(self, call: Call, kind: str) -> bool:
        """Whether an event of an op of that kind lies in a call."""
        return any(op.kind == kind and call in op.around() for op in self.ops)


class Locator:
    """Turns batches into findings; remembers the weights it has named and the masks it has seen made.

    layers: the modules by name.  compiled: the names of those whose parts cannot be seen.
    """

    def __init__(self, layers: dict[str, nn.Module], compiled: set[str]):
        self._layers, self._compiled = layers, compiled
        self._seen = Seen()
        self._named: set[str] = set()  # weights
        self._sound: set[str] = set()  # weights that were finite when they were read last
        self._masks: set[tuple[str, str]] = set()  # modules that were seen to put in "Inf" or "-Inf" on purpose
        self._maybe_masks: set[tuple[str, str]] = set()  # modules whose -Inf only their ops can tell from a mask
        self._blamed: defaultdict[str, set[str]] = defaultdict(set)  # by module, what it was named for without its op

    @property
    def undecided(self) -> bool:
        """Whether some -Inf may be a mask or an overflow, which a pass watched op by op will tell."""
        return bool(self._maybe_masks - self._masks)

    def locate(self, batch: Batch) -> Seen:
        """What a batch shows, its readings in numbers."""
        seen = self._seen = Seen()
        for event in batch.events:
            if event.kind in ("weight", "frozen", "buffer"):
                self._weight(event)
            elif event.kind in ("op", "log", "mask"):
                seen.ops.append(event)
            elif event.kind in ("input", "output"):
                for overflow in self._overflows(event):
                    self._name_maker(overflow)
        made, guess = self._backward(batch)
        if guess is not None and not self._spoiled(batch):
            seen.found.append(made or guess)
            seen.guess = guess
        return seen

    def _spoiled(self, batch: Batch) -> bool:
        """Whether a forward of the gradients went bad: then these are bad too, which is no overflow of their own.

        The forward of this pass, or of an earlier one: several passes may share a backward, and a watch that is asked
        between a forward and its backward begins another batch.
        """
        calls = (call for event in batch.events if event.kind.startswith("grad_") for call in event.around())
        return bool(self._seen.bad) or any(call.overflowed for call in calls)

    def _weight(self, event: Event) -> None:
        if event.reading.finite:
            self._sound.add(event.name)
        elif event.kind == "weight" or event.reading.holds != "-Inf":  # else a mask
            if event.name in self._sound:
                self._sound.discard(event.name)
                if any(one.name in self._named for one in self._seen.bad_weights):  # a victim of that one
                    self._named.add(event.name)
                self._name_weight(event)
            self._seen.bad_weights.append(event)

    def _name_weight(self, event: Event) -> None:
        if event.name not in self._named:
            self._seen.found.append(_finding(event, self._owner(event), "weight", parameter=event.name))
        self._named.add(event.name)

    def _bad_weight(self, call: Call) -> Event | None:
        """A bad weight that a call may have used: of its module, or a parameter of one inside; not those' buffers."""
        for event in self._seen.bad_weights:
            owner = self._owner(event)
            if owner == call.name or (event.kind != "buffer" and inside(owner, call.name)):
                return event
        return None

    def _owner(self, parameter: Event) -> str:
        """The module that holds a parameter."""
        layer = parameter.name.rpartition(".")[0]
        while layer and layer not in self._layers:
            layer = layer.rpartition(".")[0]
        return layer

    def _is_leaf(self, layer: str) -> bool:
        """Whether a module has no parts."""
        return not list(self._layers[layer].children())

    def _overflows(self, event: Event) -> list[Event]:
        """The event if it is overflow rather than a mask, after those of -Inf that led to it."""
        seen, holds, call, maker = self._seen, event.reading.holds, event.call, event.maker
        if call is None or maker is None:
            return [event] if event.reading.bad else []
        if not holds:
            seen.suspects = [one for one in seen.suspects if not _leads(one, maker)]
            return []
        given_bad = any(given in seen.bad or given in seen.bad_inputs for given in maker.inputs)
        if maker.overflowed or given_bad or self._bad_weight(maker):  # it passes on what was found
            return [event]
        if call.opwise and holds != "NaN":
            if seen.inside(maker, "op"):
                return [event]
            if holds == "-Inf" or seen.inside(maker, "mask"):
                self._masks.add((maker.name, holds))
                if self._blamed[maker.name] == {holds}:
                    seen.cleared.add(maker.name)
                return []
        if holds == "Inf" and (maker.name, holds) in self._masks:
            return []
        if holds != "-Inf":
            return [*self._led_to(event), event]
        passed_on = event.kind == "input" or any(given.inf for given in call.inputs)
        if not passed_on and type(call.module).__module__.startswith("torch.nn.modules") and call.module._parameters:
            return [event]
        seen.suspects.append(event)
        if not passed_on:
            self._maybe_masks.add((call.name, holds))
        return []

    def _led_to(self, event: Event) -> list[Event]:
        """The -Inf that a bad event comes of, from the layer that made it of finite numbers; none if that is a mask."""
        calls, led = [event.maker], []
        for one in reversed(self._seen.suspects):
            if any(call and _leads(one, call) for call in calls):
                calls.append(one.maker)
                led.append(one)
        while led and not self._may_overflow(led[-1]):
            led.pop()
        return led[::-1]

    def _may_overflow(self, event: Event) -> bool:
        """Whether the maker of -Inf was given finite numbers, of which it can have made it, and no mask."""
        call = event.call
        if call is None or event.kind != "output" or (call.name, event.reading.holds) in self._masks:
            return False
        return any(given.taken for given in call.inputs) and not any(given.inf for given in call.inputs)

    def _name_maker(self, event: Event) -> None:
        """Add the finding of an overflow, if its maker was given nothing bad and nothing in it was found before."""
        seen, culprit = self._seen, event.maker
        if culprit is None:
            seen.bad_inputs[event.reading] = event
            return
        known = culprit.overflowed
        for call in event.around():
            call.overflowed = True
        seen.bad.add(event.reading)
        if known:
            return
        if any(reading.bad or reading in seen.bad for reading in culprit.inputs):
            data = next((reading for reading in culprit.inputs if reading in seen.bad_inputs), None)
            if data is not None:
                seen.found.append(_finding(seen.bad_inputs[data], "", "input"))
                seen.bad.update(seen.bad_inputs)
                seen.bad_inputs.clear()
        elif weight := self._bad_weight(culprit):
            self._name_weight(weight)
        else:
            made = [op for op in seen.ops if op.call is culprit and op.kind != "mask"]
            if made:
                op = next((op for op in made if op.reading.bad), made[0])
                seen.found.append(_finding(event, culprit.name, **op.made))
            else:
                self._blamed[culprit.name].add(event.reading.holds)
                seen.found.append(_finding(event, culprit.name, "output", input_amax=largest(culprit.inputs)))

    def _backward(self, batch: Batch) -> tuple[Finding | None, Finding | None]:
        """What a node is known to have made, and what is guessed without it; of a batch whose forward was finite.

        Both None where every gradient that arrived at the end of a backward is finite.
        """
        bad_weights = self._new_in_weights(batch)
        arrived = [event.reading.finite for event in batch.events if event.arrived]
        if arrived and all(arrived):
            return None, None
        tensors = [event for event in batch.events if event.kind in ("grad_output", "grad_input")]
        first = next((n for n, event in enumerate(tensors) if not event.reading.finite), len(tensors))
        bad, good = tensors[first] if first < len(tensors) else None, tensors[:first]
        nodes, hidden = [], []  # that made a bad gradient; those of them whose one another took and gave good ones
        for event in batch.events:
            if event is bad and not nodes and not hidden:
                break
            if event.kind == "node":
                nodes.append(event)
            elif event.kind == "hidden" and nodes:
                hidden.append(nodes.pop())
        made = next((_finding(node, node.name, **node.made) for node in (*nodes, *hidden)), None)
        guess = self._guess_of_weights(bad_weights, good, bad) or (made if arrived else None)
        return made, guess

    def _new_in_weights(self, batch: Batch) -> list[Event]:
        """The gradients of weights that became bad in this batch; accumulating leaves so what was bad before."""
        bad = [
            event for event in batch.events if event.kind in ("grad_before", "grad_weight") and not event.reading.finite
        ]
        first = {event.name: event for event in reversed(bad)}
        return [event for event in bad if event.kind == "grad_weight" and first[event.name] is event]

    def _guess_of_weights(self, weights: list[Event], good: list[Event], bad: Event | None) -> Finding | None:
        """good: gradients of tensors before the first bad one.  weights: bad gradients of weights."""
        # Gradients of weights are read when the whole backward has ended, so time does not order them: a layer that was
        # given a finite gradient made its own weight's.
        first_of = {self._owner(event): event for event in reversed(weights)}
        for layer in dict.fromkeys(event.name for event in good if event.kind == "grad_output"):
            if layer in first_of and self._is_leaf(layer):
                return self._of_weight(first_of[layer])
        if bad is None:
            return self._of_weight(weights[0]) if weights else None
        if bad.source is not None and bad.source.returned:
            return _finding(bad, None, "grad_output")
        # Of the module whose gradient was the last good one, or of the forward around it.
        near = good[-1] if good else bad
        return _finding(bad, near.maker.name if near.maker else near.name, "grad_input", exact=False)

    def _of_weight(self, event: Event) -> Finding:
        layer = self._owner(event)
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        for region in self._compiled:  # whose gradients come all at once
            if inside(layer, region):
                return _finding(event, region, "grad_weight", exact=False, ranks=ranks)
        return _finding(event, layer, "grad_weight", parameter=event.name, exact=False, ranks=ranks)


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
