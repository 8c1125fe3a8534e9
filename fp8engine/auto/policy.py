"""Which format and granularity each tensor gets: a pure function of what its statistics predict.

A matmul wants one granularity for both operands, and a tensor that several layers read is cast once: so slots that
meet in a matmul or share a tensor are decided together.  For each granularity, cheapest first (tensor, row, block):

    1  every slot takes the FP8 format that suits it best there: SQNR in dB, less one for each percent flushed to zero
    2  it will do, if in both matmuls that read it each slot meets its consumer's need (SQNR, shares flushed and lost)
    3  objective "accuracy" also wants it within 1 dB of what the slot's best granularity gives

The first that will do is taken.  If none does, the matmuls whose two operands meet their needs stay in FP8, at the
granularity where these are most, and the others are computed in 16 bits.

Hysteresis: what a slot has stays while it misses its needs by no more than 1 dB, half its share again, and 2 dB of the
best; something cheaper must look right four times in a row.  A group changes at most three times; the third one is for
good, is kept for trouble (SQNR or shares, not the last dB), and takes the safest cast there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8engine.numerics.formats import BF16, E4M3, E5M2, Format
from fp8engine.numerics.recipe import MOST_DB, Auto
from fp8engine.scaling.choice import GRAINS, OPERANDS, Choice, Slot, casts, label, reading, worst
from fp8engine.scaling.prediction import Measured, Prediction

WITHIN_DB = 1.0  # of the best granularity: what "accuracy" calls as good
SLACK_DB, SLACK_SHARE = 1.0, 1.5  # what is there may miss its needs by so much before it is changed
PATIENCE = 4  # looks in a row that would allow something cheaper
MOST_CHANGES = 3
EXACT_DB = 100.0  # of a cast that loses nothing, so that it has a value
UNUSUAL = 32.0  # amax over rms: a normal distribution has 5, at a million elements
WIDER = 2  # powers of two that a margin grows by
BEYOND = 1e-4  # share of elements that may saturate under a predicted scale before its margin grows


class Needs(NamedTuple):
    """What a slot's consumers want of it: at least min_sqnr_db, at most these shares lost."""

    min_sqnr_db: float
    max_flushed: float
    max_rows_lost: float
    within_db: float | None  # of the best granularity; None: good enough is good enough

    def relaxed(self) -> Needs:
        """The same with some slack."""
        within = None if self.within_db is None else self.within_db + SLACK_DB
        return Needs(
            self.min_sqnr_db - SLACK_DB, self.max_flushed * SLACK_SHARE, self.max_rows_lost * SLACK_SHARE, within
        )


class Option(NamedTuple):
    """One slot under one granularity: the format that suits it best, and what that does to it at worst.

    good: whether each of its casts, along rows and along columns, meets the needs; one of per tensor and of squares.
    value: in dB, of the worst that does.
    """

    format: Format
    sqnr_db: float
    flushed: float
    rows_lost: float
    value: float
    good: tuple[bool, ...] = ()
    why_not: str = ""  # "": all are

    def suits(self, role: str, matmul: str) -> bool:
        """Whether the cast that a matmul reads meets the needs."""
        return self.good[min(reading(role, matmul), len(self.good) - 1)]


def needs_of(recipe: Auto, consumers: Sequence[str] = ("matmul",)) -> Needs:
    """The strictest need among the kinds of a tensor's consumers; a kind that the recipe does not name wants 16 bits.

    >>> from fp8engine.numerics.recipe import auto
    >>> needs_of(auto(min_sqnr_db=25)).min_sqnr_db, needs_of(auto(), ("matmul", "norm")).min_sqnr_db
    (25.0, inf)
    """
    named = dict(recipe.min_sqnr_db)
    need = max((named.get(kind, float("inf")) for kind in consumers), default=float("inf"))
    within = WITHIN_DB if recipe.objective == "accuracy" else None
    return Needs(need, recipe.max_flushed, recipe.max_rows_lost, within)


def known(measured: Measured, role: str) -> tuple[str, ...]:
    """The granularities that a look took statistics of: all, or per tensor alone, which costs a tenth."""
    return GRAINS if measured.tables else GRAINS[:1]


def enough(seen: Mapping[Slot, Measured], needs: Mapping[Slot, Needs], previous: Choice) -> bool:
    """Whether these statistics settle what `decide` says: of all granularities, or of tensors where those do."""
    return all(measured.tables for measured in seen.values()) or per_tensor(seen, needs, previous)


def per_tensor(seen: Mapping[Slot, Measured], needs: Mapping[Slot, Needs], previous: Choice) -> bool:
    """Whether statistics per tensor alone settle what `decide` says.

    They do where every slot has a format per tensor that needs nothing better (no granularity gives an FP8 format more
    than MOST_DB), and what it has now is judged alike whatever that would give.
    """
    if previous.changes >= MOST_CHANGES:
        return True
    if previous.grain != GRAINS[0] or not all(format.is_fp8 for format in previous.formats.values()):
        return False
    missed = False
    for slot, measured in seen.items():
        role, held, need = slot[1], previous.formats[slot], needs[slot]
        (found,) = options(measured, role, need, GRAINS[:1]).values()
        least = _at(measured, role, GRAINS[0], need, MOST_DB)
        if least.why_not or found.format != least.format:
            return False
        verdicts = {
            _at(measured, role, GRAINS[0], _given_up(need, previous), best, held).why_not == ""
            for best in (min(found.sqnr_db, MOST_DB), MOST_DB)
        }
        if len(verdicts) > 1:
            return False
        missed |= False in verdicts
    return not (missed and previous.changes == MOST_CHANGES - 1)  # the last change wants all granularities


def options(measured: Measured, role: str, needs: Needs, grains: Sequence[str] = GRAINS) -> dict[str, Option]:
    """For each granularity that was looked at, the best FP8 format, and whether it meets the needs."""
    modest = needs._replace(within_db=None)
    grains = [grain for grain in grains if grain in known(measured, role)]
    found = {grain: _at(measured, role, grain, modest, 0.0) for grain in grains}
    best = max((option.sqnr_db for option in found.values() if not option.why_not), default=0.0)
    return {grain: _at(measured, role, grain, needs, min(best, MOST_DB)) for grain in found}


def _at(measured: Measured, role: str, grain: str, needs: Needs, best_db: float, held: Format | None = None) -> Option:
    """One granularity's best format, or the one held; best_db: what can be had."""
    tried = []
    for format in (held,) if held is not None else (E4M3, E5M2)[: 1 if role == "weight" else 2]:
        each = [measured.predict(cast) for cast in casts(role, grain, format)]
        why = [misses(prediction, needs, best_db) for prediction in each]
        least = worst(each)
        good = tuple(not reason for reason in why)
        first = next((reason for reason in why if reason), "")
        values = [min(found.sqnr_db, EXACT_DB) - 100.0 * found.flushed for found in each]
        value = min([value for value, fine in zip(values, good, strict=True) if fine] or values)
        tried.append(Option(format, least.sqnr_db, least.flushed, least.rows_lost, value, good, first))
    return max(tried, key=_score)


def _score(option: Option) -> tuple[int, float]:
    return sum(option.good), option.value


def misses(found: Prediction, needs: Needs, best_db: float = 0.0) -> str:
    """The first need that is missed, in words; "" for none.  best_db: what can be had."""
    if found.sqnr_db < needs.min_sqnr_db:
        return f"predicted SQNR {found.sqnr_db:.1f} dB < {needs.min_sqnr_db:g} dB"
    if found.flushed > needs.max_flushed:
        return f"{found.flushed:.1%} of the elements flushed to zero > {needs.max_flushed:.1%}"
    if found.rows_lost > needs.max_rows_lost:
        return f"{found.rows_lost:.1%} of the rows lost > {needs.max_rows_lost:.1%}"
    if needs.within_db is not None and found.sqnr_db < best_db - needs.within_db:
        return f"predicted SQNR {found.sqnr_db:.1f} dB where {best_db:.1f} dB can be had"
    return ""


def decide(seen: Mapping[Slot, Measured], needs: Mapping[Slot, Needs] | Needs, previous: Choice) -> Choice:
    """What a group of slots gets, from their statistics and what they have.

    seen: of some or all slots of `previous`; the others keep their formats.  The same arguments give the same choice.
    Reasons are those of the slots that changed.
    """
    want = {slot: needs if isinstance(needs, Needs) else needs[slot] for slot in seen}
    stay = replace(previous, reasons=None, cheaper=0)
    if not seen:
        return replace(previous, reasons=None)
    if previous.changes >= MOST_CHANGES:
        return stay
    wished = _wish(seen, want, previous)
    if wished.same_casts(previous):
        return stay
    first = previous.changes == 0
    missed = _missed(seen, {slot: _given_up(need, previous) for slot, need in want.items()}, previous)
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


def widen(previous: Choice, saturated: float) -> Choice:
    """More room above predicted amaxes, where more than a few elements saturated under them since the last look."""
    if saturated <= BEYOND or previous.grain != "tensor" or previous.changes >= MOST_CHANGES:
        return previous
    why = f"{saturated:.2%} of the elements saturated under a predicted scale: margin {previous.margin + WIDER}"
    reasons = {slot: why for slot, format in previous.formats.items() if format.is_fp8}
    return replace(previous, margin=previous.margin + WIDER, reasons=reasons, changes=previous.changes + 1, cheaper=0)


def _wish(seen, want, previous: Choice) -> Choice:
    """The choice as it would be without a past."""
    table = {slot: options(measured, slot[1], want[slot]) for slot, measured in seen.items()}
    for grain in GRAINS:
        if all(grain in row and row[grain].why_not == "" for row in table.values()):
            return _choice(table, grain, previous)
    # No granularity suits all: the one with which most matmuls can stay, "as good as the best" asked only among those.
    strict = {slot: need._replace(within_db=None) for slot, need in want.items()}
    table = {slot: options(measured, slot[1], strict[slot]) for slot, measured in seen.items()}
    found = [_choice(table, grain, previous) for grain in GRAINS if all(grain in row for row in table.values())]
    most = max(len(choice.fp8) for choice in found)
    found = [(choice, _value(table, choice)) for choice in found if len(choice.fp8) == most]
    within = max((need.within_db or 0.0 for need in want.values()), default=0.0) or float("inf")
    best = max(value for _, value in found)
    return next(choice for choice, value in found if value >= best - within)


def _value(table: Mapping[Slot, Mapping[str, Option]], choice: Choice) -> float:
    """In dB, on average over the slots in FP8."""
    values = [
        table[slot][choice.grain].value for slot, format in choice.formats.items() if format.is_fp8 and slot in table
    ]
    return sum(values) / len(values) if values else 0.0


def _choice(table: Mapping[Slot, Mapping[str, Option]], grain: str, previous: Choice) -> Choice:
    """A granularity, each matmul in FP8 whose operands' casts for it are good; slots not seen keep what they have."""
    formats = dict(previous.formats)
    formats |= {slot: row[grain].format for slot, row in table.items()}
    fp8 = set()
    for layer in {layer for layer, _ in formats}:
        for matmul, roles in OPERANDS.items():
            a, b = (formats[layer, role] for role in roles)
            rows = [(role, table[layer, role][grain]) for role in roles if (layer, role) in table]
            if (
                all(option.suits(role, matmul) for role, option in rows)
                and a.is_fp8
                and b.is_fp8
                and not a == b == E5M2
            ):
                fp8.add((layer, matmul))
    used = {(layer, role) for layer, matmul in fp8 for role in OPERANDS[matmul]}
    formats = {slot: format if slot in used else BF16 for slot, format in formats.items()}
    return replace(previous, grain=grain if fp8 else "", formats=formats, fp8=frozenset(fp8))


def _given_up(needs: Needs, previous: Choice) -> Needs:
    """What must be missed before something that is there is given up; the last change is kept for real trouble."""
    if previous.changes == 0:
        return needs
    relaxed = needs.relaxed()
    return relaxed._replace(within_db=None) if previous.changes == MOST_CHANGES - 1 else relaxed


def _missed(seen, want, previous: Choice) -> dict[Slot, str]:
    """Slots that miss these needs under what they have, and which one."""
    missed = {}
    for slot, measured in seen.items():
        (layer, role), format = slot, previous.formats[slot]
        if not format.is_fp8:
            continue
        modest = want[slot]._replace(within_db=None)
        others = options(measured, role, modest).values()
        best = max((option.sqnr_db for option in others if not option.why_not), default=0.0)
        option = _at(measured, role, previous.grain, want[slot], min(best, MOST_DB), format)
        reads = [matmul for matmul, roles in OPERANDS.items() if role in roles and (layer, matmul) in previous.fp8]
        if not all(option.suits(role, matmul) for matmul in reads):
            missed[slot] = option.why_not
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
    for slot in wished.formats:
        if label(slot, wished) == label(slot, previous):
            continue
        if slot in missed:
            reasons[slot] = missed[slot] + _about(seen[slot])
        elif missed:
            reasons[slot] = _because_of_another(slot, wished, previous, missed)
        elif previous.changes == 0 and slot in seen:
            reasons[slot] = "first look: as good as the best, and cheapest" + _about(seen[slot])
        else:
            reasons[slot] = f"right {PATIENCE} times in a row, and cheaper"
    return reasons


def _because_of_another(slot: Slot, wished: Choice, previous: Choice, missed: Mapping[Slot, str]) -> str:
    """Why a slot changes that misses nothing itself: a partner in a matmul that leaves FP8, or one granularity."""
    layer, role = slot
    moved = [m for m, roles in OPERANDS.items() if role in roles and (layer, m) in previous.fp8 - wished.fp8]
    for (other, partner), why in missed.items():
        if matmuls := [m for m in moved if other == layer and partner in OPERANDS[m]]:
            return f"{' and '.join(matmuls)} in 16 bits for the {partner}: {why}"
    (_, partner), why = next(iter(missed.items()))
    return f"one granularity for the operands of a matmul; the {partner}: {why}"


def _about(measured: Measured) -> str:
    """What is unusual about a tensor, if anything: its largest value beside its rms."""
    return f" (amax {measured.crest:.0f}x rms)" if measured.crest >= UNUSUAL else ""
