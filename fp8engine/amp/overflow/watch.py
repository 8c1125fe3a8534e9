"""Watch of a training loop for NaN and Inf, which names the guilty layer and op (fe.amp.find_overflow).

    with find_overflow(model, scaler) as watch:
        train()
    print(watch.first())        # layer, operand, op, step
    watch.pin(1)                # that layer runs in FP32 from now on

Two modes.  "counters" reads each tensor between modules once (reading.py), never waits for the device, and judges a
pass when the next one begins and its numbers are on the host.  They give the layer of a forward's overflow, and the
neighbourhood of a bad gradient (locate.py).  After a finding the next pass is watched op by op (opwise.py), which gives
the op, and the layer of a gradient: a slower pass of the training itself, so that nothing runs twice, no state is put
back and no input is kept.  The op is then of that later pass (Finding.op_step), the numbers stay the first one's.  An
overflow that does not come again keeps its layer and has no op; so does one without a loss scaler, whose step has made
every weight NaN by then.  "ops" watches every pass op by op: slow, and certain.

Wrap before or after: torch.compile, DistributedDataParallel and checkpointing are seen through, if what is watched is
the object that is called (the compiled one).  FP16's largest value is 65504 (IEEE 754 binary16).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8engine.amp.overflow.ledger import Ledger
from fp8engine.amp.overflow.locate import Locator, inside
from fp8engine.amp.overflow.reading import ReadingsCopy
from fp8engine.amp.overflow.recorder import Recorder
from fp8engine.amp.overflow.report import Finding, LayerStats, OverflowReport
from fp8engine.amp.overflow.trace import Batch
from fp8engine.amp.pin import Pin, is_pinned, pin_fp32
from fp8engine.errors import ConversionError, UnknownName

MODES = ("counters", "ops")
NEAR = 2.0**-4  # of its dtype's range: four doublings from Inf, which a scale or a norm gone wrong does in one step


class OverflowWatch:
    """Context manager that `find_overflow` returns; its methods answer during the block and after it."""

    def __init__(self, model: nn.Module, scaler: Any, mode: str):
        self.model = model
        self.scales: list[tuple[int, float]] = []  # (step, loss scale from there on)
        self.hidden: Counter[tuple[str, str, str]] = Counter()  # (layer, op, what it made) that did not get out
        self.pinned: dict[str, Pin] = {}
        self._recorder = Recorder(model, scaler, mode == "ops", self._take)
        self._copies: list[tuple[Batch, ReadingsCopy]] = []
        self._modules = dict(self._recorder.layers)  # of a wrapper and what it holds, which share a name, the inner one
        self.layers = {name: LayerStats(name, type(module).__name__) for name, module in self._modules.items()}
        self._locator = Locator(self._modules, self._recorder.compiled)
        self._ledger = Ledger(self._recorder.compiled)
        # When pin() last saw new passes: their number, how often each layer had been guilty, and the worst since then.
        self._pinned_at, self._guilty_then, self._worst = 0, Counter(), []

    def __enter__(self) -> OverflowWatch:
        if not self._recorder.trace.closed:
            raise ConversionError("this watch is running already: find_overflow(model) makes another")
        self._recorder.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self._recorder.detach(failed=exc[0] is not None)
        if exc[0] is None and not self._recorder.passes and self._recorder.backwards:
            warnings.warn(
                "find_overflow saw gradients and no forward: the model ran inside a compiled graph that it was not "
                "given; give it the object that is called, torch.compile's result",
                stacklevel=2,
            )

    @property
    def findings(self) -> list[Finding]:
        """All overflows so far, the first in time first; of passes whose numbers are on the host."""
        return [entry.finding for entry in self._ledger.entries]

    def first(self) -> Finding | None:
        """The first overflow, or None; waits for the device."""
        self._settle()
        return next(iter(self.findings), None)

    def report(self) -> OverflowReport:
        """Every layer's peak against its dtype's range, the guilty ones, the loss scales; waits for the device."""
        self._settle()
        return OverflowReport(
            findings=self.findings,
            layers=[replace(layer) for layer in self.layers.values()],
            scales=list(self.scales),
            pinned=[name for name, pin in self.pinned.items() if is_pinned(pin.module)],
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
        self._choose()
        names: list[str] = []
        for name in self._worst:
            if len(names) == k:
                break
            if not any(is_pinned(m) and inside(name, outer) for outer, m in self._modules.items()):
                self.pinned[name] = pin_fp32(self._modules[name])
                names.append(name)
        searched = next((str(finding) for finding in self.findings if not finding.guilty), "no layer is guilty")
        why = "what overflows is pinned already" if self._worst else searched
        shown = ", ".join(name or type(self.model).__name__ for name in names) or f"nothing: {why}"
        logging.getLogger(__name__).warning("pinned to FP32: %s", shown)
        return names

    def _choose(self) -> None:
        """The worst: the layers that were guilty since the last call before the latest passes, then those near Inf."""
        if self._recorder.passes > self._pinned_at:
            guilty = Counter({name: layer.guilty for name, layer in self.layers.items() if layer.guilty})
            newly = [name for name, _ in (guilty - self._guilty_then).most_common()]
            low = (layer for layer in self.layers.values() if layer.low and layer.share >= NEAR)
            near = [layer.name for layer in sorted(low, key=lambda layer: -layer.share)] if newly else []
            self._worst = list(dict.fromkeys([*newly, *near]))
            self._pinned_at, self._guilty_then = self._recorder.passes, guilty

    def _take(self, batch: Batch) -> None:
        """Begin to copy the readings of a batch to the host, and judge those that are there."""
        if batch.events:
            self._copies.append((batch, ReadingsCopy(event.reading for event in batch.events)))
        self._judge_copied()

    def _judge_copied(self, wait: bool = False) -> None:
        """Judge the batches whose readings are on the host; wait: all of them."""
        while self._copies and (wait or self._copies[0][1].done()):
            self._judge(*self._copies.pop(0))

    def _settle(self) -> None:
        """Judge everything up to now, and enter what each layer was named for."""
        self._recorder.trace.seal()
        self._judge_copied(wait=True)
        for layer in self.layers.values():
            layer.guilty = layer.scaled = 0
            layer.made = layer.grad_made = 0.0
        for entry in self._ledger.entries:
            if entry.finding.layer is not None:
                self.layers[entry.finding.layer].name_for(entry.finding, entry.times)

    def _judge(self, batch: Batch, copy: ReadingsCopy) -> None:
        copy.finish()
        for event in batch.events:
            if event.kind == "scale" and (not self.scales or self.scales[-1][1] != event.reading.high):
                self.scales.append((event.step, event.reading.high))
            if event.call is not None and event.name in self.layers:
                self.layers[event.name].add(event)
        seen = self._locator.locate(batch)
        if not seen.found:  # what ops made and no module's output shows: 1 / Inf is 0
            ops = (event for event in seen.ops if event.kind == "op")
            self.hidden.update((event.name, event.made["op"], event.reading.holds) for event in ops)
        came = self._ledger.enter(batch, seen)
        if not batch.opwise and (came or self._locator.undecided):
            self._recorder.rewatch(True)
        elif batch.opwise and not self._locator.undecided and not any(e.unexplained for e in self._ledger.entries):
            self._recorder.rewatch(False)


def find_overflow(model: nn.Module, scaler: Any = None, *, mode: str = "counters") -> OverflowWatch:
    """Watch a training loop for NaN and Inf: `with find_overflow(model, scaler) as watch`.

    model: the object that is called.  scaler: a torch.amp.GradScaler, or the optimizer of fe.amp.decorate, which holds
    one; its `update` then counts the steps and its loss scale is followed.  Without one each forward pass of the model
    is a step.  mode: "counters" (cheap; tells the layer at once and the op one pass later) or "ops" (checks every op;
    waits for the device at each).

    `watch.first()`: the first Finding (layer, operand, op, step, amaxes) or None.  `watch.report()`: all of it, a table
    when printed.  `watch.pin(k)`: the worst k layers in FP32 from now on.  A gradient that overflows under a scaler is
    found too, but the scaler skips that step and halves the scale: no layer is guilty where a smaller scale cures it.

    Raises UnknownName (mode), ConversionError (a model that is no nn.Module, scripted, or lazy; a scaler that is none).

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
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConversionError(f"find_overflow takes the nn.Module that is called, not {kind}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            f"find_overflow sees no module inside a {kind}: give the model as it was before torch.jit"
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ConversionError(f"this {kind} has parameters without shapes yet (a lazy module): run one forward first")
    scaler = getattr(scaler, "scaler", scaler)
    if scaler is not None and not (hasattr(scaler, "update") and hasattr(scaler, "get_scale")):
        raise ConversionError(
            f"find_overflow(model, scaler): {type(scaler).__name__} is no loss scaler: give the GradScaler, or the "
            "optimizer that fe.amp.decorate has returned"
        )
    return OverflowWatch(model, scaler, mode)
