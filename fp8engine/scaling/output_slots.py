"""Slots of layers' results that the matmul itself stores in FP8: each layer's fourth column of a model's table.

    first use    16 bits; the matmul's epilogue gathers amax
    then         codes under the predicted scale; the same pass gathers amax, saturated and not finite elements
    next step    an amax OVERSHOOT times beyond what the scale had room for widens the margin by WIDER powers of two

A result that has saturated cannot be cast again, its 16-bit value was never in memory.  The margin is therefore
widened on the device before the next step's first matmul, without the host, identically on all ranks: their amaxes
are joined.
"""

from __future__ import annotations

import torch

from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.ops.scale_update import RESULT

WIDER = 2  # powers of two that a margin grows by
MOST = 4  # that it grows to: of the 17.8 between E4M3's smallest number and its largest
OVERSHOOT = 1.25  # with a Gaussian's million elements, 1e-4 of them lie beyond the largest divided by this
CALLS, ELEMENTS = (COUNTERS.index(name) for name in ("calls", "elements"))
GATHERED = [COUNTERS.index(name) for name in ("saturated", "nonfinite")]  # in an epilogue's order


class OutputSlots:
    """What the columns of the results need beside the table, of each layer.

    layers: whose result is stored, or has been.  scale_L: FP32, y ≈ q * scale, 0 before it is known; a new tensor
    every step, because what was stored keeps its scale.  max_L: the largest number of its format.
    known: layers whose scale is predicted.  widen: whether margins follow from what saturates.
    """

    def __init__(self):
        self.layers: set[int] = set()
        self.known: set[int] = set()
        self.ran: set[int] = set()
        self.widen = True
        self.begin(0, torch.device("cpu"))

    def begin(self, layers: int, device: torch.device) -> None:
        """No result of so many layers is stored yet, on that device."""
        for each in (self.layers, self.known, self.ran):
            each.clear()
        self.gathered = False  # whether `seen` holds anything
        self.seen = [[0, 0] for _ in range(layers)]  # calls and elements of each that the table does not have yet
        self.scale_L, self.max_L = (torch.zeros(layers, device=device) for _ in range(2))
        self.over_L2 = torch.zeros(layers, len(GATHERED), dtype=torch.int64, device=device)

    def to(self, device: torch.device) -> None:
        """Follow the tables to their device."""
        for name in ("scale_L", "max_L", "over_L2"):
            setattr(self, name, getattr(self, name).to(device))

    def rule(self, layer: int, numerator: float, maximum: float, rules_3S: torch.Tensor, live_2S: torch.Tensor) -> None:
        """The layer stores under MAX / 2^margin = numerator from now on; 0: not at all.

        A scale that is known follows; a margin that has widened stays so under the same format.
        """
        self.layers.add(layer)
        numerator_L, s_L = rules_3S[0, RESULT], live_2S[1, RESULT]
        self.scale_L = self.scale_L.clone()
        if numerator == 0.0:
            self.known.discard(layer)
            self.ran.discard(layer)
            numerator_L[layer] = s_L[layer] = self.scale_L[layer] = 0.0
            return
        before = numerator_L[layer].clone()
        same = self.max_L[layer] == maximum
        now = torch.where(same & (before > 0), before.clamp(max=numerator), numerator)
        by = torch.where(before > 0, now / before, 1.0)
        s_L[layer] *= by
        self.scale_L[layer] /= by
        numerator_L[layer] = now
        self.max_L[layer] = maximum

    def gather(self, layer: int, live_2S: torch.Tensor, elements: int, record: bool, count: bool):
        """(scale, or None before it is known; amax, or None; counts, or None) for the epilogue of a layer's matmul.

        count: False where a backward pass runs the forward again, which is counted no second time.
        """
        if count:
            seen, self.gathered = self.seen[layer], True
            seen[0] += 1
            seen[1] += elements
        if record:
            self.ran.add(layer)
        scale = self.scale_L[layer] if layer in self.known else None
        return scale, live_2S[0, RESULT][layer : layer + 1] if record else None, self.over_L2[layer] if count else None

    def settle(self, counts_CS: torch.Tensor) -> None:
        """Enter what was gathered since the last time into the table's counters."""
        if not self.layers:
            return
        counts_CL = counts_CS[:, RESULT]
        counts_CL[GATHERED] += self.over_L2.t()  # asked for even if `gather` was not: a CUDA graph writes by itself
        self.over_L2.zero_()
        if self.gathered:
            seen = torch.tensor(self.seen, dtype=torch.int64).to(counts_CS.device, non_blocking=True)
            counts_CL[[CALLS, ELEMENTS]] += seen.t()
            self.seen, self.gathered = [[0, 0] for _ in self.seen], False

    def after_update(self, history_HS: torch.Tensor, live_2S: torch.Tensor, rules_3S: torch.Tensor) -> None:
        """A step's amaxes were entered and scales predicted: widen what fell short, and take the scales over."""
        if not self.layers:
            return
        amax_L, s_L, numerator_L = history_HS[0, RESULT], live_2S[1, RESULT], rules_3S[0, RESULT]
        if self.widen:
            short_L = (amax_L > self.max_L * self.scale_L * OVERSHOOT) & (self.scale_L > 0)
            short_L &= numerator_L > self.max_L * 2.0**-MOST
            by_L = torch.where(short_L, 2.0**-WIDER, 1.0)
            numerator_L *= by_L
            s_L *= by_L
        scale_L = torch.where(s_L > 0, 1.0 / s_L, self.scale_L)
        if new := self.ran - self.known:
            if scale_L.device.type == "cpu":  # nothing but zeros and NaN so far: no scale yet
                new = {layer for layer in new if scale_L[layer] > 0}
            else:  # which the host cannot see without waiting: 1 for a step, what it does to the result is counted
                new_L = torch.tensor([layer in new for layer in range(len(scale_L))])
                new_L = new_L.to(scale_L.device, non_blocking=True)
                scale_L = torch.where(new_L & (scale_L == 0), 1.0, scale_L)
            self.known |= new
        self.scale_L = scale_L

    def loaded(self, live_2S: torch.Tensor) -> None:
        """The tables were read from a file: what is known follows from them (this waits for the device)."""
        scales, amaxes = self.scale_L.tolist(), live_2S[0, RESULT].tolist()
        self.known = {layer for layer in self.layers if scales[layer] > 0}
        self.ran = self.known | {layer for layer in self.layers if amaxes[layer] >= 0}
