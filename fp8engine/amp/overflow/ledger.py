"""The findings of all passes, the same overflow once, and those that a smaller loss scale cures.

A loss scaler begins too high on purpose, skips the steps whose gradients overflow, and lowers the scale until they do
not.  The layer that overflowed first is then not at fault: its gradient is the largest, and a smaller scale cures it.
So a gradient that overflowed while the forward was finite makes a layer guilty only if

    it overflows where the scale is below 1: the unscaled gradient is beyond FP16,
    it has twice, with a step that passed in between, overflowed at a quarter of a scale at which a step had passed:
    the gradient has grown, by more than batches differ,
    or the op that made it Inf or NaN works in FP32 or BF16, whose range no loss scale up to 2^24 comes near.

Where no scaler is given the loss may be scaled all the same, so that of these only the last makes a layer guilty; but a
weight that is NaN or Inf in the next pass tells that nobody skipped the step, and then the layer is guilty too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fp8engine.amp.overflow.locate import Seen, inside
from fp8engine.amp.overflow.recorder import SHARE_A_BACKWARD
from fp8engine.amp.overflow.report import Finding
from fp8engine.amp.overflow.trace import Batch, Event

GROWN = 2  # once is an outlier among the batches, which every scaler lives with
NOISE = 4.0  # between the scales at which batches of one training overflow
HIGHEST = 2.0**24  # a loss scale that a scaler grows to; from 2^40 on even FP32 can overflow by the scale alone
WIDE = (torch.float32, torch.float64, torch.bfloat16)


@dataclass
class Entry:
    """One overflow.  times: how often it came.  grown: in how many searches at a scale far below one that passed."""

    finding: Finding
    times: int = 0
    grown: int = 0

    @property
    def unexplained(self) -> bool:
        """Whether its op is to be found."""
        return self.finding.op is None and self.finding.in_a_layer


class Ledger:
    """The overflows of a watch, first in time first, and the loss scales its steps had.

    compiled: names of layers that run compiled.
    """

    def __init__(self, compiled: set[str]):
        self.entries: list[Entry] = []
        self._compiled = compiled
        self._by_place: dict[tuple[str | None, str], Entry] = {}  # (layer, operand), guesses included
        self._cure: float | None = None  # the smallest scale, of at least 1, at which a step has passed
        self._passed = 0.0  # the largest
        self._counted = False  # whether this search, which ends with a step that passes, has shown a gradient to grow
        self._latest: list[Entry] = []  # of the last batch in which something overflowed
        self._latest_gradient: Event | None = None  # of the step under way
        self._finite = True  # whether all gradients of that step are, where its backwards end

    def enter(self, batch: Batch, seen: Seen) -> bool:
        """Enter what was found in a batch; returns whether an overflow came whose op is to be found."""
        passed = self._passed_steps(batch)
        for layer in seen.cleared:
            entry = self._by_place.pop((layer, "output"), None)
            self.entries = [one for one in self.entries if one is not entry]
        entries = [self._enter(finding, seen.guess) for finding in seen.found]
        if any(entry.finding.operand == "weight" for entry in entries):
            for entry in self._latest:
                if entry.finding.backward and entry.finding.loss_scale is None:
                    entry.finding = replace(entry.finding, guilty=True)
        self._latest = entries or self._latest
        for scale in passed:
            self._counted = False
            self._cure, self._passed = min(scale, self._cure or scale), max(scale, self._passed)
            for entry in self.entries:
                if not entry.finding.guilty and entry.finding.cured_by is None:
                    entry.finding = replace(entry.finding, cured_by=scale)
        return any(entry.unexplained for entry in entries)

    def _enter(self, finding: Finding, guess: Finding | None) -> Entry:
        entry = next((e for e in self.entries if self._explains(finding, guess, e.finding)), None)
        nearer = entry is not None
        if entry is None:
            entry = self._by_place.get((finding.layer, finding.operand))
        if entry is None or (finding.op is not None and entry.unexplained and not nearer):
            entry = Entry(finding)
            self.entries.append(entry)
        self._by_place[finding.layer, finding.operand] = entry
        first = entry.finding
        guilty = self._guilty(entry, finding) or (first.guilty and entry.times > 0)
        entry.times += 1
        if nearer:  # what it is; when, and how large, as it came first
            numbers = {name: getattr(first, name) for name in ("step", "loss_scale", "input_amax", "output_amax")}
            first = replace(finding, op_step=finding.step, **numbers)
        entry.finding = replace(first, guilty=guilty, cured_by=None if guilty else self._cure)
        return entry

    def _explains(self, seen: Finding, guess: Finding | None, first: Finding) -> bool:
        """Whether a finding with its op is of the same overflow as an earlier one without, for which ops are watched.

        It is in the same layer, or inside a compiled region, where nothing could be seen before; or its own pass would
        have made the same guess without its ops.
        """
        if seen.op is None or first.op is not None or seen.backward != first.backward or first.layer is None:
            return False
        if seen.step - first.step > SHARE_A_BACKWARD:  # that one did not come again
            return False
        if any((one.layer, one.operand) == (first.layer, first.operand) for one in (seen, guess) if one):
            return True
        if seen.layer == first.layer and seen.operand == "weight":  # the layer's cast of it, of which the output comes
            return True
        return first.layer in self._compiled and inside(seen.layer or "", first.layer)

    def _guilty(self, entry: Entry, finding: Finding) -> bool:
        """Whether the layer is at fault for what was found now."""
        scale = finding.loss_scale
        if not finding.backward:
            return True
        known = entry.finding if finding.op is None else finding  # the op is found once, and may come again
        wide = known.op is not None and known.dtype in WIDE
        if scale is None:
            return wide or finding.layer is None  # outside of the model: no layer is blamed
        if self._cure is not None and scale <= self._cure:
            self._cure = None
        if scale * NOISE <= self._passed and not self._counted:
            self._counted = True
            entry.grown += 1
        return scale < 1 or (wide and scale <= HIGHEST) or entry.grown >= GROWN

    def _passed_steps(self, batch: Batch) -> list[float]:
        """The scales at which steps have passed, as the scaler counted them in this batch."""
        passed = []
        for event in batch.events:
            before = self._latest_gradient
            if event.arrived:
                self._finite = event.reading.finite and (self._finite or before is None)
                self._latest_gradient = event
            elif event.kind == "scale" and before is not None and event.step > before.step:
                self._latest_gradient = None
                if self._finite and before.loss_scale is not None and before.loss_scale >= 1:
                    passed.append(before.loss_scale)
        return passed
