"""Numerics of a layer beside its parameters: its recipe's cast plan, its slots, and the operands that are kept.

Two things are kept in eager code, both checked before they are used again: the weight's operands (weight.py), and
those of an input that sibling layers read (q, k, v; gate, up), so that it is quantised once (scaling/operands.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fp8engine.autograd.weight import KeptWeight
from fp8engine.numerics.formats import FLOATS
from fp8engine.numerics.recipe import MATMULS, Cast, PerBlock, PerTensor, Recipe
from fp8engine.ops import casts
from fp8engine.ops.card_trials import kind_of
from fp8engine.ops.library import in_backward, keepable
from fp8engine.ops.reference import How, Slot
from fp8engine.scaling.columns import Column
from fp8engine.scaling.operands import Kept, Operands, carries, in_graph
from fp8engine.scaling.sample import observe
from fp8engine.scaling.table import ROLES, SLOTS, ScalingState

EMULATIONS = (None, *FLOATS)


class Casting:
    """A cast made ready for the hot path: the kernels' words for it, by the dtype of an emulation; None for codes."""

    def __init__(self, cast: Cast):
        self.cast, self.fp8 = cast, cast.is_fp8
        self.per_tensor = cast.is_fp8 and isinstance(cast.granularity, PerTensor)
        self.how: dict[torch.dtype | None, How] = (
            {dtype: casts.how(cast, dtype) for dtype in EMULATIONS} if cast.is_fp8 else {}
        )

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """x as a matmul in 16 bits reads it: itself, or an FP32 one in the cast's format."""
        return x if x.dtype.itemsize == 2 else x.to(self.cast.format.dtype)


class CastPlan:
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
        # Of the forward matmul's scales; None in 16 bits.
        self.kind = kind_of(*(cast.how[None] for cast in self.forward)) if self.forward[0].fp8 else None
        self.precision = {matmul: "fast" if matmul in recipe.fast_accumulation else "promoted" for matmul in MATMULS}
        self.predicts_weight = any(cast.cast.delayed for cast in (self.forward[1], self.dgrad[1]))
        self.fp8 = recipe.is_fp8
        self.exact = recipe.output.dtype == torch.float32
        self.stored = None if recipe.stored is None else recipe.stored.format.dtype


plan = functools.cache(CastPlan)


@dataclass
class Numerics:
    """One layer's recipe and its place in the scaling state.

    name: as errors and reports print it.  layer: its index in `state`.  standalone: no root updates the state for it.
    ran: the backend of the latest eager forward.  consumers: (kind, name) of what reads its result, where known.
    candidate: whether all of them could read FP8, so that the result is sampled.
    ready: how many inputs came in FP8, by the reason why they were dequantised ("": they were not).
    bypassed: the first forward read the weight and did not call the layer.
    sizes: M, N, K of the latest eager forward's matmul.
    shard: how the layer is divided over ranks; an object with a `linear` that stands in for the function of that name
    (distributed/shard.py).
    source: the norm or activation that has made its latest input, "" if none is known to have.
    smooth: the outliers of its input's channels are shared with the weight's columns (smooth.py).
    columns: in the order of SLOTS.
    """

    name: str
    recipe: Recipe
    state: ScalingState
    layer: int = 0
    standalone: bool = False
    ran: str | None = None
    consumers: tuple[tuple[str, str], ...] = ()
    candidate: bool = False
    ready: dict[str, int] = field(default_factory=dict)
    bypassed: bool = False
    shard: Any = None
    sizes: tuple[int, int, int] | None = None
    source: str = ""
    smooth: bool = False
    columns: tuple[Column, ...] = ()

    def __post_init__(self):
        self.columns = self.columns or self.state.columns_of(self.layer)
        self.plan = plan(self.recipe)
        # One amax for all ranks: they cast together, whatever each knows of its own part.
        joined = self.shard is not None and any(cast.per_tensor for _, cast in (self.plan.forward, self.plan.dgrad))
        self.weight = KeptWeight(self.recipe.cache_weights, joined, self.smooth)

    def divide(self, shard: Any, group: str, roles: Sequence[str]) -> None:
        """Follow `shard` from the next call on.  roles: operands that are divided over the process group."""
        self.shard = shard
        self.state.divide(self.layer, roles, group)
        self.__post_init__()

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def slot(self, role: str, record: bool, count: bool = True) -> Slot:
        """The slot of "input", "weight" or "grad_output"; neither record nor count: only its scale is read.

        A forward that runs again inside a backward pass is counted no second time.  (A graph asks when it runs.)
        """
        if torch.compiler.is_compiling():
            return self.columns[ROLES.index(role)].slot(record, count)
        if role != "grad_output" and in_backward():
            count = False
        return self.state.slot(len(ROLES) * self.layer + ROLES.index(role), record, count)

    def adopt(self, recipe: Recipe) -> None:
        """Follow another recipe from the next call on."""
        self.recipe = recipe
        self.__post_init__()
        self.state.adopt(self.layer, recipe)

    def kept_of_weight(self, weight: torch.Tensor, training: bool) -> Kept:
        """The FP8 copies of the weight that may be read, where the calls insert those that they make."""
        if not keepable(weight):
            return {}
        return self.weight.operands(weight, training, self.state.predictions if self.plan.predicts_weight else 0)

    def set_smooth(self, on: bool) -> None:
        """Share the outliers of the input's channels with the weight's columns from the next call on, or no more."""
        self.smooth = on
        self.__post_init__()

    def observe(self, role: str, x_MK: torch.Tensor) -> None:
        """Describe what "input", "weight", "grad_output" or "output" holds, in a step that is sampled."""
        if (sample := self.columns[SLOTS.index(role)].sample) is not None:
            observe(x_MK, sample)

    @property
    def samples_output(self) -> bool:
        """Whether this step samples the layer's output (only if every consumer accepts FP8)."""
        return self.candidate and self.state.samples is not None

    def kept_of_input(self, x: torch.Tensor) -> Operands:
        """Operands that other layers, or what made x, have made of this very tensor."""
        if torch.compiler.is_compiling():
            return in_graph(x)
        parent = self.state.parents[self.layer]
        made = type(vars(x).get("fp8")) is Operands
        if not (made or parent is not None) or not (carries(x) if made else keepable(x)):
            return Operands()
        return self.state.forward.operands(x, self.layer, parent)


def serves_both(first: Casting, second: Casting) -> bool:
    """Whether `first`, and the same cast of the transpose, are the operand's casts for both matmuls that read it.

    Per tensor one scale serves both; groups of rows x cols for one are groups of cols x rows for the other.
    """
    if not (first.fp8 and second.fp8):
        return False
    one, other = first.how[None], second.how[None]
    return other == one._replace(rows=one.cols, cols=one.rows)
