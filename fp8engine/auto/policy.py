"""Policy on operands: each slot's format and granularity, a pure function of its predicted statistics.

A matmul needs one granularity for both operands, and a tensor that several layers read is cast once: slots that meet
in a matmul or share a tensor are decided together.  For each granularity, cheapest first (tensor, row, block):

    1  every slot takes the FP8 format that suits it best there: SQNR in dB, less one for each percent flushed to zero
    2  it is good enough if in both matmuls each slot meets its consumer's need (SQNR, elements and rows flushed)
    3  objective "accuracy" also wants it within 1 dB of what the slot's best granularity gives

The first that is good enough is taken.  If none is, the matmuls whose two operands meet their needs stay in FP8, at the
granularity where these are most, and the others are computed in 16 bits.

Hysteresis: a slot keeps its cast while it misses its needs by no more than 1 dB, half the allowed share, and 2 dB of
the best; a cheaper one must be good enough four times in a row.  A group changes at most three times; the third change
is final, is made only when a need is missed (SQNR or shares, not the last dB), and takes the safest casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8engine.numerics.formats import BF16, E4M3, E5M2, Format
from fp8engine.numerics.recipe import MOST_DB, Auto
from fp8engine.scaling.choice import GRANULARITIES, OPERANDS, Choice, SlotKey, casts, label, reading, worst
from fp8engine.scaling.prediction import Measured, Prediction

WITHIN_DB = 1.0  # of the best granularity: as good, under objective "accuracy"
SLACK_DB, SLACK_SHARE = 1.0, 1.5  # by which a cast may miss its needs before it is changed
PATIENCE = 4  # samples in a row that have to allow a cheaper cast
MOST_CHANGES = 3
EXACT_DB = 100.0  # of a cast that loses nothing, so that it has a value
UNUSUAL = 32.0  # amax over rms: a normal distribution has 5, at a million elements
WIDER = 2  # powers of two that a margin grows by
BEYOND = 1e-4  # share of elements that may saturate under a predicted scale before its margin grows


class Needs(NamedTuple):
    """Needs of a slot's consumers: at least min_sqnr_db, at most these shares flushed to zero."""

    min_sqnr_db: float
    max_flushed: float
    max_rows_flushed: float
    within_db: float | None  # of the best granularity; None: any that meets the other needs

    def relaxed(self) -> Needs:
        """The same with some slack."""
        within = None if self.within_db is None else self.within_db + SLACK_DB
        return Needs(
            self.min_sqnr_db - SLACK_DB, self.max_flushed * SLACK_SHARE, self.max_rows_flushed * SLACK_SHARE, within
        )


class Option(NamedTuple):
    """One slot under one granularity: its best format, and the worst prediction among the casts to it.

    good: whether each of its casts, along rows and along columns, meets the needs; one of per tensor and of squares.
    value: in dB, of the worst that does.
    """

    format: Format
    sqnr_db: float
    flushed: float
    rows_flushed: float
    value: float
    good: tuple[bool, ...] = ()
    why_not: str = ""  # "": all are

    def suits(self, role: str, matmul: str) -> bool:
        """Whether the cast for this matmul meets the needs."""
        return self.good[min(reading(role, matmul), len(self.good) - 1)]


def needs_of(recipe: Auto, consumers: Sequence[str] = ("matmul",)) -> Needs:
    """The strictest need among the kinds of a tensor's consumers; a kind that the recipe does not name needs 16 bits.

    >>> from fp8engine.numerics.recipe import auto
    >>> needs_of(auto(min_sqnr_db=25)).min_sqnr_db, needs_of(auto(), ("matmul", "norm")).min_sqnr_db
    (25.0, inf)
    """
    named = dict(recipe.min_sqnr_db)
    need = max((named.get(kind, float("inf")) for kind in consumers), default=float("inf"))
    within = WITHIN_DB if recipe.objective == "accuracy" else None
    return Needs(need, recipe.max_flushed, recipe.max_rows_lost, within)


def measured_granularities(measured: Measured) -> tuple[str, ...]:
    """The granularities that were sampled: all, or per tensor alone, which costs a tenth."""
    return GRANULARITIES if measured.tables else GRANULARITIES[:1]


def enough(seen: Mapping[SlotKey, Measured], needs: Mapping[SlotKey, Needs], previous: Choice) -> bool:
    """Whether these statistics suffice for `decide`: those of all granularities, or per tensor where those suffice."""
    return all(measured.tables for measured in seen.values()) or per_tensor(seen, needs, previous)


def per_tensor(seen: Mapping[SlotKey, Measured], needs: Mapping[SlotKey, Needs], previous: Choice) -> bool:
    """Whether statistics per tensor alone suffice for `decide`.

    They do where every slot has a format per tensor that needs nothing better (no granularity gives an FP8 format more
    than MOST_DB), and its present cast is judged alike whatever the other granularities would give.
    """
    if previous.changes >= MOST_CHANGES:
        return True
    if previous.granularity != GRANULARITIES[0] or not all(format.is_fp8 for format in previous.formats.values()):
        return False
    missed = False
    for slot, measured in seen.items():
        role, format, need = slot[1], previous.formats[slot], needs[slot]
        (found,) = options(measured, role, need, GRANULARITIES[:1]).values()
        least = _at(measured, role, GRANULARITIES[0], need, MOST_DB)
        if least.why_not or found.format != least.format:
            return False
        verdicts = {
            _at(measured, role, GRANULARITIES[0], _given_up(need, previous), best, format).why_not == ""
            for best in (min(found.sqnr_db, MOST_DB), MOST_DB)
        }
        if len(verdicts) > 1:
            return False
        missed |= False in verdicts
    return not (missed and previous.changes == MOST_CHANGES - 1)  # the last change needs all granularities


def options(
    measured: Measured, role: str, needs: Needs, granularities: Sequence[str] = GRANULARITIES
) -> dict[str, Option]:
    """For each granularity that was sampled, the best FP8 format, and whether it meets the needs."""
    modest = needs._replace(within_db=None)
    granularities = [granularity for granularity in granularities if granularity in measured_granularities(measured)]
    found = {granularity: _at(measured, role, granularity, modest, 0.0) for granularity in granularities}
    best = max((option.sqnr_db for option in found.values() if not option.why_not), default=0.0)
    return {granularity: _at(measured, role, granularity, needs, min(best, MOST_DB)) for granularity in found}


def _at(
    measured: Measured, role: str, granularity: str, needs: Needs, best_db: float, only: Format | None = None
) -> Option:
    """One granularity's best format, or `only` that one.  best_db: of the best granularity."""
    tried = []
    for format in (only,) if only is not None else (E4M3, E5M2)[: 1 if role == "weight" else 2]:
        each = [measured.predict(cast) for cast in casts(role, granularity, format)]
        why = [misses(prediction, needs, best_db) for prediction in each]
        least = worst(each)
        good = tuple(not reason for reason in why)
        first = next((reason for reason in why if reason), "")
        values = [min(found.sqnr_db, EXACT_DB) - 100.0 * found.flushed for found in each]
        value = min([value for value, fine in zip(values, good, strict=True) if fine] or values)
        tried.append(Option(format, least.sqnr_db, least.flushed, least.rows_flushed, value, good, first))
    return max(tried, key=_score)


def _score(option: Option) -> tuple[int, float]:
    return sum(option.good), option.value


def misses(found: Prediction, needs: Needs, best_db: float = 0.0) -> str:
    """The first need that is missed, in words; "" for none.  best_db: of the best granularity."""
    if found.sqnr_db < needs.min_sqnr_db:
        return f"predicted SQNR {found.sqnr_db:.1f} dB < {needs.min_sqnr_db:g} dB"
    if found.flushed > needs.max_flushed:
        return f"{found.flushed:.1%} of the elements flushed to zero > {needs.max_flushed:.1%}"
    if found.rows_flushed > needs.max_rows_flushed:
        return f"{found.rows_flushed:.1%} of the rows lost > {needs.max_rows_flushed:.1%}"
    if needs.within_db is not None and found.sqnr_db < best_db - needs.within_db:
        return f"predicted SQNR {found.sqnr_db:.1f} dB where {best_db:.1f} dB can be had"
    return ""


def decide(seen: Mapping[SlotKey, Measured], needs: Mapping[SlotKey, Needs] | Needs, previous: Choice) -> Choice:
    """The choice for a group of slots, from their statistics and their previous choice.

    seen: statistics of some or all slots of `previous`; the others keep their formats.  The same arguments give the
    same choice.  Reasons are those of the slots that changed.
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
        last = previous.changes == MOST_CHANGES - 1  # kept for a missed need
        if last or not _is_cheaper(wished, previous):
            return stay
        if previous.cheaper + 1 < PATIENCE:
            return replace(stay, cheaper=previous.cheaper + 1)
    if missed and previous.changes == MOST_CHANGES - 1:
        wished = _safest(seen, want, previous)
    reasons = _reasons(seen, wished, previous, missed)
    return replace(wished, reasons=reasons, cheaper=0, changes=previous.changes + 1)


def widen(previous: Choice, saturated: float) -> Choice:
    """More room above predicted amaxes, where more than a few elements saturated under them since the last sample."""
    if saturated <= BEYOND or previous.granularity != "tensor" or previous.changes >= MOST_CHANGES:
        return previous
    why = f"{saturated:.2%} of the elements saturated under a predicted scale: margin {previous.margin + WIDER}"
    reasons = {slot: why for slot, format in previous.formats.items() if format.is_fp8}
    return replace(previous, margin=previous.margin + WIDER, reasons=reasons, changes=previous.changes + 1, cheaper=0)


def _wish(seen, want, previous: Choice) -> Choice:
    """The choice that the statistics alone would give, without hysteresis."""
    table = {slot: options(measured, slot[1], want[slot]) for slot, measured in seen.items()}
    for granularity in GRANULARITIES:
        if all(granularity in row and row[granularity].why_not == "" for row in table.values()):
            return _choice(table, granularity, previous)
    # No granularity suits all: the one with which most matmuls can stay; only among those the best is asked for.
    strict = {slot: need._replace(within_db=None) for slot, need in want.items()}
    table = {slot: options(measured, slot[1], strict[slot]) for slot, measured in seen.items()}
    found = [
        _choice(table, granularity, previous)
        for granularity in GRANULARITIES
        if all(granularity in row for row in table.values())
    ]
    most = max(len(choice.fp8) for choice in found)
    found = [(choice, _value(table, choice)) for choice in found if len(choice.fp8) == most]
    within = max((need.within_db or 0.0 for need in want.values()), default=0.0) or float("inf")
    best = max(value for _, value in found)
    return next(choice for choice, value in found if value >= best - within)


def _value(table: Mapping[SlotKey, Mapping[str, Option]], choice: Choice) -> float:
    """In dB, on average over the slots in FP8."""
    values = [
        table[slot][choice.granularity].value
        for slot, format in choice.formats.items()
        if format.is_fp8 and slot in table
    ]
    return sum(values) / len(values) if values else 0.0


def _choice(table: Mapping[SlotKey, Mapping[str, Option]], granularity: str, previous: Choice) -> Choice:
    """A granularity, with each matmul in FP8 whose operands' casts are good; slots without statistics keep theirs."""
    formats = dict(previous.formats)
    formats |= {slot: row[granularity].format for slot, row in table.items()}
    fp8 = set()
    for layer in {layer for layer, _ in formats}:
        for matmul, roles in OPERANDS.items():
            a, b = (formats[layer, role] for role in roles)
            rows = [(role, table[layer, role][granularity]) for role in roles if (layer, role) in table]
            if (
                all(option.suits(role, matmul) for role, option in rows)
                and a.is_fp8
                and b.is_fp8
                and not a == b == E5M2
            ):
                fp8.add((layer, matmul))
    used = {(layer, role) for layer, matmul in fp8 for role in OPERANDS[matmul]}
    formats = {slot: format if slot in used else BF16 for slot, format in formats.items()}
    return replace(previous, granularity=granularity if fp8 else "", formats=formats, fp8=frozenset(fp8))


def _given_up(needs: Needs, previous: Choice) -> Needs:
    """The needs that a present cast has to miss before it is changed; the last change is kept for plain failures."""
    if previous.changes == 0:
        return needs
    relaxed = needs.relaxed()
    return relaxed._replace(within_db=None) if previous.changes == MOST_CHANGES - 1 else relaxed


def _missed(seen, want, previous: Choice) -> dict[SlotKey, str]:
    """Slots whose present casts miss these needs, with the first need that each misses."""
    missed = {}
    for slot, measured in seen.items():
        (layer, role), format = slot, previous.formats[slot]
        if not format.is_fp8:
            continue
        modest = want[slot]._replace(within_db=None)
        others = options(measured, role, modest).values()
        best = max((option.sqnr_db for option in others if not option.why_not), default=0.0)
        option = _at(measured, role, previous.granularity, want[slot], min(best, MOST_DB), format)
        reads = [matmul for matmul, roles in OPERANDS.items() if role in roles and (layer, matmul) in previous.fp8]
        if not all(option.suits(role, matmul) for matmul in reads):
            missed[slot] = option.why_not
    return missed


def _is_cheaper(wished: Choice, previous: Choice) -> bool:
    if len(wished.fp8) != len(previous.fp8):
        return len(wished.fp8) > len(previous.fp8)
    order = ("", *reversed(GRANULARITIES))
    return order.index(wished.granularity) > order.index(previous.granularity)


def _safest(seen, want, previous: Choice) -> Choice:
    """The finest granularity; matmuls whose operands miss their needs even there are in 16 bits."""
    table = {slot: options(m, slot[1], want[slot]._replace(within_db=None)) for slot, m in seen.items()}
    return _choice(table, GRANULARITIES[-1], previous)


def _reasons(seen, wished: Choice, previous: Choice, missed: Mapping[SlotKey, str]) -> dict[SlotKey, str]:
    """The reason of each slot that changes."""
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


def _because_of_another(slot: SlotKey, wished: Choice, previous: Choice, missed: Mapping[SlotKey, str]) -> str:
    """Why a slot changes that misses no need itself: its matmul leaves FP8, or the granularity is its partner's."""
    layer, role = slot
    moved = [m for m, roles in OPERANDS.items() if role in roles and (layer, m) in previous.fp8 - wished.fp8]
    for (other, partner), why in missed.items():
        if matmuls := [m for m in moved if other == layer and partner in OPERANDS[m]]:
            return f"{' and '.join(matmuls)} in 16 bits for the {partner}: {why}"
    (_, partner), why = next(iter(missed.items()))
    return f"one granularity for the operands of a matmul; the {partner}: {why}"


def _about(measured: Measured) -> str:
    """A tensor's amax over its rms, in words, where that is unusual."""
    return f" (amax {measured.crest:.0f}x rms)" if measured.crest >= UNUSUAL else ""
