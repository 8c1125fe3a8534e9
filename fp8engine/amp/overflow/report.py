"""Report of a watch with every layer's peak, the findings and the loss scales, as plain dicts and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fp8engine.amp.overflow.finding import Finding, plain, shown
from fp8engine.amp.overflow.trace import Event
from fp8engine.amp.tensors import SIXTEEN_BIT
from fp8engine.amp.text import FOLD, as_text
from fp8engine.numerics.formats import word

SHOWN = 24  # rows of a table: the rest are the layers farthest from trouble


@dataclass
class LayerStats:
    """One layer's numbers over all passes.

    peak: largest finite magnitude it returned, in dtype.  grad_peak: of the gradients of what it returned, scaled.
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

    def name_for(self, finding: Finding) -> None:
        """Keep what the layer was named for."""
        if finding.backward:
            self.grad_made = finding.output_amax
            self.grad_nonfinite += 1
        else:
            self.made = finding.output_amax

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
        findings, layers = ([one.to_dict() for one in some] for some in (self.findings, self.layers))
        return plain(vars(self) | {"findings": findings, "layers": layers, "hidden": hidden})

    def table(self, width: int = 120) -> str:
        """The layers worst first, and the findings, as text `width` columns wide."""
        ran = [layer for layer in self.layers if layer.calls or layer.guilty or layer.scaled]
        worst = sorted(ran, key=lambda x: (-x.guilty, -x.scaled, -(x.nonfinite + x.grad_nonfinite), -x.share))
        columns = [("layer", FOLD | {"ratio": 1}), ("kind", FOLD | {"max_width": 20})]
        numbers = ("dtype", "amax", "of range", "NaN/Inf", "gradient", "NaN/Inf", "verdict")
        columns += [(heading, {"no_wrap": True}) for heading in numbers]
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
            for layer, op, made, times in self.hidden[:8]
        ]
        if self.scales:
            kept = [*self.scales[:4], (-1, math.nan), *self.scales[-8:]] if len(self.scales) > 12 else self.scales
            shown = ["..." if step < 0 else f"{scale:g} (step {step})" for step, scale in kept]
            lines.append(f"loss scale: {' -> '.join(shown)}")
        return lines

    def __str__(self) -> str:
        return self.table()
