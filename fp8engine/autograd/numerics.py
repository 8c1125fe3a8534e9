"""Numerics of a layer: its recipe's plan, its slots, and the operands worth keeping, beside its parameters.

Two things are kept in eager code, both checked before they are used again: the weight's operands (weight.py), and
those of an input that sibling layers read (q, k, v; gate, up), so that it is quantised once (shared_input.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields

import torch

from fp8engine import _torch
from fp8engine.autograd.weight import KeptWeight
from fp8engine.numerics.recipe import MATMULS, Cast, PerBlock, Recipe
from fp8engine.ops import casts, device
from fp8engine.ops.reference import How, Operand, Slot
from fp8engine.scaling.sample import observe
from fp8engine.scaling.shared_input import Kept
from fp8engine.scaling.table import ROLES, ScalingState, in_backward

HOLDS = (None, torch.float32, torch.bfloat16, torch.float16)


class Casting:
    """A cast made ready for the hot path: the kernels' words for it, by the dtype its values are held in."""

    def __init__(self, cast: Cast):
        self.cast, self.fp8 = cast, cast.is_fp8
        self.how: dict[torch.dtype | None, How] = {hold: casts.how(cast, hold) for hold in HOLDS} if cast.is_fp8 else {}


class Plan:
    """A recipe made ready: the castings of its three matmuls, equal casts being one object."""

    def __init__(self, recipe: Recipe):
        ready: dict[Cast, Casting] = {}
        pairs = {
            matmul: tuple(ready.setdefault(cast, Casting(cast)) for cast in recipe.operands(matmul))
            for matmul in MATMULS
        }
        self.forward, self.dgrad, self.wgrad = (pairs[matmul] for matmul in MATMULS)
        # Whether x (saved for wgrad), dy and the weight are cast once, transpose included.
        self.input_serves_both = serves_both(self.forward[0], self.wgrad[1])
        self.grad_serves_both = serves_both(self.dgrad[0], self.wgrad[0])
        self.weight_serves_both = serves_both(self.forward[1], self.dgrad[1])
        self.by_block = any(isinstance(cast.granularity, PerBlock) for cast in ready)
        self.precision = {matmul: "fast" if matmul in recipe.fast_accumulation else "promoted" for matmul in MATMULS}
        self.fp8 = recipe.is_fp8
        self.exact = recipe.output.dtype == torch.float32
        self.stored = None if recipe.stored is None else recipe.stored.format.dtype


plan = functools.cache(Plan)


@dataclass
class Numerics:
    """One layer's recipe and its place in the scaling state.

    name: as errors and reports print it.  layer: its index in `state`.  alone: no root updates the state for it.
    ran: the backend of the latest eager forward.  consumers: (kind, name) of what reads its result, where known.
    candidate: whether that could read FP8, so that the result is worth looking at.
    ready: how many inputs came in FP8, by the reason why they were dequantised ("": they were not).
    bypassed: the first forward read the weight and did not call the layer.
    """

    name: str
    recipe: Recipe
    state: ScalingState
    layer: int = 0
    alone: bool = False
    ran: str | None = None
    consumers: tuple[tuple[str, str], ...] = ()
    candidate: bool = False
    ready: dict[str, int] = field(default_factory=dict)
    bypassed: bool = False

    def __post_init__(self):
        self.plan = plan(self.recipe)
        self.weight = KeptWeight(self.recipe.cache_weights)

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def slot(self, role: str, record: bool, count: bool = True) -> Slot:
        """The slot of "input", "weight" or "grad_output"; neither record nor count: only its scale is read.

        A forward that runs again inside a backward pass is counted no second time.  (A graph asks when it runs.)
        """
        if role != "grad_output" and not torch.compiler.is_compiling() and in_backward():
            count = False
        return self.state.slot(len(ROLES) * self.layer + ROLES.index(role), record, count)

    def adopt(self, recipe: Recipe) -> None:
        """Follow another recipe from the next call on."""
        self.recipe = recipe
        self.__post_init__()
        self.state.adopt(self.layer, recipe)

    def observe(self, role: str, x_MK: torch.Tensor) -> None:
        """Describe what "input", "weight", "grad_output" or "output" holds, if somebody looks at this step."""
        if self.state.samples is not None and (self.state.sample_all or self.layer in self.state.detailed_layers):
            closely = self.layer in self.state.detailed_layers and role in ROLES
            observe(x_MK, self.state.samples, self.state.row(self.layer, role), role if closely else "")

    @property
    def looks_at_output(self) -> bool:
        """Whether somebody looks at this step, and at the layer's result too: all who read it could read FP8."""
        return self.candidate and self.state.samples is not None

    def kept_of_weight(self, weight: torch.Tensor, training: bool) -> Kept:
        """Operands of this very weight; empty when it has changed since they were made."""
        return self.weight.operands(weight, training) if plain(weight) else {}

    def kept_of_input(self, x: torch.Tensor) -> Kept:
        """Operands that a sibling of the layer has just made of this very tensor."""
        return self.state.shared.operands(x, self.layer, self.state.parents[self.layer]) if plain(x) else {}


def operand(x_MK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot, hold=None) -> Operand | torch.Tensor:
    """x under a cast, made once: FP8 with its scale, or the tensor itself where the cast is to 16 or 32 bits.

    slot: where the scale is read and this use of x is counted.
    hold: dtype in which an operand that only an emulated matmul reads is held; None for FP8 codes.
    """
    if not casting.fp8:
        return x_MK if x_MK.dtype.itemsize == 2 else x_MK.to(casting.cast.format.dtype)
    how = casting.how[hold]
    made = kept.get(how)
    # Made without gradients (an evaluation, the first forward of a reentrant checkpoint): not yet in the history.
    if made is None or (slot.record and not made[1].record):
        made = kept[how] = casts.quantize(x_MK, how, slot), slot
    elif (slot.count or slot.record) and slot.index != made[1].index:
        _count_again(made[1], slot, x_MK.numel())
    return made[0]


def both(x_MK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot) -> tuple[Operand, Operand]:
    """x under a cast, and its transpose under the same for the matmul that reduces x's rows: one pass, made once.

    For a cast that `serves_both` says does; as FP8 codes.
    """
    how = casting.how[None]
    made, turned = kept.get(how), kept.get((how, "turned"))
    if made is None or turned is None or (slot.record and not made[1].record):
        first, second = casts.cast_transpose(x_MK, how, slot)
        kept[how], kept[how, "turned"] = (first, slot), (second, slot)
        return first, second
    if (slot.count or slot.record) and slot.index != made[1].index:
        _count_again(made[1], slot, x_MK.numel())
    return made[0], turned[0]


def transpose(x_MK: torch.Tensor, casting: Casting, kept: Kept, slot: Slot) -> Operand:
    """The second of `both` alone, for a backward whose forward has used up the first."""
    key = (casting.how[None], "turned")
    if key not in kept:
        kept[key] = casts.cast_transpose(x_MK, casting.how[None], slot)[1], slot
    return kept[key][0]


def serves_both(first: Casting, second: Casting) -> bool:
    """Whether `first`, and the same cast of the transpose, are the operand's casts for both matmuls that read it.

    Per tensor one scale serves both; groups of rows x cols for one are groups of cols x rows for the other.
    """
    if not (first.fp8 and second.fp8):
        return False
    one, other = first.how[None], second.how[None]
    return other == one._replace(rows=one.cols, cols=one.rows)


def _count_again(source: Slot, slot: Slot, size: int) -> None:
    """Another layer's slot already holds this tensor's amax: take it over instead of reading the tensor again."""
    live, counts = slot.live_2S, slot.counts_CS
    if slot.record:
        live[0, slot.index] = torch.maximum(live[0, slot.index], live[0, source.index])
        live[1, slot.index] = live[1, source.index]
    if slot.count:
        counts[0, slot.index] += 1
        counts[1, slot.index] += size


def plain(x: torch.Tensor) -> bool:
    """Whether x is real data in eager code, so that operands made from it can be kept and found again."""
    return (
        not torch.compiler.is_compiling()
        and _torch.dispatch_modes() == 0
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_meta
        and not x.is_inference()
    )


def holding(x: torch.Tensor, backend: str | None) -> torch.dtype | None:
    """In which dtype an operand made from x and not saved waits for its matmul: None, unless that is emulated."""
    return device.holding_dtype(x.device, x.numel()) if backend == "reference" else None
