"""Guilty or victim: the module whose inputs were finite and whose output was not, first in time.

Forward, the first bad event of a batch decides:
    a weight that is NaN or Inf before the pass       -> that weight; its module is a victim of the step before
    an input of the model                             -> the data
    an input of a module that nothing watched made    -> the forward around that module, between its parts
    an output                                         -> the module that returned it
and after it every call whose inputs were all finite and that holds no other culprit is guilty too, on its own.

Backward: where the pass was watched op by op, the first node that made a bad gradient out of good ones.  Otherwise
    the gradient that came into the model was bad     -> outside: the loss, or a loss scale that is too large
    a weight's gradient is bad, its module's was not  -> that module (its backward ran before any other bad one)
    the gradient of an output is bad                  -> the module that took this output and got a good gradient itself
which can be wrong where several modules read one tensor: their gradients are added before anyone sees them.

-Inf alone is a mask until an op is seen to have made it, except from layers of torch.nn without parts, which mask
nothing: Linear, convolutions, norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fp8engine.amp.events import Batch, Call, Creation, Event
from fp8engine.amp.readings import Reading

BACKWARD = ("grad_input", "grad_weight", "grad_output")


@dataclass(frozen=True)
class Finding:
    """Who overflowed, where and when.

    layer: the guilty module's name as in named_modules ("" is the model's own forward), None when it lies outside the
    model.  operand: "output", "input" (the data), "weight", "grad_input", "grad_weight" or "grad_output" (what came
    into the model's backward).  op: the function, as torch names it, or None while no pass was watched op by op.
    step: counted from 0, calls of scaler.update where there is a scaler, else forward passes.  input_amax, output_amax:
    largest magnitudes going in (finite ones) and coming out (NaN or Inf).  parameter: whose weight or gradient it is.
    loss_scale: the scale at that step.  exact: False for a guess of a backward that was not watched op by op.
    guilty: False while a smaller loss scale may cure it, or has: cured_by is that scale (search.py).
    """

    layer: str | None
    operand: str
    step: int
    op: str | None = None
    input_amax: float = math.nan
    output_amax: float = math.nan
    dtype: torch.dtype | None = None
    parameter: str | None = None
    loss_scale: float | None = None
    exact: bool = True
    guilty: bool = True
    cured_by: float | None = None

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.operand in BACKWARD

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        numbers = {"input_amax": number(self.input_amax), "output_amax": number(self.output_amax)}
        return vars(self) | numbers | {"dtype": str(self.dtype).removeprefix("torch.") if self.dtype else None}

    def __str__(self) -> str:
        where = "outside the model" if self.layer is None else repr(self.layer) if self.layer else "the model itself"
        parts = [f"step {self.step}: {self.operand} of {where}"]
        if self.parameter:
            parts.append(f"({self.parameter})")
        kind = f" in {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        parts.append(f"is {'NaN' if math.isnan(self.output_amax) else 'Inf'}{kind}")
        if self.op:
            parts.append(f"made by {self.op}")
        if not math.isnan(self.input_amax):
            parts.append(f"from values up to {self.input_amax:.4g}")
        if self.backward and self.loss_scale is not None:
            parts.append(f"at loss scale {self.loss_scale:g}")
        if self.operand == "grad_output":
            parts.append("before it reached the model: look at the loss function and the loss scale")
        elif self.operand == "input":
            parts.append("before the model saw it: look at the data")
        if not self.exact:
            parts.append("(a guess until a backward is watched op by op)")
        elif not self.op and self.guilty and self.operand not in ("weight", "input", "grad_output"):
            parts.append('(which op: told when it comes again in the next pass, or by mode="ops")')
        if self.cured_by is not None:
            parts.append(f"- loss scale {self.cured_by:g} cures it, nothing to pin")
        elif not self.guilty:
            parts.append("- a smaller loss scale may cure it: watch until a step passes before anything is pinned")
        return " ".join(parts)


def number(value: float) -> float | str:
    """JSON has no NaN and no Inf."""
    return value if math.isfinite(value) else str(value)


@dataclass
class Seen:
    """What one batch has shown so far: calls with a culprit inside, bad readings, layers whose weights are bad."""

    flagged: set[Call] = field(default_factory=set)
    bad: set[Reading] = field(default_factory=set)
    sick: list[str] = field(default_factory=list)


class Judge:
    """Turns settled batches into findings; remembers which weights it has named and which masks it has cleared.

    leaves: names of the modules without parts.  names: of all.  compiled: of those whose parts cannot be seen.
    """

    def __init__(self, leaves: set[str], names: set[str], compiled: set[str]):
        self._leaves, self._names, self.compiled = leaves, names, compiled
        self._named: set[str] = set()
        self._stale: set[str] = set()  # parameters whose gradient was bad before: accumulating leaves it so
        self.cleared: set[str] = set()  # modules whose -Inf was asked for
        self.suspects: set[str] = set()  # modules whose -Inf is to be looked at op by op
        self.scale: float | None = None
        self._scales: dict[Event, float | None] = {}  # the loss scale at each event

    def judge(self, batch: Batch) -> list[Finding]:
        """The findings of one batch, the first in time first."""
        found: list[Finding] = []
        seen = Seen()
        self._scales.clear()
        for event in batch.events:
            self._scales[event] = self.scale
            if event.kind == "scale":
                self.scale = event.reading.high
            elif event.kind in ("weight", "buffer"):
                found += self._weight_before(event, seen)
            elif event.kind in ("input", "output") and event.call is not None and self._bad(event, event.call, batch):
                found += self._forward(event, event.call, batch, seen)
        backward = self._backward(batch)
        victim = bool(seen.bad or seen.sick)  # gradients of a forward gone bad
        return [*found, backward] if backward and not victim else found

    def owner(self, parameter: str) -> str:
        """The module that holds a parameter."""
        layer = parameter.rpartition(".")[0]
        while layer and layer not in self._names:
            layer = layer.rpartition(".")[0]
        return layer

    def _finding(self, event: Event, layer: str | None, operand: str, **more: Any) -> Finding:
        return Finding(
            layer,
            operand,
            event.step,
            output_amax=event.reading.amax,
            dtype=event.reading.dtype,
            loss_scale=self._scales[event],
            **more,
        )

    def _weight_before(self, event: Event, seen: Seen) -> list[Finding]:
        masks = event.kind == "buffer" and not event.reading.bad
        if event.reading.finite or masks:
            return []
        layer = self.owner(event.name)
        new = not seen.sick and event.name not in self._named
        self._named.add(event.name)
        seen.sick.append(layer)
        if not new:
            return []
        return [self._finding(event, layer, "weight", parameter=event.name)]

    def _bad(self, event: Event, call: Call, batch: Batch) -> bool:
        """Whether a reading that is not finite is overflow rather than a mask."""
        reading, maker = event.reading, call if event.kind == "output" else call.parent
        if reading.finite or reading.nan or maker is None:
            return reading.bad
        if batch.opwise and call.watched:
            if any(c.call is not None and c.call.within(maker) for c in batch.creations):
                return True
            if reading.masked or any(asked.within(maker) for asked in batch.asked):
                self.cleared.add(maker.name)
                return False
        if not reading.masked:
            return True
        handed_on = any(given.inf for given in call.inputs)
        if event.kind == "input" or handed_on:
            return False
        if call.module.__module__.startswith("torch.nn.modules") and call.name in self._leaves:
            return True
        if call.name not in self.cleared:
            self.suspects.add(call.name)
        return False

    def _forward(self, event: Event, call: Call, batch: Batch, seen: Seen) -> list[Finding]:
        culprit = call if event.kind == "output" else call.parent
        chain = _ancestors(call)
        known = culprit in seen.flagged if culprit else bool(seen.flagged)
        seen.flagged.update(chain)
        seen.bad.add(event.reading)
        if known or any(_inside(layer, culprit.name if culprit else "") for layer in seen.sick):
            return []
        if culprit is None:
            return [self._finding(event, "", "input")]
        if any(reading.bad or reading in seen.bad for reading in culprit.inputs):
            return []
        made = [c for c in batch.creations if c.call is culprit]
        creation = next((c for c in made if c.made != "-Inf"), made[0] if made else None)
        if creation is None:
            given = max((r.amax for r in culprit.inputs if r.taken and r.finite), default=math.nan)
            return [self._finding(event, culprit.name, "output", input_amax=given)]
        weight = creation.parameter if creation.operand == "weight" else None
        more = {"op": creation.op, "input_amax": creation.amax, "parameter": weight}
        return [self._finding(event, culprit.name, creation.operand, **more)]

    def _backward(self, batch: Batch) -> Finding | None:
        self._stale -= batch.zeroed
        gradients = []
        for event in batch.events:
            if event.kind in ("grad_output", "grad_input"):
                gradients.append(event)
            elif event.kind in ("grad_weight", "grad_before"):
                if event.kind == "grad_weight" and event.name not in self._stale:
                    gradients.append(event)
                (self._stale.discard if event.reading.finite else self._stale.add)(event.name)
        bad = next((e for e in gradients if e.kind != "grad_weight" and not e.reading.finite), None)
        node = next((e for e in batch.events if e.kind == "node"), None)
        came_first = node is not None and (bad is None or batch.events.index(node) < batch.events.index(bad))
        if node is not None and node.creation is not None and came_first:
            return self._from_node(node, node.creation)
        if all(event.reading.finite for event in gradients):
            return None
        if bad is not None and bad.source is not None and bad.source.leaves:
            return self._finding(bad, None, "grad_output")
        good: dict[str, int] = {}
        for index, event in enumerate(gradients):
            if event is bad:
                break
            if event.kind == "grad_output":
                good.setdefault(event.name, index)
        weight = self._weight(gradients, good, bad is None)
        if weight is not None:
            return weight
        if bad is None:
            return None
        return self._finding(bad, self._consumer(bad, good), "grad_input", exact=False)

    def _from_node(self, event: Event, made: Creation) -> Finding:
        return replace(
            self._finding(event, made.layer, made.operand, op=made.op, input_amax=made.amax, parameter=made.parameter),
            dtype=made.dtype,
            output_amax=math.nan if made.made == "NaN" else math.inf,
        )

    def _weight(self, gradients: list[Event], good: dict[str, int], alone: bool) -> Finding | None:
        bad = [e for e in gradients if e.kind == "grad_weight" and not e.reading.finite]
        owners = [(good.get(layer, 0), e, layer) for e in bad for layer in [self.owner(e.name)]]
        sure = [owner for owner in owners if owner[2] in good and owner[2] in self._leaves]
        if sure or not alone:  # a container's own weight may be the victim of what is inside
            owners = sure
        if not owners:
            return None
        _, event, layer = min(owners, key=lambda owner: owner[0])
        for region in self.compiled:  # whose gradients come all at once
            if _inside(layer, region):
                return self._finding(event, region, "grad_weight", exact=False)
        return self._finding(event, layer, "grad_weight", parameter=event.name, exact=False)

    def _consumer(self, bad: Event, good: dict[str, int]) -> str:
        taken: list[Call] = [c for c in bad.source.consumers if c.name in good] if bad.source else []
        leaves = [c for c in taken if c.name in self._leaves]
        if leaves or taken:
            return (leaves or taken)[-1].name
        return bad.call.parent.name if bad.call and bad.call.parent else bad.name


def _ancestors(call: Call | None) -> list[Call]:
    chain = []
    while call is not None:
        chain.append(call)
        call = call.parent
    return chain


def _inside(layer: str, of: str) -> bool:
    return not of or layer == of or layer.startswith(of + ".")


def explains(seen: Finding, first: Finding, compiled: set[str]) -> bool:
    """Whether a later finding, op by op, is of the same overflow: the same layer, or nearer than a guess could tell.

    compiled: names of layers that run compiled, inside which nothing could be seen before.
    """
    if seen.op is None or first.op is not None or seen.backward != first.backward or first.layer is None:
        return False
    if seen.layer == first.layer or first.backward:
        return True
    return first.layer in compiled and _inside(seen.layer or "", first.layer)


def unexplained(finding: Finding) -> bool:
    """Whether an op is to be found for it."""
    return finding.op is None and finding.layer is not None and finding.operand not in ("weight", "input")
