"""Numerics of a layer beside its parameters: its recipe, its slots, and the operands that are kept.

Two things are kept in eager code, both checked before they are used again: the weight's operands (weight.py), and
those of an input that sibling layers read (q, k, v; gate, up), so that it is quantised once (scaling/operands.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from fp8engine.autograd import products
from fp8engine.autograd.features import RANKS, SMOOTH, STORED, Feature, why_excluded
from fp8engine.autograd.weight import KeptWeight
from fp8engine.errors import ConversionError
from fp8engine.numerics.recipe import Recipe
from fp8engine.ops.card_trials import kind_of
from fp8engine.ops.flops import count_flops
from fp8engine.ops.library import in_backward
from fp8engine.ops.reference import Slot
from fp8engine.scaling.columns import Column, GraphSlots
from fp8engine.scaling.sample import ALONE, Call, observe
from fp8engine.scaling.table import OUTPUT, SLOTS, ScalingState


@dataclass
class Numerics:
    """One layer's recipe and its place in the scaling state.

    name: as errors and reports print it.  layer: its index in `state`.  standalone: no root updates the state for it.
    ran: the backend of the latest eager forward.  consumers: (kind, name) of what reads its result, where known.
    candidate: whether all of them could read FP8, so that the result is sampled.
    ready: how many inputs came in FP8, by the reason why they were dequantised ("": they were not).
    bypassed: of a layer that the first forward did not call, whether it read the weight; None: not known.
    sizes: M, N, K of the latest eager forward's matmul.
    feature: what runs round its matmuls (features.py), None for nothing.  around: its names.  shard: it, where ranks
    divide the layer (distributed/shard.py).  kinds: what its weight is, in words of features.py.
    source: the norm or activation that has made its latest input, "" if none is known to have.
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
    bypassed: bool | None = None
    feature: Feature | None = None
    kinds: tuple[str, ...] = ()
    sizes: tuple[int, int, int] | None = None
    source: str = ""
    columns: tuple[Column, ...] = ()

    def __post_init__(self):
        count_flops()
        self.columns = self.columns or self.state.columns_of(self.layer)
        recipe = self.recipe
        self.kind = kind_of(*recipe.forward) if recipe.input.is_fp8 else None
        self.result = products.in_16_bits if recipe.stored is None else products.in_fp8
        self.around: tuple[str, ...] = () if self.feature is None else self.feature.names
        self.shard: Any = self.feature if RANKS in self.around else None
        # One amax for all ranks: they cast together, whatever each knows of its own part.
        joined = self.shard is not None and any(cast.per_tensor for _, cast in (recipe.forward, recipe.dgrad))
        self.weight = KeptWeight(recipe.cache_weights, joined, self.smooth, recipe.window)

    @property
    def smooth(self) -> bool:
        """Whether the outliers of its input's channels are shared with the weight's columns (smooth.py)."""
        return SMOOTH in self.around

    def why_not(self, *wanted: str) -> str | None:
        """Why the layer cannot have one of these features beside what it is and has; None where it can."""
        stored = () if self.recipe.stored is None else (STORED,)
        return why_excluded(self.name, (*self.kinds, *self.around, *stored), *wanted)

    def switch(self, feature: Feature | None) -> None:
        """Run with a feature round the matmuls from the next call on, or with none.

        Raises ConversionError for one that it cannot have: beside what it is, or in place of another one.
        """
        new = () if feature is None or feature.names == self.around else feature.names
        if why := self.why_not(*new) or why_excluded(self.name, self.around, *new, every=True):
            raise ConversionError(why)
        self.feature = feature
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
        compiling = torch.compiler.is_compiling()
        if not compiling and role != "grad_output" and in_backward():
            count = False
        slots = GraphSlots(self.columns) if compiling else self.state.slots[self.layer]
        return slots[SLOTS.index(role), record, count]

    def adopt(self, recipe: Recipe) -> None:
        """Follow another recipe from the next call on."""
        self.recipe = recipe
        self.__post_init__()
        self.state.adopt(self.layer, recipe)

    def observe(self, role: str, x_MK: torch.Tensor, call: Call = ALONE) -> None:
        """Describe what "input", "weight", "grad_output" or "output" holds, in a step that is sampled.

        The output only if all of its consumers accept FP8.
        """
        if (sample := self.columns[SLOTS.index(role)].sample) is not None and (role != OUTPUT or self.candidate):
            observe(x_MK, sample, Call(call.number, 0.0) if role == "grad_output" else call)
