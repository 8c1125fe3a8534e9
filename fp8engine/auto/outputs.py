"""Decisions of `auto` on the format of each layer's result, made at every sample after those on the operands.

Who reads it comes from a recorded flow (`fe.convert(..., example_inputs=...)`); without one every result is in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp8engine.auto.host_copy import PendingSample
from fp8engine.auto.log import Change, SlotChange
from fp8engine.auto.output_policy import Reader, Stored, cannot, cast_of, decide_output, widened
from fp8engine.auto.policy import needs_of
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.ready import TAKEN
from fp8engine.numerics.cast import Cast, PerTensor
from fp8engine.numerics.formats import E5M2, Format
from fp8engine.numerics.recipe import Auto, Recipe
from fp8engine.scaling.choice import recipe_of
from fp8engine.scaling.output_slots import ELEMENTS, GATHERED
from fp8engine.scaling.prediction import Measured, Prediction
from fp8engine.scaling.sample import seen
from fp8engine.scaling.table import OUTPUT

if TYPE_CHECKING:
    from fp8engine.auto.controller import Controller

SATURATED = GATHERED[0]


class Outputs:
    """Decides for `layers`; by a layer's place among them.

    stored: what each result is stored in, where anything was decided.
    """

    def __init__(self, layers: Sequence[Numerics], recipes: Sequence[Auto]):
        self.layers, self.recipes = layers, recipes
        self.stored: dict[int, Stored] = {}
        self.places = {id(numerics): i for i, numerics in enumerate(layers)}
        self.taken: dict[str, int] = {}  # inputs that each layer had read as they were, at the last look
        self.known: set[int] = set()  # whose scale was predicted then
        self.counts: dict[int, tuple[int, int]] = {}  # elements that had saturated, and all, then

    @property
    def any(self) -> bool:
        """Whether any result could be stored in FP8."""
        return any(numerics.candidate for numerics in self.layers)

    def follow(self, flow) -> None:
        """Who reads what: a Flow, or {layer: its consumers}; a consumer is a kind, or has `kind` and `name`."""
        layers: Mapping = getattr(flow, "layers", flow)
        for i, numerics in enumerate(self.layers):
            entry = layers.get(numerics.name, ())
            numerics.consumers = tuple(_pairs(getattr(entry, "consumers", entry)))
            numerics.candidate = not self.why_not(i)

    def why_not(self, i: int) -> str:
        """Why a result is in 16 bits whatever it holds; "" where its numbers decide."""
        kinds = [kind for kind, _ in self.layers[i].consumers]
        return cannot([Reader(*pair) for pair in self.layers[i].consumers], needs_of(self.recipes[i], kinds))

    def why(self, numerics: Numerics) -> str:
        """The latest reason for 16 bits."""
        i = self.places.get(id(numerics))
        if i is None:
            return ""
        return self.why_not(i) or self.stored.get(i, Stored()).reason

    def with_output(self, i: int, recipe: Recipe) -> Recipe:
        """The layer's recipe with what its result is stored in; nothing, where its forward is not in FP8."""
        stored = self.stored.get(i, Stored())
        if not (stored.format.is_fp8 and recipe.input.is_fp8):
            return recipe
        return replace(recipe, stored=cast_of(stored.format), stored_margin=stored.margin)

    def decide(
        self, samples: torch.Tensor, counts: torch.Tensor, rules: torch.Tensor
    ) -> tuple[dict[int, tuple[Stored, Stored]], dict[int, Measured]]:
        """(before, after) of every result that is stored otherwise from now on, and what all of them held.

        Arguments: copies on the host.
        """
        changed: dict[int, tuple[Stored, Stored]] = {}
        found: dict[int, Measured] = {}
        taken = self._taken()
        recipes = dict(reversed(self.layers[0].state.layers))  # the first of a name
        for i, numerics in enumerate(self.layers):
            if not numerics.candidate:
                continue
            before = self.stored.get(i, Stored())
            measured = seen(samples[numerics.state.row(numerics.layer, OUTPUT)], "")
            if measured is not None:
                found[i] = measured
            held = before
            if before.format.is_fp8:
                held = widened(before, self._margin(i, rules), self._saturated(i, counts))
            readers = [self._reader(i, Reader(*consumer), recipes, taken) for consumer in numerics.consumers]
            needs = needs_of(self.recipes[i], [reader.kind for reader in readers])
            after = decide_output(measured, readers, needs, held)
            self.stored[i] = after
            if (after.format, after.margin) != (before.format, before.margin):
                changed[i] = before, after
        self.taken = taken
        self.known = {i for i, numerics in enumerate(self.layers) if numerics.layer in numerics.state.outputs.known}
        return changed, found

    def state_dict(self) -> list:
        """What was decided, in types that JSON knows."""
        return [
            {"layer": i, "stored": [stored.format.name, *stored[1:]], "counts": self.counts.get(i, (0, 0))}
            for i, stored in self.stored.items()
        ]

    def load_state_dict(self, kept: Iterable[Mapping]) -> None:
        """The inverse."""
        for each in kept:
            name, *rest = each["stored"]
            self.stored[int(each["layer"])] = Stored(Format.named(name), *rest)
            self.counts[int(each["layer"])] = tuple(each["counts"])

    def _taken(self) -> dict[str, int]:
        return {numerics.name: numerics.ready.get(TAKEN, 0) for numerics in self.layers}

    def _reader(self, i: int, reader: Reader, recipes: Mapping[str, Recipe], taken: Mapping[str, int]) -> Reader:
        """Whether a consumer takes the codes that layer i would write.  recipes: of the state's layers, by name."""
        kind, name = reader.kind, reader.name
        if not self.layers[i].recipe.input.is_fp8:
            return Reader(kind, name, "the matmul that makes it is in 16 bits")
        if kind != "matmul" or not name:
            return reader
        recipe = recipes.get(name)
        if recipe is None:
            return Reader(kind, name, "is no FP8 layer beside it")
        first, grad = recipe.input, recipe.operands("wgrad")[0]
        if not first.is_fp8:
            return Reader(kind, name, "its matmul is in 16 bits")
        if not isinstance(first.granularity, PerTensor):
            return Reader(kind, name, f"casts {first.granularity}")
        why = ""
        if i in self.known and name in self.taken and taken[name] == self.taken[name]:
            why = "got no codes since the last look (dropout, or another operation, stands between)"
        return Reader(kind, name, why, e5m2=grad.format != E5M2)

    def _margin(self, i: int, rules: torch.Tensor) -> int:
        """What the device has made of a margin."""
        layer, state = self.layers[i].layer, self.layers[i].state
        numerator = float(rules[0, state.column(layer, OUTPUT)])
        return round(math.log2(self.stored[i].format.max / numerator)) if numerator > 0 else 0

    def _saturated(self, i: int, counts: torch.Tensor) -> float:
        """Share of a result's elements that saturated since the last look."""
        column = self.layers[i].state.column(self.layers[i].layer, OUTPUT)
        before = self.counts.get(i, (0, 0))
        self.counts[i] = now = (int(counts[SATURATED, column]), int(counts[ELEMENTS, column]))
        return (now[0] - before[0]) / max(now[1] - before[1], 1)


def decide_outputs(controller: Controller, look: PendingSample) -> None:
    """What the results of a controller's layers are stored in, their operands being decided."""
    outputs, layers = controller.outputs, controller.layers
    changed, seen_now = outputs.decide(look.samples, look.counts, look.rules)
    controller.state.reserve(layers[i].layer for i, (_, after) in changed.items() if after.format.is_fp8)
    for i, measured in seen_now.items():
        now = outputs.stored[i]
        outcome = measured.predict(Cast(now.format), now.margin)
        controller.history.enter(look.step, f"{layers[i].name}.{OUTPUT}", label_of(now), measured, outcome)
    for i, (before, after) in changed.items():
        found = seen_now.get(i)
        own = recipe_of(controller.recipes[i], controller.choices[i], i)
        layers[i].adopt(outputs.with_output(i, own))
        numbers = () if found is None else rounded(found.predict(Cast(after.format), after.margin))
        slot = SlotChange(f"{layers[i].name}.{OUTPUT}", label_of(before), label_of(after), after.reason, *numbers)
        controller.log.append(Change(controller.step, layers[i].name, layers[i].recipe, (slot,)))


def rounded(found: Prediction) -> tuple[float | None, float]:
    """SQNR in dB and flushed share, as a decision holds them; where nothing is lost, no number that JSON knows."""
    return round(float(found.sqnr_db), 2) if math.isfinite(found.sqnr_db) else None, round(float(found.flushed), 6)


def _pairs(consumers: Iterable) -> Iterable[tuple[str, str]]:
    for consumer in consumers:
        yield (consumer, "") if isinstance(consumer, str) else (consumer.kind, consumer.name)


def label_of(stored: Stored) -> str:
    """As decisions print it."""
    if not stored.format.is_fp8:
        return "16 bits"
    return f"{stored.format}/tensor" + (f" margin {stored.margin}" if stored.margin else "")
