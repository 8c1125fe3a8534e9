"""fe.amp.find_overflow: a training loop watched for NaN and Inf, forward and backward, and the guilty layer named.

    with find_overflow(model, scaler) as watch:
        train()
    print(watch.first())        # layer, operand, op, step
    watch.pin(1)                # that layer runs in FP32 from now on

Two modes.  "counters" reads each tensor between modules once (readings.py), asks nothing of the device, and looks at
the numbers of a pass when the next one begins and they have arrived.  They tell the layer (verdict.py).  To tell the
op, the pass after a finding is watched op by op (opwise.py): the same forward, slower once, with nothing run twice, no
state to put back and no input to keep.  An overflow that does not come again keeps its layer and has no op; so does
one without a loss scaler, whose step has made every weight NaN by then.  "ops" watches every pass so: slow, and sure.

Wrap before or after: torch.compile, DistributedDataParallel and checkpointing are seen through, if what is watched is
the object that is called (the compiled one).  FP16's largest value is 65504 (IEEE 754 binary16).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from fp8engine.amp.events import Batch, is_compiled
from fp8engine.amp.pin import Fp32Pinned, Pin, pin_fp32
from fp8engine.amp.readings import Transfer
from fp8engine.amp.search import ScaleSearch
from fp8engine.amp.table import LayerStats, OverflowReport
from fp8engine.amp.verdict import Finding, Judge, explains, unexplained
from fp8engine.amp.watch import Recorder
from fp8engine.errors import ConversionError, UnknownName

MODES = ("counters", "ops")
NEAR = 2.0**-4  # of its dtype's range: four doublings from Inf, which a scale or a norm gone wrong does in one step


class OverflowWatch:
    """What `find_overflow` returns: a context manager, asked during the block or after it."""

    def __init__(self, model: nn.Module, scaler: Any, mode: str):
        self.model = model
        self.findings: list[Finding] = []
        self.scales: list[tuple[int, float]] = []  # (step, loss scale from there on)
        self.hidden: Counter[tuple[str, str, str]] = Counter()  # (layer, op, what it made) that did not get out
        self.pinned: dict[str, Pin] = {}
        self.layers: dict[str, LayerStats] = {}
        self._recorder = Recorder(model, scaler, mode == "ops", self._poll)
        self._seen: dict[tuple[str | None, str], int] = {}  # (layer, operand), guesses included -> which finding
        self._times: Counter[int] = Counter()  # how often each finding came
        self._search = ScaleSearch()
        self._before: tuple[int, Counter[str]] = (0, Counter())  # passes and guilty layers when pin() was called last
        self._blamed: Counter[str] = Counter()  # guilty layers of the passes before that call
        self._transfers: list[tuple[Batch, Transfer]] = []
        layers = self._recorder.layers
        leaves = {name for name, module in layers if not list(module.children())}
        compiled = {name for name, module in layers if is_compiled(module)}
        self._judge = Judge(leaves, {name for name, _ in layers}, compiled)
        for name, module in layers:
            self.layers[name] = LayerStats(name, type(module).__name__)

    def __enter__(self) -> OverflowWatch:
        if not self._recorder.closed:
            raise ConversionError("this watch is running already: find_overflow(model) makes another")
        self._recorder.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self._recorder.detach()
        self._send()
        if exc[0] is None and not self._recorder.passes and self._recorder.backwards:
            warnings.warn(
                "find_overflow saw gradients and no forward: the model ran inside a compiled graph that it was not "
                "given; give it the object that is called, torch.compile's result",
                stacklevel=2,
            )

    def first(self) -> Finding | None:
        """The first overflow, or None; waits for the device."""
        self._settle()
        return self.findings[0] if self.findings else None

    def report(self) -> OverflowReport:
        """Every layer's peak against its dtype's range, who is guilty, the loss scales; waits for the device."""
        self._settle()
        return OverflowReport(
            findings=list(self.findings),
            layers=list(self.layers.values()),
            scales=list(self.scales),
            pinned=list(self.pinned),
            passes=self._recorder.passes,
            hidden=[(*what, times) for what, times in self.hidden.items()],
        )

    def pin(self, k: int = 1) -> list[str]:
        """Pin the k worst layers to FP32 (see `pin_fp32`) and return their names; none, if no layer is to blame.

        Worst: the guilty ones, the most often guilty first; after them those whose outputs came nearest the end of
        their range, above 1/16 of it.  Fewer than k where fewer are.  They stay pinned, until
        `watch.pinned[name].remove()`.  A pin can move the overflow to the next layer: train on inside the block and
        call pin() again.  It goes by what was found since the last call, and returns nothing once nothing overflows.
        Raises ConversionError when what overflowed lies outside the model, where no pin can reach it.
        """
        self._settle()
        blamed = [finding for finding in self.findings if finding.guilty]
        if blamed and all(finding.layer is None for finding in blamed):
            raise ConversionError(f"no layer to pin: {blamed[0]}")
        names: list[str] = []
        modules = dict(self._recorder.layers)
        for name in self._worst():
            if len(names) == k:
                break
            if any(isinstance(modules[outer], Fp32Pinned) for outer in _outer(name) if outer in modules):
                continue
            self.pinned[name] = pin_fp32(modules[name])
            names.append(name)
        searched = next((str(finding) for finding in self.findings if not finding.guilty), "no layer is guilty")
        why = "what overflows is pinned already" if self._blamed else searched
        shown = ", ".join(name or type(self.model).__name__ for name in names) or f"nothing: {why}"
        logging.getLogger(__name__).warning("pinned to FP32: %s", shown)
        return names

    def _worst(self) -> list[str]:
        """The guilty since the last call before the latest passes, and behind them who came near."""
        passes, before = self._before
        guilty = Counter({name: layer.guilty for name, layer in self.layers.items() if layer.guilty})
        if self._recorder.passes > passes:
            self._before = self._recorder.passes, guilty
            self._blamed = guilty - before
        if not self._blamed:
            return []
        low = (layer for layer in self.layers.values() if layer.low and layer.share >= NEAR)
        near = sorted(low, key=lambda layer: -layer.share)
        return list(dict.fromkeys([*(name for name, _ in self._blamed.most_common()), *(layer.name for layer in near)]))

    def _send(self) -> None:
        for batch in self._recorder.sealed:
            self._transfers.append((batch, Transfer(list(batch.readings()))))
        self._recorder.sealed = []

    def _poll(self) -> None:
        self._send()
        while self._transfers and self._transfers[0][1].ready():
            self._take(*self._transfers.pop(0))

    def _settle(self) -> None:
        self._recorder.seal()
        self._send()
        for batch, transfer in self._transfers:
            self._take(batch, transfer)
        self._transfers = []
        for layer in self.layers.values():
            layer.guilty = layer.scaled = 0
        for index, finding in enumerate(self.findings):
            if finding.layer is not None and finding.operand not in ("weight", "input"):
                row = self.layers[finding.layer]
                row.guilty += self._times[index] * finding.guilty
                row.scaled += self._times[index] * (not finding.guilty)

    def _take(self, batch: Batch, transfer: Transfer) -> None:
        transfer.finish()
        for event in batch.events:
            if event.kind == "scale" and (not self.scales or self.scales[-1][1] != event.reading.high):
                self.scales.append((event.step, event.reading.high))
            if event.call is not None and event.name in self.layers:
                self.layers[event.name].see(event)
        found = self._judge.judge(batch)
        if not found:  # what ops made and no module's output shows: 1 / Inf is 0
            self.hidden.update((c.layer, c.op, c.made) for c in batch.creations)
        for finding in found:
            self._enter(finding)
        self._passed(self._search.follow(batch))
        suspects = self._judge.suspects - self._judge.cleared
        places = {self._seen[finding.layer, finding.operand] for finding in found}
        if not batch.opwise and (suspects or any(unexplained(self.findings[place]) for place in places)):
            self._recorder.look |= dict.fromkeys(self._recorder.roots)
        elif batch.opwise and not suspects and not any(map(unexplained, self.findings)):
            self._recorder.look.clear()

    def _enter(self, finding: Finding) -> None:
        index = self._index(finding)
        if index is None:
            index = len(self.findings)
            self.findings.append(finding)
        first = self.findings[index]
        self._seen[finding.layer, finding.operand] = index
        guilty = self._search.guilty(index, finding) or (first.guilty and self._times[index] > 0)
        self._times[index] += 1
        told = finding if explains(finding, first, self._judge.compiled) else first
        cured_by = None if guilty else self._search.lowest
        told = replace(told, step=first.step, loss_scale=first.loss_scale, guilty=guilty, cured_by=cured_by)
        self.findings[index] = told
        if finding.layer is not None:
            self.layers[finding.layer].enter(finding)

    def _passed(self, scale: float | None) -> None:
        """A step has passed with this loss scale: the gradients that overflowed at a larger one are cured."""
        for index, finding in enumerate(self.findings if scale is not None else ()):
            if not finding.guilty and finding.cured_by is None:
                self.findings[index] = replace(finding, cured_by=scale)

    def _index(self, finding: Finding) -> int | None:
        """Where the same overflow stands already: it came again, or is now seen op by op."""
        for index, first in enumerate(self.findings):
            if explains(finding, first, self._judge.compiled):
                return index
        return self._seen.get((finding.layer, finding.operand))


def find_overflow(model: nn.Module, scaler: Any = None, *, mode: str = "counters") -> OverflowWatch:
    """Watch a training loop for NaN and Inf: `with find_overflow(model, scaler) as watch`.

    model: the object that is called.  scaler: a torch.amp.GradScaler, or the optimizer of fe.amp.decorate, which holds
    one; its `update` then counts the steps and its loss scale is followed.  Without one each forward pass of the model
    is a step.  mode: "counters" (cheap; tells the layer at once and the op one pass later) or "ops" (looks at every op;
    waits for the device at each).

    `watch.first()`: the first Finding (layer, operand, op, step, amaxes) or None.  `watch.report()`: all of it, a table
    when printed.  `watch.pin(k)`: the worst k layers in FP32 from now on.  A gradient that overflows under a scaler is
    found too, but the scaler skips that step and halves the scale: no layer is guilty where a smaller scale cures it.

    Raises UnknownName (mode), ConversionError (model is not an nn.Module, scaler is no loss scaler).

    >>> import torch
    >>> class Scores(nn.Module):
    ...     def forward(self, x):
    ...         return torch.exp(x * 12)
    >>> model = nn.Sequential(nn.Identity(), Scores())
    >>> with find_overflow(model, mode="ops") as watch:
    ...     _ = model(torch.ones(2, 2, dtype=torch.float16))
    >>> found = watch.first()
    >>> found.layer, found.op, found.input_amax
    ('1', 'exp', 12.0)
    >>> print(found)
    step 0: output of '1' is Inf in float16 made by exp from values up to 12
    >>> watch.pin(1)
    ['1']
    >>> with find_overflow(model) as watch:
    ...     _ = model(torch.ones(2, 2, dtype=torch.float16))
    """
    if mode not in MODES:
        raise UnknownName("mode of find_overflow", mode, MODES)
    if not isinstance(model, nn.Module):
        raise ConversionError(f"find_overflow takes the nn.Module that is called, not {type(model).__name__}")
    scaler = getattr(scaler, "scaler", scaler)
    if scaler is not None and not (hasattr(scaler, "update") and hasattr(scaler, "get_scale")):
        raise ConversionError(
            f"find_overflow(model, scaler): {type(scaler).__name__} is no loss scaler: give the GradScaler, or the "
            "optimizer that fe.amp.decorate has returned"
        )
    return OverflowWatch(model, scaler, mode)


def _outer(name: str) -> list[str]:
    """The layer itself and every one around it."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
