"""GatheredWeight: a weight that reaches its layer as FP8 codes, because each rank has cast its own shard of it.

    forward   reads the codes
    dgrad     reads the same codes, transposed, where one scale serves both directions (per tensor, 128 x 128 blocks);
              else casts the values that they stand for, along the other dimension

Under power-of-two scales the second cast rounds nothing but what is subnormal in one of the two casts: a value that
is a power of two times 4 bits of significand stays representable.  So no other recipe is gathered as codes.
"""

from __future__ import annotations

import typing

import torch

from fp8engine.errors import ParallelError
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.recipe import Recipe
from fp8engine.ops import casts
from fp8engine.ops.library import FLAGS, OPERATORS, TABLES, in_backward, operation
from fp8engine.ops.reference import Operand, Slot, folded, operand
from fp8engine.ops.tensor import Float8Tensor


class GatheredWeight(Float8Tensor):
    """A weight [N, K] as FP8 codes with their scale, and the amax of the whole weight.

    amax, s: FP32 [], of the whole weight; s: the smallest factor among its groups, NaN where it was predicted.
    layer: its name, for errors.
    """

    amax: torch.Tensor
    s: torch.Tensor
    layer: str = ""  # in graphs

    def _viewed(self, data, scale, granularity) -> GatheredWeight:
        found = typing.cast(GatheredWeight, super()._viewed(data, scale, granularity))
        found.amax, found.s, found.layer = self.amax, self.s, self.layer
        return found

    def _map(self, fn) -> Float8Tensor:
        """A copy is an ordinary Float8Tensor."""
        found = Float8Tensor(fn(self._data), fn(self._scale), self.granularity, self.dtype)
        found.power_of_2 = self.power_of_2
        return found

    def __tensor_flatten__(self):
        # Without the layer's name, by which each of equal layers would be a graph of its own.
        return ["_data", "_scale", "amax", "s"], (self.granularity, self.dtype, self.power_of_2)

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        granularity, dtype, power_of_2 = context
        found = GatheredWeight(inner["_data"], inner["_scale"], granularity, dtype)
        found.power_of_2, found.amax, found.s = power_of_2, inner["amax"], inner["s"]
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is OPERATORS.codes_of.default:
            weight = args[0]
            return weight._data, weight._scale, weight.amax, weight.s
        return super().__torch_dispatch__(func, types, args, kwargs)


def for_forward(weight_NK: GatheredWeight, cast: Cast, slot: Slot, compiling: bool) -> Operand:
    """The weight under its layer's cast for forward; amax, scale and counts are written to the slot.

    Raises ParallelError where the recipe has changed since the weight was gathered.
    """
    codes, scale, amax, s = _parts(weight_NK, compiling)
    if slot.count or slot.record:
        note = OPERATORS.note_weight.default if compiling else _note_weight
        note(amax, s, codes.numel(), *slot[:5])
    if not compiling:
        q = weight_NK.operand()
        if (q.rows, q.cols, q.data.dtype) != (cast.rows, cast.cols, cast.dtype):
            raise ParallelError(
                f"{weight_NK.layer}: its weight was gathered as {weight_NK.format} codes {weight_NK.granularity}, and "
                f"its recipe now casts {cast}: change recipes between steps, before the forward of the model"
            )
    return operand(codes, scale, cast)


def for_dgrad(weight_NK: GatheredWeight, of: tuple[Cast, Cast], slot: Slot, compiling: bool) -> Operand:
    """The weight under its layer's cast for dgrad.  of: the cast that it was gathered under, and that one."""
    (forward, cast), (codes, scale, *_) = of, _parts(weight_NK, compiling)
    if (forward.rows, forward.cols) == (cast.rows, cast.cols):
        return operand(codes, scale, cast)
    # In BF16, where 4 bits of significand times a power of two fit exactly.
    values = folded(operand(codes, scale, forward), torch.float32)
    return casts.quantize(values.bfloat16(), cast, slot)


def _parts(weight_NK: GatheredWeight, compiling: bool) -> tuple[torch.Tensor, ...]:
    """(codes, scale, amax, s); a graph asks an operator, for which the subclass answers while it is traced."""
    if compiling:
        return OPERATORS.codes_of.default(weight_NK)
    return weight_NK._data, weight_NK._scale, weight_NK.amax, weight_NK.s


def why_not(recipe: Recipe) -> str:
    """Why a weight under that plan is gathered in high precision; "" where it is gathered as codes."""
    forward, dgrad = recipe.forward[1], recipe.dgrad[1]
    if not forward.is_fp8:
        return f"its forward reads the weight in {forward}"
    if not dgrad.is_fp8:
        return f"its dgrad reads the weight in {dgrad}"
    one_scale = (forward.rows, forward.cols) == (dgrad.rows, dgrad.cols) and forward.power_of_2 == dgrad.power_of_2
    if forward.dtype == dgrad.dtype and (one_scale or (forward.power_of_2 and dgrad.power_of_2)):
        return ""
    return f"its dgrad casts the weight {dgrad}, which its codes {forward} do not give exactly"


def _plain(weight: torch.Tensor):
    raise ParallelError(f"fp8engine::codes_of takes a weight that fe.distributed.fsdp gathered, not {type(weight)}")


@operation("codes_of(Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)", _plain)
def _codes_of(weight):
    return _plain(weight)


@operation(
    f"note_weight(Tensor amax, Tensor s, int size, {TABLES}, int index, {FLAGS}) -> ()", lambda *_: None, effect=True
)
def _note_weight(amax, s, size: int, *slot) -> None:
    """Enter a call into a slot: the codes were cast on several ranks, none of which saw the whole weight."""
    # As `.data`: a graph may have saved the tables for its backward, which reads other columns of them.
    live, counts, index, record, count = slot[0].data, slot[1].data, *slot[2:]
    if count and not in_backward():
        counts[0, index] += 1
        counts[1, index] += size
    if record:
        live[0, index] = torch.maximum(live[0, index], amax)
        live[1, index] = torch.where(s.isnan(), live[1, index], s)
