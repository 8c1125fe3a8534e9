"""Casts chosen for a group of layers that are decided together, and the recipes they lead to.

A slot is named (layer, role), and a granularity "tensor", "row", or "block" (1 x 128, weights 128 x 128).  Each
operand is read by two matmuls, along its rows and along its columns, and each matmul has casts of its own: a tensor
that both read under one scale per tensor is cast once.  Scales per row and per block are exact numbers, not powers of
two (docs/recipes.md has the measurement).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fp8engine.numerics.cast import Cast, PerBlock, PerRow, PerTensor
from fp8engine.numerics.formats import BF16, Format
from fp8engine.numerics.recipe import MATMULS, Auto, Recipe
from fp8engine.scaling.reads import BLOCK, FADES_DB, OPTIONS, READS

GRANULARITIES = ("tensor", "row", "block")  # what one scale covers, cheapest first
OPERANDS = {"forward": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
FINAL = 1 << 30  # changes of a choice that is never changed again
SlotKey = tuple[int, str]  # (layer, role)


class Casts(NamedTuple):
    """Casts of a matmul's two operands: their granularity, and the format of each, as OPERANDS has them."""

    granularity: str
    first: Format
    second: Format

    def option(self, operand: int) -> int:
        """Which of OPTIONS an operand's cast is."""
        return OPTIONS.index((self.granularity, self[1 + operand]))


@dataclass(frozen=True)
class Choice:
    """Casts of a group of layers.  matmuls: of each (layer, matmul) in FP8; the others are in 16 bits.

    layers: the group.  margin: powers of two kept free above a predicted amax.  reasons: of each slot that changed.
    changes: so far.  spent: of the budget of changes to cheaper casts (auto/policy.py).
    cheaper: samples in a row that would allow a matmul cheaper casts, by its first layer and name.
    fades_db: by how much the noise that a sample has shown fades until the next.
    paid: casts of forward matmuls that a budget of loss has made finer; None for 16 bits (auto/budget.py).
    """

    layers: tuple[int, ...]
    matmuls: Mapping[tuple[int, str], Casts]
    margin: int = 0
    reasons: Mapping[SlotKey, str] | None = None
    changes: int = 0
    spent: float = 0.0
    paid: Mapping[tuple[int, str], Casts | None] = field(default_factory=dict)
    fades_db: float = FADES_DB
    cheaper: Mapping[tuple[int, str], int] = field(default_factory=dict)

    @property
    def used(self) -> dict[tuple[int, str], Casts]:
        """The casts of each matmul in FP8, those of the budget among them."""
        return {key: casts for key, casts in {**self.matmuls, **self.paid}.items() if casts}

    def same_casts(self, other: Choice) -> bool:
        """Whether both lead to the same computation."""
        return (self.used, self.margin) == (other.used, other.margin)

    def casts(self, slot: SlotKey) -> dict[str, tuple[str, Format]]:
        """(granularity, format) of a slot by the matmul that reads it; without those in 16 bits."""
        (layer, role), used = slot, self.used
        return {
            matmul: (found.granularity, (found.first, found.second)[roles.index(role)])
            for matmul, roles in OPERANDS.items()
            if role in roles and (found := used.get((layer, matmul)))
        }


@functools.cache
def casts(role: str, granularity: str, format: Format, scaling: str = "current") -> tuple[Cast, ...]:
    """A slot's casts under a granularity, as each of its two matmuls reads it.

    >>> from fp8engine.numerics.formats import E4M3
    >>> [str(cast) for cast in casts("input", "row", E4M3)]
    ['E4M3 per row', 'E4M3 per column']
    """
    if granularity == "tensor":
        return (Cast(format, PerTensor(), scaling),)
    if granularity == "row":
        return tuple(Cast(format, PerRow(dim)) for dim in (-1, 0))
    first = Cast(format, PerBlock(BLOCK if role == "weight" else 1, BLOCK))
    return (first,) if role == "weight" else (first, first.along(0))


def reading(role: str, matmul: str) -> int:
    """Which of a slot's casts a matmul reads: 0, along its rows, or 1, along its columns."""
    return int(matmul == "wgrad" or (matmul == "dgrad" and role == "weight"))


def begin(layers: Sequence[int], recipe: Auto) -> Choice:
    """The choice for a group that was not sampled yet: the recipe's own casts."""
    formats = {matmul: [getattr(recipe, role).format for role in roles] for matmul, roles in OPERANDS.items()}
    return Choice(tuple(layers), {(i, matmul): Casts("tensor", *formats[matmul]) for i in layers for matmul in MATMULS})


def in_16_bits(previous: Choice, reason: str) -> Choice:
    """The choice of 16 bits whatever the statistics are, never to be changed."""
    slots = {(layer, role) for layer in previous.layers for role in ("input", "weight", "grad_output")}
    return Choice(previous.layers, {}, reasons=dict.fromkeys(sorted(slots), reason), changes=FINAL)


def recipe_of(auto: Auto, choice: Choice, layer: int) -> Recipe:
    """One layer's part of a choice, as the recipe that its matmuls follow.

    >>> from fp8engine.numerics.recipe import auto
    >>> print(recipe_of(auto(), begin([0], auto()), 0).grad_output)
    E5M2 per tensor
    """
    read: dict[str, list[Cast]] = {}
    used = choice.used
    for matmul, roles in OPERANDS.items():
        found = used.get((layer, matmul))
        read[matmul] = [Cast(BF16)] * 2
        if found:
            pairs = zip(roles, found[1:], strict=True)
            made = [(role, casts(role, found.granularity, format, auto.input.scaling)) for role, format in pairs]
            read[matmul] = [both[min(reading(role, matmul), len(both) - 1)] for role, both in made]
    (x, w), (dy, w_t), (dy_t, x_t) = read["forward"], read["dgrad"], read["wgrad"]
    blocks = [matmul for matmul in MATMULS if (found := used.get((layer, matmul))) and found[0] == "block"]
    return Recipe(
        name="auto",
        input=x,
        weight=w,
        grad_output=dy,
        weight_for_dgrad=_other(w, w_t),
        input_for_wgrad=_other(x, x_t),
        grad_output_for_wgrad=_other(dy, dy_t),
        margin=choice.margin,
        history=auto.history,
        fast_accumulation=tuple(matmul for matmul in auto.fast_accumulation if matmul not in blocks),
        output=auto.output,
        cache_weights=auto.cache_weights,
    )


def _other(first: Cast, second: Cast) -> Cast | None:
    """The cast of an operand's second matmul, where it is another; under its own amax, as none is predicted for it."""
    return None if second == first.along(0) else replace(second, scaling="current")


def label(slot: SlotKey, choice: Choice) -> str:
    """A slot's cast as reports print it, with that of its second matmul where it differs.

    >>> from dataclasses import replace
    >>> from fp8engine.numerics.recipe import auto
    >>> start = begin([0], auto())
    >>> forward = {(0, "forward"): start.matmuls[0, "forward"]}
    >>> label((0, "input"), start), label((0, "input"), replace(start, matmuls=forward))
    ('E4M3/tensor', 'E4M3/tensor (wgrad BF16)')
    """
    found, margin = choice.casts(slot), f" margin {choice.margin}" if choice.margin else ""
    if not found:
        return str(BF16)
    reads = [matmul for matmul, roles in OPERANDS.items() if slot[1] in roles]
    names = {m: f"{found[m][1]}/{found[m][0]}{margin}" if m in found else str(BF16) for m in reads}
    first, second = reads
    if names[first] == names[second]:
        return names[first]
    if first not in found:
        return f"{names[second]} ({first} {names[first]})"
    return f"{names[first]} ({second} {names[second]})"


def reads_of(slot: SlotKey, choice: Choice) -> list[tuple[int, int]]:
    """(read, option) of a slot's casts in FP8, as `Reads` numbers them."""
    return [(READS.index((slot[1], matmul)), OPTIONS.index(cast)) for matmul, cast in choice.casts(slot).items()]
