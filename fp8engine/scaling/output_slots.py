"""Slots of layers' results that the matmul itself stores in FP8: columns at the end of a model's table.

    first use    16 bits; the matmul's epilogue gathers amax
    then         codes under the predicted scale; the same pass gathers amax, saturated and not finite elements
    next step    an amax OVERSHOOT times beyond what the scale had room for widens the margin by WIDER powers of two

A result that has saturated cannot be cast again, its 16-bit value was never in memory.  The margin is therefore
widened on the device before the next step's first matmul, without the host, identically on all ranks: their amaxes
are joined.
A layer has such a column only if its recipe stores its result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8engine.ops.reference.operand import COUNTERS

WIDER = 2  # powers of two that a margin grows by
MOST = 4  # that it grows to: of the 17.8 between E4M3's smallest number and its largest
OVERSHOOT = 1.25  # with a Gaussian's million elements, 1e-4 of them lie beyond the largest divided by this
CALLS, ELEMENTS = (COUNTERS.index(name) for name in ("calls", "elements"))
GATHERED = [COUNTERS.index(name) for name in ("saturated", "nonfinite")]  # in an epilogue's order


class OutputSlots:
    """The last columns of the table, one for each layer that stores its result, and the scale of each.

    places: layer -> its place among them.  scale_O: FP32, y ≈ q * scale, 0 before it is known; a new tensor every
    step, because what was stored keeps its scale.  max_O: the largest number of its format.
    known: layers whose scale is predicted.  widen: whether margins follow from what saturates.
    """

    def __init__(self):
        self.places: dict[int, int] = {}
        self.known: set[int] = set()
        self.ran: set[int] = set()
        self.widen = True
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """No slot yet, on that device."""
        for each in (self.places, self.known, self.ran):
            each.clear()
        self.gathered = False  # whether `seen` holds anything
        self.seen: list[list[int]] = []  # calls and elements of each that the table does not have yet
        self.scale_O, self.max_O = (torch.zeros(0, device=device) for _ in range(2))
        self.over_O2 = torch.zeros(0, len(GATHERED), dtype=torch.int64, device=device)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_views": {}}  # views of tables would not follow copied tables

    def add(self, layers: Sequence[int]) -> None:
        """A place for what each of these layers stores; the table gets as many columns at its end."""
        self.places |= {layer: len(self.places) + i for i, layer in enumerate(layers)}
        self.seen += [[0, 0] for _ in layers]
        more = len(layers)
        self.scale_O, self.max_O = (torch.cat([t, t.new_zeros(more)]) for t in (self.scale_O, self.max_O))
        self.over_O2 = torch.cat([self.over_O2, self.over_O2.new_zeros(more, len(GATHERED))])
        self._views = {}

    def to(self, device: torch.device) -> None:
        """Follow the tables to their device."""
        for name in ("scale_O", "max_O", "over_O2"):
            setattr(self, name, getattr(self, name).to(device))
        self._views = {}

    def rule(self, layer: int, numerator: float, maximum: float, rules_3S: torch.Tensor, live_2S: torch.Tensor) -> None:
        """The layer stores under MAX / 2^margin = numerator from now on; 0: not at all.

        A scale that is known follows; a margin that has widened stays so under the same format.
        """
        place = self.places[layer]
        column = self._first(live_2S) + place
        scale_O = self.scale_O.clone()
        if numerator == 0.0:
            self.known.discard(layer)
            self.ran.discard(layer)
            rules_3S[0, column] = live_2S[1, column] = scale_O[place] = 0.0
            self.scale_O, self._views = scale_O, {}
            return
        before = rules_3S[0, column].clone()
        same = self.max_O[place] == maximum
        now = torch.where(same & (before > 0), before.clamp(max=numerator), numerator)
        by = torch.where(before > 0, now / before, 1.0)
        live_2S[1, column] *= by
        scale_O[place] /= by
        rules_3S[0, column], self.scale_O, self._views = now, scale_O, {}
        self.max_O[place] = maximum

    def gather(self, layer: int, live_2S: torch.Tensor, elements: int, record: bool, count: bool):
        """(scale, or None before it is known; amax, or None; counts, or None) for the epilogue of a layer's matmul.

        count: False where a backward pass runs the forward again, which is counted no second time.
        """
        place = self.places[layer]
        if (views := self._views.get(layer)) is None:
            column = self._first(live_2S) + place
            views = self._views[layer] = (self.scale_O[place], live_2S[0, column : column + 1], self.over_O2[place])
        scale, amax, counts = views
        if count:
            seen, self.gathered = self.seen[place], True
            seen[0] += 1
            seen[1] += elements
        if record:
            self.ran.add(layer)
        return scale if layer in self.known else None, amax if record else None, counts if count else None

    def settle(self, counts_CS: torch.Tensor) -> None:
        """Enter what was gathered since the last time into the table's counters."""
        if not self.places:
            return
        counts_CO = counts_CS[:, -len(self.places) :]
        counts_CO[GATHERED] += self.over_O2.t()  # asked for even if `gather` was not: a CUDA graph writes by itself
        self.over_O2.zero_()
        if self.gathered:
            seen = torch.tensor(self.seen, dtype=torch.int64).to(counts_CS.device, non_blocking=True)
            counts_CO[[CALLS, ELEMENTS]] += seen.t()
            self.seen, self.gathered = [[0, 0] for _ in self.seen], False

    def after_update(self, history_HS: torch.Tensor, live_2S: torch.Tensor, rules_3S: torch.Tensor) -> None:
        """A step's amaxes were entered and scales predicted: widen what fell short, and take the scales over."""
        if not self.places:
            return
        first = self._first(live_2S)
        amax_O, s_O, numerator_O = history_HS[0, first:], live_2S[1, first:], rules_3S[0, first:]
        if self.widen:
            short_O = (amax_O > self.max_O * self.scale_O * OVERSHOOT) & (self.scale_O > 0)
            short_O &= numerator_O > self.max_O * 2.0**-MOST
            by_O = torch.where(short_O, 2.0**-WIDER, 1.0)
            numerator_O *= by_O
            s_O *= by_O
        scale_O = torch.where(s_O > 0, 1.0 / s_O, self.scale_O)
        if new := self.ran - self.known:
            if scale_O.device.type == "cpu":  # nothing but zeros and NaN so far: no scale yet
                new = {layer for layer in new if scale_O[self.places[layer]] > 0}
            else:  # which the host cannot see without waiting: 1 for a step, what it does to the result is counted
                new_O = torch.tensor([layer in new for layer in self.places]).to(scale_O.device, non_blocking=True)
                scale_O = torch.where(new_O & (scale_O == 0), 1.0, scale_O)
            self.known |= new
        self.scale_O, self._views = scale_O, {}

    def loaded(self, live_2S: torch.Tensor) -> None:
        """The tables were read from a file: what is known follows from them (this waits for the device)."""
        first = self._first(live_2S)
        self._views = {}
        self.known = {layer for layer, place in self.places.items() if float(self.scale_O[place]) > 0}
        self.ran = self.known | {layer for layer, place in self.places.items() if float(live_2S[0, first + place]) >= 0}

    def column(self, layer: int, columns: int) -> int:
        """The layer's column of a table that has so many."""
        return columns - len(self.places) + self.places[layer]

    def _first(self, live_2S: torch.Tensor) -> int:
        return live_2S.shape[1] - len(self.places)
