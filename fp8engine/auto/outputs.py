"""Storage format of each layer's result: decided from its consumers and its predicted statistics.

    16 bits    for a norm, a softmax, a residual, a loss or an unknown consumer; where one consumer cannot take FP8
               codes under one scale; where FP8 would miss the consumers' needs
    FP8        for all others: the matmul that computes the result writes the codes that all its consumers multiply

`decide_output` is the pure decision, `Outputs` applies it to the layers of a model at every sample.  The consumers come
from a recorded flow (`fe.convert(..., example_inputs=...)`); without one every result is stored in 16 bits.
A need that the user gives for another kind of consumer (`fe.auto(min_sqnr_db={"matmul": 22, "norm": 25})`) is kept like
a matmul's.  A separate activation computes in 16 bits and would have to decode the codes; a fused one is part of the
layer and no consumer.  A result in FP8 stays so while it misses its needs by no more than 1 dB and half the allowed
share; one that was taken back returns after PATIENCE good samples, and changes at most MOST_CHANGES times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8engine.auto.host_copy import Copied
from fp8engine.auto.policy import Needs, needs_of
from fp8engine.autograd.features import STORED
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.ready import TAKEN
from fp8engine.numerics.cast import Cast, PerTensor
from fp8engine.numerics.formats import BF16, E4M3, E5M2, Format
from fp8engine.numerics.recipe import Auto, Recipe
from fp8engine.scaling.output_slots import ELEMENTS, GATHERED
from fp8engine.scaling.prediction import Measured, Prediction
from fp8engine.scaling.sample import read_row
from fp8engine.scaling.table import OUTPUT

SATURATED = GATHERED[0]
PATIENCE = 4  # samples in a row that have to allow FP8 again
MOST_CHANGES = 3  # of one result: each makes its consumers change too
MOST_FLUSHED, MOST_ROWS, SLACK_SHARE = 0.05, 0.01, 1.5  # shares of elements and rows that one scale may turn into zero
REASONS = {
    "norm": "a norm reads it",
    "softmax": "a softmax reads it",
    "residual": "it is added to a residual",
    "loss": "a loss reads it",
    "output": "it leaves the model",
    "unknown": "something unknown reads it",
}


class ResultConsumer(NamedTuple):
    """A consumer of a result.  kind: as in a Flow.  why_not: why it takes no FP8 codes.  e5m2: whether E5M2's too."""

    kind: str
    name: str = ""
    why_not: str = ""
    e5m2: bool = True


class Stored(NamedTuple):
    """Storage of a result: an FP8 format, or BF16 for the 16 or 32 bits that the layer computes in.

    margin: powers of two free above the predicted amax.  reason: why it changed, or why it is in 16 bits.
    cheaper: samples in a row that would allow FP8.  changes: so far.
    """

    format: Format = BF16
    margin: int = 0
    reason: str = ""
    cheaper: int = 0
    changes: int = 0

    @property
    def cast(self) -> Cast:
        """Of the result to the format; in FP8 its scale has to be known before the matmul."""
        return Cast(self.format, PerTensor(), "delayed")

    @property
    def label(self) -> str:
        """As decisions print it."""
        if not self.format.is_fp8:
            return "16 bits"
        return f"{self.format}/tensor" + (f" margin {self.margin}" if self.margin else "")


def decide_output(
    measured: Measured | None, consumers: Sequence[ResultConsumer], needs: Needs, previous: Stored
) -> Stored:
    """Storage of a layer's result from now on.

    measured: None where this step has no statistics of it.  needs: the strictest of the consumers' (policy.needs_of),
    an infinite SQNR where the recipe names no need for one of their kinds.

    >>> from fp8engine.numerics.recipe import auto
    >>> consumers = [ResultConsumer("matmul"), ResultConsumer("norm")]
    >>> decide_output(None, consumers, needs_of(auto(), ("matmul", "norm")), Stored()).reason
    'a norm reads it'
    """
    fp8, found = previous.format.is_fp8, previous.format
    why = why_16_bits(consumers, needs)
    if not why:
        if measured is None or measured.amax == 0:
            return previous
        wanted, slack = (needs.relaxed(), SLACK_SHARE) if fp8 else (needs, 1.0)
        formats = [E4M3, E5M2] if all(consumer.e5m2 for consumer in consumers) else [E4M3]
        table = {format: measured.predict(Stored(format).cast, previous.margin) for format in formats}
        found = max(table, key=lambda format: table[format].sqnr_db - 100.0 * table[format].flushed)
        if fp8 and previous.format in table and not misses(table[previous.format], wanted, slack):
            found = previous.format
        why = misses(table[found], wanted, slack)
    if why:
        if not fp8:
            return previous._replace(reason=why, cheaper=0)
        return Stored(BF16, 0, why, 0, previous.changes + 1)
    if found == previous.format or previous.changes >= MOST_CHANGES - 1:  # the last change is kept for a missed need
        return previous._replace(cheaper=0)
    if not fp8 and previous.changes > 0 and previous.cheaper + 1 < PATIENCE:
        return previous._replace(cheaper=previous.cheaper + 1)
    names = ", ".join(dict.fromkeys(consumer.name or consumer.kind for consumer in consumers))
    return Stored(found, previous.margin, f"all that read it read FP8: {names}", 0, previous.changes + 1)


def misses(found: Prediction, needs: Needs, slack: float = 1.0) -> str:
    """The first need that is missed, in words; "" for none.  slack: by which the allowed shares are multiplied."""
    if found.sqnr_db < needs.min_sqnr_db:
        return f"predicted SQNR {found.sqnr_db:.1f} dB < {needs.min_sqnr_db:g} dB"
    if found.flushed > MOST_FLUSHED * slack:
        return f"{found.flushed:.1%} of the elements flushed to zero > {MOST_FLUSHED:.1%}"
    if found.rows_flushed > MOST_ROWS * slack:
        return f"{found.rows_flushed:.1%} of the rows flushed to zero > {MOST_ROWS:.1%}"
    return ""


def widened(previous: Stored, margin: int, saturated: float) -> Stored:
    """The storage with the margin to which the device has widened it, because values lay beyond a predicted scale.

    saturated: share of the elements since the last sample.
    """
    if not previous.format.is_fp8 or margin <= previous.margin:
        return previous
    return previous._replace(
        margin=margin, reason=f"{saturated:.2%} of the elements saturated under a predicted scale: margin {margin}"
    )


def why_16_bits(consumers: Sequence[ResultConsumer], needs: Needs) -> str:
    """Why a result is stored in 16 bits whatever its values are; "" where they decide."""
    if not consumers:
        return "nothing is known of what reads it"
    for consumer in consumers:
        if consumer.kind == "activation":
            return "an activation of its own reads it"
        if needs.min_sqnr_db == float("inf") and consumer.kind != "matmul":
            return REASONS.get(consumer.kind, f"{consumer.kind} reads it")
        if consumer.why_not:
            return f"{consumer.name or consumer.kind} reads it, and {consumer.why_not}"
    return ""


class Outputs:
    """Storage of the results of `layers`, by a layer's place among them.

    stored: of each result that was decided on.  taken: how many inputs each layer, by name, had read as FP8 codes at
    the last sample; known: the layers whose results had a predicted scale then; counts: (elements that had saturated,
    all elements) of each then.
    """

    def __init__(self, layers: Sequence[Numerics], recipes: Sequence[Auto]):
        self.layers, self.recipes = layers, recipes
        self.stored: dict[int, Stored] = {}
        self.taken: dict[str, int] = {}
        self.known: set[int] = set()
        self.counts: dict[int, tuple[int, int]] = {}

    def follow(self, flow) -> None:
        """Take the consumers of each result, from a Flow or {layer: consumers}; each a kind, or with kind and name."""
        layers: Mapping = getattr(flow, "layers", flow)
        for i, numerics in enumerate(self.layers):
            entry = layers.get(numerics.name, ())
            numerics.consumers = tuple(
                (consumer, "") if isinstance(consumer, str) else (consumer.kind, consumer.name)
                for consumer in getattr(entry, "consumers", entry)
            )
            numerics.candidate = not self._why_not(i)

    def why(self, numerics: Numerics) -> str:
        """The latest reason for 16 bits."""
        i = next((i for i, each in enumerate(self.layers) if each is numerics), None)
        return "" if i is None else self._why_not(i) or self.stored.get(i, Stored()).reason

    def with_output(self, i: int, recipe: Recipe) -> Recipe:
        """The layer's recipe with the storage of its result; none where its forward matmul is not in FP8."""
        stored = self.stored.get(i, Stored())
        if not (stored.format.is_fp8 and recipe.input.is_fp8):
            return recipe
        return replace(recipe, stored=stored.cast, stored_margin=stored.margin)

    def decide(self, tables: Copied) -> tuple[dict[int, tuple[Stored, Stored]], dict[int, Measured]]:
        """((before, after) of every result whose storage changes, statistics of all results that were sampled)."""
        changed: dict[int, tuple[Stored, Stored]] = {}
        found: dict[int, Measured] = {}
        taken = {numerics.name: numerics.ready.get(TAKEN, 0) for numerics in self.layers}
        recipes = dict(reversed(self.layers[0].state.layers))  # of layers with one name the first one's
        for i, numerics in enumerate(self.layers):
            if not numerics.candidate:
                continue
            before = self.stored.get(i, Stored())
            current = self._widened(i, tables) if before.format.is_fp8 else before
            measured = read_row(tables.slots[numerics.state.column(numerics.layer, OUTPUT)])
            if measured is not None:
                found[i] = measured
            consumers = [self._consumer(i, ResultConsumer(*pair), recipes, taken) for pair in numerics.consumers]
            needs = needs_of(self.recipes[i], [consumer.kind for consumer in consumers])
            self.stored[i] = after = decide_output(measured, consumers, needs, current)
            if (after.format, after.margin) != (before.format, before.margin):
                changed[i] = before, after
        self.taken = taken
        self.known = {i for i, numerics in enumerate(self.layers) if numerics.layer in numerics.state.outputs.known}
        return changed, found

    def state_dict(self) -> dict:
        """The decisions and what they rest on, in types that JSON knows."""
        stored = [
            {"layer": i, "stored": [stored.format.name, *stored[1:]], "counts": self.counts.get(i, (0, 0))}
            for i, stored in self.stored.items()
        ]
        ready = [numerics.ready for numerics in self.layers]
        return {"outputs": stored, "taken": {"last": self.taken, "known": sorted(self.known), "ready": ready}}

    def load_state_dict(self, saved: Mapping) -> None:
        """The inverse of `state_dict`, but for what the layers count."""
        for each in saved["outputs"]:
            name, *rest = each["stored"]
            self.stored[each["layer"]] = Stored(Format.named(name), *rest)
            self.counts[each["layer"]] = tuple(each["counts"])
        taken = saved["taken"]
        self.taken, self.known = taken["last"], set(taken["known"])

    def _why_not(self, i: int) -> str:
        consumers = [ResultConsumer(*pair) for pair in self.layers[i].consumers]
        if why := self.layers[i].why_not(STORED):
            return why
        return why_16_bits(consumers, needs_of(self.recipes[i], [consumer.kind for consumer in consumers]))

    def _consumer(
        self, i: int, consumer: ResultConsumer, recipes: Mapping[str, Recipe], taken: Mapping[str, int]
    ) -> ResultConsumer:
        """The consumer, with why it cannot take the codes of layer i.  recipes: of the state's layers, by name."""
        if not self.layers[i].recipe.input.is_fp8:
            return consumer._replace(why_not="the matmul that makes it is in 16 bits")
        if consumer.kind != "matmul" or not consumer.name:
            return consumer
        recipe = recipes.get(consumer.name)
        if recipe is None:
            return consumer._replace(why_not="is no FP8 layer beside it")
        first, grad = recipe.input, recipe.operands("wgrad")[0]
        if not first.is_fp8:
            return consumer._replace(why_not="its matmul is in 16 bits")
        if not isinstance(first.granularity, PerTensor):
            return consumer._replace(why_not=f"casts {first.granularity}")
        why = ""
        if i in self.known and consumer.name in self.taken and taken[consumer.name] == self.taken[consumer.name]:
            why = "got no codes since the last look (dropout, or another operation, stands between)"
        return consumer._replace(why_not=why, e5m2=grad.format != E5M2)

    def _widened(self, i: int, tables: Copied) -> Stored:
        """The storage of a result in FP8 with the margin that it has on the device."""
        stored, column = self.stored[i], self.layers[i].state.column(self.layers[i].layer, OUTPUT)
        numerator = float(tables.rules[0, column])
        margin = round(math.log2(stored.format.max / numerator)) if numerator > 0 else 0
        before = self.counts.get(i, (0, 0))
        self.counts[i] = now = (int(tables.counts[SATURATED, column]), int(tables.counts[ELEMENTS, column]))
        return widened(stored, margin, (now[0] - before[0]) / max(now[1] - before[1], 1))
