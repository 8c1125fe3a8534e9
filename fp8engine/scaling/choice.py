"""Formats and granularity chosen for a group of layers that are decided together, and the recipes they lead to.

A slot is named (layer, role), and a granularity "tensor", "row", or "block" (1 x 128, weights 128 x 128).  Each
operand is read by two matmuls, along its rows and along its columns, and cast for both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8engine._moved import renamed
from fp8engine.numerics.cast import Cast, Granularity, PerBlock, PerRow, PerTensor
from fp8engine.numerics.formats import BF16, E4M3, Format
from fp8engine.numerics.recipe import MATMULS, ROLES, Auto, Recipe
from fp8engine.scaling.prediction import Measured, Prediction

GRANULARITIES = ("tensor", "row", "block")  # what one scale covers, cheapest first
BLOCK = 128
OPERANDS = {"forward": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}

FINAL = 1 << 30  # changes of a choice that is never changed again
SlotKey = tuple[int, str]  # (layer, role)
RENAMED = {"grain": "granularity"}  # attributes of 0.1's pickles


@dataclass(frozen=True)
class Choice:
    """Casts of a group of slots.  granularity: "" where nothing is in FP8.  formats: of each slot.

    fp8: the matmuls in FP8.  margin: powers of two kept free above a predicted amax.  reasons: of each slot that
    changed.  cheaper: samples in a row that would allow cheaper casts.  changes: so far.
    """

    granularity: str
    formats: Mapping[SlotKey, Format]
    fp8: frozenset[tuple[int, str]]  # (layer, matmul)
    margin: int = 0
    reasons: Mapping[SlotKey, str] | None = None
    cheaper: int = 0
    changes: int = 0

    def same_casts(self, other: Choice) -> bool:
        """Whether both lead to the same computation."""
        mine, theirs = ((c.granularity, dict(c.formats), c.fp8, c.margin) for c in (self, other))
        return mine == theirs

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(renamed(state, RENAMED))


@functools.cache
def casts(role: str, granularity: str, format: Format, scaling: str = "current") -> tuple[Cast, ...]:
    """A slot's casts under a granularity, as each of its two matmuls reads it.

    >>> [str(cast) for cast in casts("input", "row", E4M3)]
    ['E4M3 per row (power of 2)', 'E4M3 per column (power of 2)']
    """
    if granularity == "tensor":
        return (Cast(format, PerTensor(), scaling),)
    if granularity == "row":
        return tuple(Cast(format, PerRow(dim), power_of_2=True) for dim in (-1, 0))
    first = Cast(format, PerBlock(BLOCK if role == "weight" else 1, BLOCK), power_of_2=True)
    return (first,) if role == "weight" else (first, first.along(0))


def reading(role: str, matmul: str) -> int:
    """Which of a slot's casts a matmul reads: 0, along its rows, or 1, along its columns."""
    return int(matmul == "wgrad" or (matmul == "dgrad" and role == "weight"))


def groupings(role: str) -> tuple[Granularity, ...]:
    """The granularities under which a slot's statistics are to be taken."""
    return tuple(cast.granularity for granularity in GRANULARITIES for cast in casts(role, granularity, E4M3))


def begin(layers: Sequence[int], recipe: Auto) -> Choice:
    """The choice for a group that was not sampled yet: the recipe's own casts."""
    formats = {(i, role): getattr(recipe, role).format for i in layers for role in ROLES}
    return Choice("tensor", formats, frozenset((i, matmul) for i in layers for matmul in MATMULS))


def in_16_bits(previous: Choice, reason: str) -> Choice:
    """The choice of 16 bits whatever the statistics are, never to be changed."""
    formats = dict.fromkeys(previous.formats, BF16)
    reasons = dict.fromkeys(previous.formats, reason)
    return Choice("", formats, frozenset(), reasons=reasons, changes=FINAL)


def recipe_of(auto: Auto, choice: Choice, layer: int) -> Recipe:
    """One layer's part of a choice, as the recipe that its matmuls follow.

    >>> from fp8engine.numerics.recipe import auto
    >>> print(recipe_of(auto(), begin([0], auto()), 0).grad_output)
    E5M2 per tensor
    """
    scaling = auto.input.scaling
    read: dict[str, tuple[Cast, Cast]] = {}
    for matmul, roles in OPERANDS.items():
        made = []
        for role in roles:
            format = choice.formats[layer, role]
            if (layer, matmul) not in choice.fp8:
                made.append(Cast(BF16))
                continue
            first, *other = casts(role, choice.granularity, format, scaling)
            made.append((other or [first])[0] if reading(role, matmul) else first)
        read[matmul] = (made[0], made[1])
    (x, w), (dy, w_t), (dy_t, x_t) = read["forward"], read["dgrad"], read["wgrad"]
    alike = lambda first, second: None if second == first.along(0) else second  # noqa: E731 - three uses below
    return Recipe(
        name="auto",
        input=x,
        weight=w,
        grad_output=dy,
        weight_for_dgrad=alike(w, w_t),
        input_for_wgrad=alike(x, x_t),
        grad_output_for_wgrad=alike(dy, dy_t),
        margin=choice.margin,
        history=auto.history,
        fast_accumulation=() if choice.granularity == "block" else auto.fast_accumulation,
        output=auto.output,
        cache_weights=auto.cache_weights,
    )


def label(slot: SlotKey, choice: Choice) -> str:
    """A slot's cast as reports print it, with those of its matmuls that are in 16 bits.

    >>> from dataclasses import replace
    >>> from fp8engine.numerics.recipe import auto
    >>> start = begin([0], auto())
    >>> label((0, "input"), start), label((0, "input"), replace(start, fp8=frozenset({(0, "forward")})))
    ('E4M3/tensor', 'E4M3/tensor (wgrad BF16)')
    """
    (layer, role), format = slot, choice.formats[slot]
    if not format.is_fp8:
        return str(format)
    plain = [m for m, roles in OPERANDS.items() if role in roles and (layer, m) not in choice.fp8]
    margin = f" margin {choice.margin}" if choice.margin else ""
    return f"{format}/{choice.granularity}{margin}" + (f" ({', '.join(plain)} {BF16})" if plain else "")


def predicted(measured: Measured, slot: SlotKey, choice: Choice) -> Prediction:
    """The worst prediction among a slot's casts under a choice; a format in 16 bits has one cast."""
    (layer, role), format = slot, choice.formats[slot]
    if not format.is_fp8:
        return measured.predict(Cast(format))
    both = casts(role, choice.granularity, format)
    read = {reading(role, matmul) for i, matmul in choice.fp8 if i == layer and role in OPERANDS[matmul]}
    return worst([measured.predict(both[min(i, len(both) - 1)], choice.margin) for i in sorted(read)])


def worst(predictions: Sequence[Prediction]) -> Prediction:
    """The least SQNR, the largest shares lost."""
    least = min(predictions, key=lambda each: each.sqnr_db)
    return least._replace(
        flushed=max(each.flushed for each in predictions), rows_flushed=max(each.rows_flushed for each in predictions)
    )
