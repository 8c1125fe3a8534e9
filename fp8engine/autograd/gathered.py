"""GatheredWeight: a weight that reaches its layer as FP8 codes, because each rank has cast its own shard of it.

    forward   reads the codes
    dgrad     reads the same codes, transposed, where one scale serves both directions (per tensor, 128 x 128 blocks);
              else casts the values that they stand for, along the other dimension

Under power-of-two scales the second cast rounds nothing but what is subnormal in one of the two casts: a value that
is a power of two times 4 bits of significand stays representable.  So no other recipe is gathered as codes.
"""

from __future__ import annotations

from typing import cast

import torch

from fp8engine.autograd.numerics import Casting, CastPlan
from fp8engine.errors import ParallelError
from fp8engine.ops import casts
from fp8engine.ops.reference import Operand, Slot
from fp8engine.ops.tensor import Float8Tensor


class GatheredWeight(Float8Tensor):
    """A weight [N, K] as FP8 codes with their scale, and the amax of the whole weight.

    amax, s: FP32 [], of the whole weight; s: the smallest factor among its groups, NaN where it was predicted.
    layer: its name, for errors.
    """

    amax: torch.Tensor
    s: torch.Tensor
    layer: str

    def _viewed(self, data, scale, granularity) -> GatheredWeight:
        found = cast(GatheredWeight, super()._viewed(data, scale, granularity))
        found.amax, found.s, found.layer = self.amax, self.s, self.layer
        return found

    def _map(self, fn) -> Float8Tensor:
        """A copy is an ordinary Float8Tensor."""
        found = Float8Tensor(fn(self._data), fn(self._scale), self.granularity, self.dtype)
        found.power_of_2 = self.power_of_2
        return found

    def __tensor_flatten__(self):
        return ["_data", "_scale", "amax", "s"], (self.granularity, self.dtype, self.power_of_2, self.layer)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        granularity, dtype, power_of_2, layer = context
        found = GatheredWeight(inner["_data"], inner["_scale"], granularity, dtype)
        found.power_of_2, found.layer, found.amax, found.s = power_of_2, layer, inner["amax"], inner["s"]
        return found

    def cast(self, casting: Casting, slot: Slot) -> Operand:
        """The weight under a layer's cast, amax, scale and counts written to the slot."""
        how, q = casting.how[None], self.operand()
        if slot.count or slot.record:
            _note(self, slot)
        if (q.rows, q.cols, q.data.dtype) == (how.rows, how.cols, how.dtype):
            return q
        if not (q.power_of_2 and how.power_of_2):
            raise ParallelError(
                f"{self.layer}: its weight was gathered as {self.format} codes {self.granularity}, and its recipe now "
                f"casts {casting.cast}: change recipes between steps, before the forward of the model"
            )
        return casts.quantize(self._values(q), how, slot._replace(record=False, count=False))

    def _values(self, q: Operand) -> torch.Tensor:
        """The values of the codes [N, K], in BF16: 4 bits of significand times a power of two fit exactly."""
        return Float8Tensor(q.data, self._scale, self.granularity, torch.bfloat16).values()


def why_not(plan: CastPlan) -> str:
    """Why a weight under that plan is gathered in high precision; "" where it is gathered as codes."""
    forward, dgrad = plan.forward[1], plan.dgrad[1]
    if not forward.fp8:
        return f"its forward reads the weight in {forward.cast}"
    if not dgrad.fp8:
        return f"its dgrad reads the weight in {dgrad.cast}"
    if dgrad is forward or plan.weight_serves_both:
        return ""
    first, second = forward.how[None], dgrad.how[None]
    if first.dtype == second.dtype and first.power_of_2 and second.power_of_2:
        return ""
    return f"its dgrad casts the weight {dgrad.cast}, which its codes {forward.cast} do not give exactly"


def _note(weight: GatheredWeight, slot: Slot) -> None:
    """Enter a call into the slot: the codes were cast on several ranks, none of which saw the whole weight."""
    live, counts = slot.live_2S, slot.counts_CS
    if slot.count:
        counts[0, slot.index] += 1
        counts[1, slot.index] += weight.numel()
    if slot.record:
        live[0, slot.index] = torch.maximum(live[0, slot.index], weight.amax)
        live[1, slot.index] = torch.where(weight.s.isnan(), live[1, slot.index], weight.s)
