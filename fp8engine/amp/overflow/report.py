"""Report of a watch: the overflows found, every layer's peak and the loss scales, as plain dicts and as text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8engine.amp.overflow.trace import Event
from fp8engine.amp.tensors import SIXTEEN_BIT
from fp8engine.amp.text import FOLD, as_text
from fp8engine.numerics.formats import word

SHOWN, HIDDEN_SHOWN = 24, 8  # rows of a table, the rest are the layers farthest from trouble; lines below it
GRADIENTS = ("grad_input", "grad_weight", "grad_output")


@dataclass(frozen=True)
class Finding:
    """One overflow: where it was made, and when.

    layer: the guilty module's name as in named_modules ("" is the model's own forward), None when it lies outside the
    model.  operand: "output", "input" (the data), "weight", "grad_input", "grad_weight" or "grad_output" (what came
    into the model's backward).  op: the function, as torch names it, or None while no pass was watched op by op.
    op_step: of the later pass that has told the op, in which the layer overflowed again; None if it was the same pass.
    step: counted from 0, calls of scaler.update where there is a scaler, else forward passes.  input_amax, output_amax:
    largest magnitudes at that step, going in (finite ones; into the op, into the layer where op_step is told) and
    coming out (NaN or Inf).  parameter: whose weight or gradient it is.  loss_scale: the scale at that step.
    exact: False for a guess of a backward that was not watched op by op.  ranks: that gradients were summed over.
    guilty: False while a smaller loss scale may cure it, or has: cured_by is that scale (ledger.py).
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
    op_step: int | None = None
    ranks: int = 1

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return self.operand in GRADIENTS

    @property
    def in_a_layer(self) -> bool:
        """Whether an op of a layer made it, in this pass."""
        if self.operand == "weight":  # finite before the pass, where an op is told: the layer's own cast of it
            return self.op is not None
        return self.layer is not None and self.operand != "input"

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        return plain(vars(self))

    def __str__(self) -> str:
        where = "outside the model" if self.layer is None else repr(self.layer) if self.layer else "the model itself"
        kind = f" in {str(self.dtype).removeprefix('torch.')}" if self.dtype else ""
        told = {
            f"step {self.step}: {self.operand} of {where}": True,
            f"({self.parameter})": self.parameter,
            f"is {shown(abs(self.output_amax))}{kind}": True,
            f"made by {self.op}": self.op and self.op_step is None,
            f"from values up to {self.input_amax:.4g}": not math.isnan(self.input_amax),
            f"and made by {self.op} (as step {self.op_step} showed)": self.op_step is not None,
            f"at loss scale {self.loss_scale or 0:g}": self.backward and self.loss_scale is not None,
            "before it reached the model: look at the loss function and the loss scale": self.operand == "grad_output",
            "before the model saw it: look at the data": self.operand == "input",
            "(a guess until a backward is watched op by op)": not self.exact,
            f"(a sum over {self.ranks} ranks: if another made it, that one's report says where)": self.ranks > 1,
            '(which op: told when it comes again in the next pass, or by mode="ops")': self._op_is_open,
            self._verdict: True,
        }
        return " ".join(part for part, holds in told.items() if holds and part)

    @property
    def _op_is_open(self) -> bool:
        return self.exact and not self.op and self.guilty and self.in_a_layer

    @property
    def _verdict(self) -> str:
        """What a loss scale has to do with it."""
        if self.cured_by is not None:
            return f"- loss scale {self.cured_by:g} cures it, nothing to pin"
        if self.guilty:
            return ""
        if self.loss_scale is None:
            return "- a loss scale may be why: give find_overflow the scaler to know"
        return "- a smaller loss scale may cure it: watch until a step passes before anything is pinned"


@dataclass
class LayerStats:
    """One layer's numbers over all passes.

    calls: tensors that it returned and no part of it had.  peak: their largest finite magnitude, dtype: of the latest.
    grad_peak: of the gradients of what it returned, scaled.
    nonfinite, grad_nonfinite: how many times they held NaN or Inf.  guilty: how many batches named it; scaled: how many
    named it for a gradient that a smaller loss scale cures, or may cure.  made, grad_made: the NaN or Inf that it was
    named for; 0 if none.
    """

    name: str
    kind: str
    calls: int = 0
    peak: float = 0.0
    dtype: torch.dtype | None = None
    nonfinite: int = 0
    grad_peak: float = 0.0
    grad_nonfinite: int = 0
    guilty: int = 0
    scaled: int = 0
    made: float = 0.0
    grad_made: float = 0.0

    @property
    def share(self) -> float:
        """Peak against the largest value of its dtype."""
        return self.peak / torch.finfo(self.dtype).max if self.dtype else 0.0

    @property
    def low(self) -> bool:
        """Whether it returned FP16 or BF16."""
        return self.dtype in SIXTEEN_BIT

    def add(self, event: Event) -> None:
        """Count an event of this layer, its reading in numbers."""
        reading = event.reading
        finite = reading.amax if reading.taken and reading.finite else 0.0
        if event.kind == "output":
            self.calls += 1
            self.peak, self.dtype = max(self.peak, finite), reading.dtype
            self.nonfinite += not reading.finite
        elif event.kind == "grad_output":
            self.grad_peak = max(self.grad_peak, finite)
            self.grad_nonfinite += not reading.finite

    def name_for(self, finding: Finding, times: int) -> None:
        """Enter what the layer was named for, and how often."""
        if finding.backward:
            self.grad_made = finding.output_amax
        else:
            self.made = finding.output_amax
        if finding.in_a_layer:
            self.guilty += times * finding.guilty
            self.scaled += times * (not finding.guilty)

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        return plain(vars(self) | {"share": self.share})


@dataclass(frozen=True)
class OverflowReport:
    """findings: first in time first.  layers: one each.  scales: (step, loss scale).  pinned: names.

    hidden: (layer, op, what it made, how many times) for ops that overflowed though no module's output showed it, as
    1 / Inf = 0 does not; known only of passes watched op by op.
    """

    findings: list[Finding]
    layers: list[LayerStats]
    scales: list[tuple[int, float]]
    pinned: list[str]
    passes: int
    hidden: list[tuple[str, str, str, int]] = field(default_factory=list)

    def to_dict(self) -> dict:
        """Everything, in types that JSON knows."""
        hidden = [dict(zip(("layer", "op", "made", "times"), what, strict=True)) for what in self.hidden]
        return plain(vars(self) | {"hidden": hidden})

    def table(self, width: int = 120) -> str:
        """The layers worst first, and the findings, as text `width` columns wide."""
        ran = [layer for layer in self.layers if layer.calls or layer.guilty or layer.scaled]
        worst = sorted(ran, key=lambda x: (-x.guilty, -x.scaled, -(x.nonfinite + x.grad_nonfinite), -x.share))
        columns = [("layer", FOLD | {"ratio": 1}), ("kind", FOLD | {"max_width": 20})]
        others = ("dtype", "amax", "of range", "NaN/Inf", "gradient", "NaN/Inf", "verdict")
        columns += [(heading, {"no_wrap": True}) for heading in others]
        rows = [
            [
                layer.name or "(model)",
                layer.kind,
                word(layer.dtype) if layer.dtype else "-",
                shown(layer.made or layer.peak),
                "over" if layer.made else f"{layer.share:.1%}" if layer.low else "-",
                str(layer.nonfinite),
                shown(layer.grad_made or layer.grad_peak),
                str(layer.grad_nonfinite),
                self._verdict(layer),
            ]
            for layer in worst[:SHOWN]
        ]
        return as_text(f"Overflow: {self.passes} passes watched", columns, rows, self._lines(len(worst)), width)

    def _verdict(self, layer: LayerStats) -> str:
        words = []
        if layer.guilty:
            words.append(f"guilty x{layer.guilty}")
        elif layer.scaled:
            words.append("loss scale")
        elif layer.nonfinite or layer.grad_nonfinite:
            words.append("victim" if self.findings else "mask")
        if layer.name in self.pinned:
            words.append("pinned")
        return ", ".join(words)

    def _lines(self, ran: int) -> list[str]:
        lines = [f"{ran - SHOWN} more layers, all farther from the end of their range"] if ran > SHOWN else []
        lines += [f"first: {finding}" if not n else f"then: {finding}" for n, finding in enumerate(self.findings)]
        if not self.findings:
            lines.append("no NaN and no Inf")
        lines += [
            f"hidden: {op} in {layer!r} made {made} {times} times; no output shows it"
            for layer, op, made, times in self.hidden[:HIDDEN_SHOWN]
        ]
        if len(self.hidden) > HIDDEN_SHOWN:
            lines.append(f"hidden: {len(self.hidden) - HIDDEN_SHOWN} more, which to_dict() has")
        if self.scales:
            kept = [*self.scales[:4], (-1, math.nan), *self.scales[-8:]] if len(self.scales) > 12 else self.scales
            shown = ["..." if step < 0 else f"{scale:g} (step {step})" for step, scale in kept]
            lines.append(f"loss scale: {' -> '.join(shown)}")
        return lines

    def __str__(self) -> str:
        return self.table()


def shown(magnitude: float) -> str:
    """A magnitude in four digits, NaN and Inf by these names.

    >>> shown(123456.0), shown(math.inf), shown(-math.inf), shown(math.nan)
    ('1.235e+05', 'Inf', '-Inf', 'NaN')
    """
    return f"{magnitude:.4g}".replace("inf", "Inf").replace("nan", "NaN")


def plain(value: Any) -> Any:
    """A value in types that JSON knows: NaN and Inf as text, a dtype as its name, a finding or layer as a dict."""
    text = json.dumps(value, default=lambda part: word(part) if isinstance(part, torch.dtype) else part.to_dict())
    return json.loads(text, parse_constant=lambda number: str(float(number)))
