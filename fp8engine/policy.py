"""Which format and granularity each tensor gets: a pure function of what its statistics predict.

A matmul wants one granularity for both operands, and a tensor that several layers read is cast once: so slots that
meet in a matmul or share a tensor are decided together.  For each granularity, cheapest first (tensor, row, block):

    1  every slot takes the FP8 format that predicts the least error for it there
    2  it will do, if each slot meets its consumer's need (SQNR in dB, share of elements and rows flushed to zero)
    3  objective "accuracy" also wants it within 1 dB of what the slot's best granularity gives

The first that will do is taken.  If none does, the matmuls whose operands both meet their needs stay in FP8, at the
granularity where these are most, and the others are computed in 16 bits.

Hysteresis: what a slot has stays while it misses its needs by no more than 1 dB, half its share again, and 2 dB of the
best; something cheaper must look right four times in a row.  A group changes at most three times; the third one is for
good, and takes the safest cast there is.

Each operand is read by two matmuls, along its rows and along its columns: a prediction is the worse of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8engine.formats import BF16, E4M3, E5M2, Format
from fp8engine.prediction import Measured, Prediction
from fp8engine.recipe import MATMULS, MOST_DB, Auto, Cast, PerBlock, PerRow, PerTensor, Recipe

GRAINS = ("tensor", "row", "block")  # what one scale covers, cheapest first
BLOCK = 128
OPERANDS = {"forward": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
WITHIN_DB = 1.0  # of the best granularity: what "accuracy" calls as good
SLACK_DB, SLACK_SHARE = 1.0, 1.5  # what is there may miss its needs by so much before it is changed
PATIENCE = 4  # looks in a row that would allow something cheaper
MOST_CHANGES = 3
UNUSUAL = 32.0  # amax over rms: a normal distribution has 5, at a million elements
WIDER = 2  # powers of two that a margin grows by
BEYOND = 1e-4  # share of elements that may saturate under a predicted scale before its margin grows

Slot = tuple[int, str]  # (layer, role)


class Needs(NamedTuple):
    """What a slot's consumers want of it: at least min_sqnr_db, at most these shares lost."""

    min_sqnr_db: float
    max_flushed: float
    max_rows_lost: float
    within_db: float | None  # of the best granularity; None: good enough is good enough

    def relaxed(self) -> Needs:
        """What must be missed before something that is there is given up."""
        within = None if self.within_db is None else self.within_db + SLACK_DB
        return Needs(
            self.min_sqnr_db - SLACK_DB, self.max_flushed * SLACK_SHARE, self.max_rows_lost * SLACK_SHARE, within
        )


class Option(NamedTuple):
    """One slot under one granularity: the format that suits it best, and what that does to it."""

    format: Format
    sqnr_db: float
    flushed: float
    rows_lost: float
    why_not: str = ""  # "": it meets the needs


@dataclass(frozen=True)
class Choice:
    """What a group of slots has.  grain: "" where nothing is in FP8.  formats: of each slot.  fp8: its matmuls.

    margin: powers of two kept free above a predicted amax.  reasons: of each slot that changed.
    cheaper: looks in a row that would allow something cheaper.  changes: so far.
    """

    grain: str
    formats: Mapping[Slot, Format]
    fp8: frozenset[tuple[int, str]]  # (layer, matmul)
    margin: int = 0
    reasons: Mapping[Slot, str] | None = None
    cheaper: int = 0
    changes: int = 0

    def same_casts(self, other: Choice) -> bool:
        """Whether nothing that is computed differs."""
        mine, theirs = ((c.grain, dict(c.formats), c.fp8, c.margin) for c in (self, other))
        return mine == theirs


def needs_of(recipe: Auto, consumers: Sequence[str] = ("matmul",)) -> Needs:
    """The strictest need among the kinds of a tensor's consumers; a kind that the recipe does not name wants 16 bits.

    >>> from fp8engine.recipe import auto
    >>> needs_of(auto(min_sqnr_db=25)).min_sqnr_db, needs_of(auto(), ("matmul", "norm")).min_sqnr_db
    (25.0, inf)
    """
    named = dict(recipe.min_sqnr_db)
    need = max((named.get(kind, float("inf")) for kind in consumers), default=float("inf"))
    within = WITHIN_DB if recipe.objective == "accuracy" else None
    return Needs(need, recipe.max_flushed, recipe.max_rows_lost, within)


def casts(role: str, grain: str, format: Format, scaling: str = "current") -> tuple[Cast, ...]:
    """A slot's casts under a granularity, as each of its two matmuls reads it.

    >>> [str(cast) for cast in casts("input", "row", E4M3)]
    ['E4M3 per row (power of 2)', 'E4M3 per column (power of 2)']
    """
    if grain == "tensor":
        return (Cast(format, PerTensor(), scaling),)
    if grain == "row":
        return tuple(Cast(format, PerRow(dim), power_of_2=True) for dim in (-1, 0))
    first = Cast(format, PerBlock(BLOCK if role == "weight" else 1, BLOCK), power_of_2=True)
    return (first,) if role == "weight" else (first, first.along(0))


def groupings(role: str) -> tuple:
    """The granularities under which a slot's statistics are to be taken."""
    return tuple(cast.granularity for grain in GRAINS for cast in casts(role, grain, E4M3))


def options(measured: Measured, role: str, needs: Needs, held: Mapping[str, Format] | None = None) -> dict[str, Option]:
    """For each granularity the best FP8 format, or the one in `held`, and whether it meets the needs."""
    found = {grain: _best(measured, role, grain, (held or {}).get(grain)) for grain in GRAINS}
    best = min(max(option.sqnr_db for option in found.values()), MOST_DB)
    return {grain: option._replace(why_not=_why_not(option, needs, best)) for grain, option in found.items()}


def _best(measured: Measured, role: str, grain: str, held: Format | None) -> Option:
    tried = []
    for format in (held,) if held is not None and held.is_fp8 else (E4M3, E5M2)[: 1 if role == "weight" else 2]:
        worst = _worst([measured.predict(cast) for cast in casts(role, grain, format)])
        tried.append(Option(format, worst.sqnr_db, worst.flushed, worst.rows_lost))
    # Of the two formats: the one that loses less of what is there, counted in signal first.
    return max(tried, key=lambda option: option.sqnr_db - 100.0 * option.flushed)


def _worst(predictions: Sequence[Prediction]) -> Prediction:
    worst = min(predictions, key=lambda each: each.sqnr_db)
    return worst._replace(
        flushed=max(each.flushed for each in predictions), rows_lost=max(each.rows_lost for each in predictions)
    )


def _why_not(option: Option, needs: Needs, best_db: float) -> str:
    """The first need that is missed, in words; "" for none."""
    if option.sqnr_db < needs.min_sqnr_db:
        return f"predicted SQNR {option.sqnr_db:.1f} dB < {needs.min_sqnr_db:g} dB"
    if option.flushed > needs.max_flushed:
        return f"{option.flushed:.1%} of the elements flushed to zero > {needs.max_flushed:.1%}"
    if option.rows_lost > needs.max_rows_lost:
        return f"{option.rows_lost:.1%} of the rows lost > {needs.max_rows_lost:.1%}"
    if needs.within_db is not None and option.sqnr_db < best_db - needs.within_db:
        return f"predicted SQNR {option.sqnr_db:.1f} dB where {best_db:.1f} dB can be had"
    return ""


def decide(seen: Mapping[Slot, Measured], needs: Mapping[Slot, Needs] | Needs, previous: Choice) -> Choice:
    """What a group of slots gets, from their statistics and what they have.

    seen: of some or all slots of `previous`; the others keep their formats.  The same arguments give the same choice.
    Reasons are those of the slots that changed.
    """
    want = {slot: needs if isinstance(needs, Needs) else needs[slot] for slot in seen}
    stay = replace(previous, reasons=None, cheaper=0)
    if previous.changes >= MOST_CHANGES or not seen:
        return stay
    wished = _wish(seen, want, previous)
    if wished.same_casts(previous):
        return stay
    missed = _missed(seen, want, previous)
    first = previous.changes == 0
    if not missed and not first:
        last = previous.changes == MOST_CHANGES - 1  # that one is kept for trouble
        if last or not _is_cheaper(wished, previous):
            return stay
        if previous.cheaper + 1 < PATIENCE:
            return replace(stay, cheaper=previous.cheaper + 1)
    if missed and previous.changes == MOST_CHANGES - 1:
        wished = _safest(seen, want, previous)
    reasons = _reasons(seen, wished, previous, missed)
    return replace(wished, reasons=reasons, cheaper=0, changes=previous.changes + 1)


def begin(layers: Sequence[int], recipe: Auto) -> Choice:
    """What a group has before anything was seen: the recipe's own casts."""
    formats = {(i, role): getattr(recipe, role).format for i in layers for role in ("input", "weight", "grad_output")}
    return Choice("tensor", formats, frozenset((i, matmul) for i in layers for matmul in MATMULS))


def recipe_of(auto: Auto, choice: Choice, layer: int) -> Recipe:
    """One layer's part of a choice, as the recipe that its matmuls follow.

    >>> from fp8engine.recipe import auto
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
            first, *other = casts(role, choice.grain, format, scaling)
            turned = (matmul == "wgrad") or (matmul == "dgrad" and role == "weight")
            made.append((other or [first])[0] if turned else first)
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
        fast_accumulation=() if choice.grain == "block" else auto.fast_accumulation,
        output=auto.output,
        cache_weights=auto.cache_weights,
    )


def widen(previous: Choice, saturated: float) -> Choice:
    """More room above predicted amaxes, where more than a few elements saturated under them since the last look."""
    if saturated <= BEYOND or previous.grain != "tensor" or previous.changes >= MOST_CHANGES:
        return previous
    why = f"{saturated:.2%} of the elements saturated under a predicted scale: margin {previous.margin + WIDER}"
    reasons = {slot: why for slot, format in previous.formats.items() if format.is_fp8}
    return replace(previous, margin=previous.margin + WIDER, reasons=reasons, changes=previous.changes + 1, cheaper=0)


def predicted(measured: Measured, role: str, choice: Choice, format: Format) -> Prediction:
    """What a slot's casts under a choice do to it; a format in 16 bits has one."""
    if not format.is_fp8:
        return measured.predict(Cast(format))
    return _worst([measured.predict(cast, choice.margin) for cast in casts(role, choice.grain, format)])


def in_16_bits(previous: Choice, reason: str) -> Choice:
    """A group that is left in 16 bits whatever its statistics say, for good."""
    formats = dict.fromkeys(previous.formats, BF16)
    reasons = dict.fromkeys(previous.formats, reason)
    return Choice("", formats, frozenset(), reasons=reasons, changes=MOST_CHANGES)


def _wish(seen, want, previous: Choice) -> Choice:
    """The choice as it would be without a past."""
    table = {slot: options(measured, slot[1], want[slot]) for slot, measured in seen.items()}
    for grain in GRAINS:
        if all(row[grain].why_not == "" for row in table.values()):
            return _choice(table, grain, previous)
    # No granularity suits all: the one with which most matmuls can stay, "as good as the best" not asked any more.
    strict = {slot: need._replace(within_db=None) for slot, need in want.items()}
    table = {slot: options(measured, slot[1], strict[slot]) for slot, measured in seen.items()}
    found = [_choice(table, grain, previous) for grain in GRAINS]
    return max(found, key=lambda choice: len(choice.fp8))


def _choice(table: Mapping[Slot, Mapping[str, Option]], grain: str, previous: Choice) -> Choice:
    formats = dict(previous.formats)
    for slot, row in table.items():
        formats[slot] = row[grain].format if row[grain].why_not == "" else BF16
    fp8 = _matmuls(formats)
    used = {(layer, role) for layer, matmul in fp8 for role in OPERANDS[matmul]}
    formats = {slot: format if slot in used else BF16 for slot, format in formats.items()}
    return replace(previous, grain=grain if fp8 else "", formats=formats, fp8=fp8)


def _matmuls(formats: Mapping[Slot, Format]) -> frozenset[tuple[int, str]]:
    """The matmuls that can run in FP8: both operands in it, not both in E5M2."""
    found = set()
    for layer in {layer for layer, _ in formats}:
        for matmul, roles in OPERANDS.items():
            a, b = (formats[layer, role] for role in roles)
            if a.is_fp8 and b.is_fp8 and not a == b == E5M2:
                found.add((layer, matmul))
    return frozenset(found)


def _missed(seen, want, previous: Choice) -> dict[Slot, str]:
    """Slots that miss their relaxed needs under what they have, and which need."""
    missed = {}
    for slot, measured in seen.items():
        format = previous.formats[slot]
        if format.is_fp8:
            option = options(measured, slot[1], want[slot].relaxed(), dict.fromkeys(GRAINS, format))[previous.grain]
            best = min(max(each.sqnr_db for each in options(measured, slot[1], want[slot]).values()), MOST_DB)
            if why := _why_not(option, want[slot].relaxed(), best):
                missed[slot] = why
    return missed


def _is_cheaper(wished: Choice, previous: Choice) -> bool:
    if len(wished.fp8) != len(previous.fp8):
        return len(wished.fp8) > len(previous.fp8)
    order = ("", *reversed(GRAINS))
    return order.index(wished.grain) > order.index(previous.grain)


def _safest(seen, want, previous: Choice) -> Choice:
    """The finest granularity, with what does not meet its needs even there in 16 bits."""
    table = {slot: options(m, slot[1], want[slot]._replace(within_db=None)) for slot, m in seen.items()}
    return _choice(table, GRAINS[-1], previous)


def _reasons(seen, wished: Choice, previous: Choice, missed: Mapping[Slot, str]) -> dict[Slot, str]:
    """Why each slot that changes does."""
    reasons = {}
    for slot, format in wished.formats.items():
        before = previous.formats[slot]
        if format == before and (wished.grain == previous.grain or not format.is_fp8):
            continue
        if slot in missed:
            reasons[slot] = missed[slot] + _about(seen[slot])
        elif missed:
            first = next(iter(missed))
            reasons[slot] = f"one granularity for the operands of a matmul; the {first[1]}: {missed[first]}"
        elif previous.changes == 0 and slot in seen:
            reasons[slot] = "first look: as good as the best, and cheapest" + _about(seen[slot])
        else:
            reasons[slot] = f"right {PATIENCE} times in a row, and cheaper"
    return reasons


def _about(measured: Measured) -> str:
    """What is unusual about a tensor, if anything: its largest value beside its rms."""
    return f" (amax {measured.crest:.0f}x rms)" if measured.crest >= UNUSUAL else ""
