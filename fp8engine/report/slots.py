"""The slots of a scaling state as plain numbers: its tables are copied to the host once, for all layers of a report."""

from __future__ import annotations

import math

import torch

from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.scaling.table import OUTPUT, ScalingState, numbers_of


class Slots:
    """What `ScalingState.view(...).to_dict()` says of each slot, of all of them for the price of one."""

    def __init__(self, state: ScalingState):
        if state.device.type == "meta":  # nothing has run: as fresh tables say it
            state = ScalingState(state.layers)
        self.state = state
        state.outputs.settle(state.counts_CS)
        live_2S, rules_3S = state.live_2S.cpu(), state.rules_3S.cpu()
        s_S = live_2S[1].clone()
        if outputs := len(state.outputs):  # under the scale that results were stored with, not the one predicted next
            stored_O = state.outputs.scale_O.cpu()
            s_S[-outputs:] = torch.where(stored_O > 0, 1.0 / stored_O, 0.0)
        self.scale = torch.where(s_S > 0, 1.0 / s_S, 1.0).tolist()
        self.amax, self.numerator = live_2S[0].tolist(), rules_3S[0].tolist()
        self.before = state.history_HS[0].tolist() if len(state.history_HS) else []
        self.counts = state.counts_CS.t().tolist()

    def numbers(self, layer: int, role: str) -> dict:
        """One slot's, in types that JSON knows."""
        recipe, index, cast = self.state.layers[layer][1], self.state.column(layer, role), self.state.cast(layer, role)
        amax, margin = self.amax[index], recipe.margin
        if amax < 0:
            amax = self.before[index] if recipe.delayed else 0.0
        if role == OUTPUT:
            margin = round(math.log2(cast.format.max / self.numerator[index])) if recipe.stored else 0
        counted: dict[str, int] = dict(zip(COUNTERS, self.counts[index], strict=True))
        return numbers_of(cast, self.scale[index], amax, counted, margin)
