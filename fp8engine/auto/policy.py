"""Policy on operands: granularity and formats of each matmul, a pure function of how its two reads are predicted.

What is judged is the result of the matmul (scaling/reads.py): the SQNR that the cast of an operand leaves in all of
the result, in its median row and in its 10th percentile.  A read is worth the least of the three, as it is remembered:
noise that a sample showed fades by 3 dB with each later one, so that trouble which comes and goes is not forgotten.

    1  for each granularity, cheapest first (tensor, row, block), both operands take their best format, E4M3 or E5M2
    2  it is good enough if each read meets its need, and, for objective "accuracy", is within 1 dB of its best option
    3  the first that is good enough is taken; if none is, the one with which most layers meet their needs, and the
       others' matmul is computed in 16 bits

Layers that read one tensor (q, k, v) share the casts of it: their forwards are decided together, and their wgrads.

Hysteresis: a cast stays while its reads miss their needs by no more than 1 dB.  A missed need is acted on at once.  A
cheaper cast has to be good enough in PATIENCE samples in a row, and is paid for from a budget of CHANGES that refills
by one in REFILL samples; what is cheap to take back, a change to a safer cast, counts a quarter of that and is never
refused.  Where a cheaper cast has to be taken back, the group remembers twice as long from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fp8engine.numerics.formats import E5M2
from fp8engine.numerics.recipe import MATMULS, MOST_DB, ROLES, Auto
from fp8engine.scaling.choice import FINAL, GRANULARITIES, OPERANDS, Casts, Choice, SlotKey, label
from fp8engine.scaling.reads import FADES_DB, OPTIONS, READS, Reads

WITHIN_DB = 1.0  # of the best option: as good, under objective "accuracy"
SLACK_DB = 1.0  # by which a cast may miss its needs before it is changed
PATIENCE = 4  # samples in a row that have to allow a cheaper cast
CHANGES, REFILL, SAFER = 4.0, 16, 0.25  # the budget of changes; samples until one more; what a safer cast counts
WIDER, WIDEST = 2, 4  # powers of two that a margin grows by, and to
PAID = 0.5  # of the budget: a cheaper cast was paid for not long ago
RECOVERS = 2.0 ** (1 / 64)  # by which a group forgets faster again, with each sample
BEYOND = 1e-4  # share of elements that may saturate under a predicted scale before its margin grows
HARMLESS = 1e-5  # of the loss: a cast that costs no more needs nothing better, under objective "speed"


class Needs(NamedTuple):
    """Needs of a matmul.  within_db: of the best option; None: any that has min_sqnr_db.

    harmless: nats of loss that a read may cost whatever its SQNR is.
    """

    min_sqnr_db: float
    within_db: float | None
    harmless: float = 0.0

    def relaxed(self) -> Needs:
        """The same with some slack."""
        within = None if self.within_db is None else self.within_db + SLACK_DB
        return self._replace(min_sqnr_db=self.min_sqnr_db - SLACK_DB, within_db=within)


def needs_of(recipe: Auto, consumers: Sequence[str] = ("matmul",), loss: float = 0.0) -> Needs:
    """The strictest need among the kinds of a tensor's consumers; a kind that the recipe does not name needs 16 bits.

    >>> from fp8engine.numerics.recipe import auto
    >>> needs_of(auto(min_sqnr_db=25)).min_sqnr_db, needs_of(auto(), ("matmul", "norm")).min_sqnr_db
    (25.0, inf)
    """
    named = dict(recipe.min_sqnr_db)
    need = max((named.get(kind, float("inf")) for kind in consumers), default=float("inf"))
    if recipe.objective == "accuracy":
        return Needs(need, WITHIN_DB)
    return Needs(need, None, HARMLESS * loss)


def price(casts: Casts | None) -> int:
    """The place of a matmul's granularity among all, cheapest first; that of 16 bits, which is None, is the last."""
    return GRANULARITIES.index(casts.granularity) if casts else len(GRANULARITIES)


class Unit(NamedTuple):
    """Layers whose `matmul` is decided together, with what is remembered of them and what they need."""

    matmul: str
    seen: Mapping[int, Reads]
    needs: Mapping[int, Needs]

    @property
    def reads(self) -> tuple[int, int]:
        """Places of its two operands among READS."""
        first, second = (READS.index((role, self.matmul)) for role in OPERANDS[self.matmul])
        return first, second

    def value(self, layer: int, operand: int, option: int) -> float:
        """In dB, of an operand under an option."""
        return self.seen[layer].value(self.reads[operand], option)

    def worst(self, layer: int, casts: Casts) -> float:
        """In dB, of the operand whose cast is the worse one."""
        return min(self.value(layer, operand, casts.option(operand)) for operand in (0, 1))

    def missed(self, layer: int, casts: Casts, slack: bool = False) -> tuple[int, str] | None:
        """(operand, why) of the first need that a layer's casts miss; None for none."""
        need = self.needs[layer].relaxed() if slack else self.needs[layer]
        for operand, read in enumerate(self.reads):
            seen, option = self.seen[layer], casts.option(operand)
            if need.harmless and seen.knows_cost(read) and seen.cost(read, option) <= need.harmless:
                continue
            value, where = seen.value(read, option), f"{self.matmul}, {seen.which(read, option)}"
            cost = f", cost {1e3 * seen.cost(read, option):.2g} millinats" if seen.knows_cost(read) else ""
            if value < need.min_sqnr_db:
                return operand, f"{where}: predicted SQNR {value:.1f} dB < {need.min_sqnr_db:g} dB{cost}"
            best = max(seen.value(read, each) for each in range(len(OPTIONS)))
            if need.within_db is not None and value < min(best, MOST_DB) - need.within_db:
                return operand, f"{where}: predicted SQNR {value:.1f} dB where {best:.1f} dB can be had{cost}"
        return None

    def at(self, granularity: str) -> dict[int, Casts]:
        """Each layer's best casts at a granularity; an input has one format for all of them."""
        options = [option for option, (each, _) in enumerate(OPTIONS) if each == granularity]
        tried = [pair for pair in itertools.product(options, repeat=2) if {OPTIONS[each][1] for each in pair} != {E5M2}]
        if "input" in OPERANDS[self.matmul]:
            shared = OPERANDS[self.matmul].index("input")
            common = max(options, key=lambda option: min(self.value(i, shared, option) for i in self.seen))
            tried = [pair for pair in tried if pair[shared] == common]
        pairs = {}
        for i in self.seen:
            first, second = max(tried, key=lambda pair: sorted(self.value(i, k, each) for k, each in enumerate(pair)))
            pairs[i] = Casts(granularity, OPTIONS[first][1], OPTIONS[second][1])
        return pairs

    def wish(self) -> dict[int, Casts | None]:
        """The casts that the statistics alone would give, without hysteresis; None for 16 bits."""
        found = {granularity: self.at(granularity) for granularity in GRANULARITIES}
        for pairs in found.values():
            if not any(self.missed(i, casts) for i, casts in pairs.items()):
                return dict(pairs)
        # None suits all: the granularity with which most layers meet their needs; among those the best, within 1 dB.
        modest = self._replace(needs={i: need._replace(within_db=None) for i, need in self.needs.items()})
        good = [{i: casts for i, casts in each.items() if not modest.missed(i, casts)} for each in found.values()]
        good = [each for each in good if len(each) == max(map(len, good))]
        values = [sum(self.worst(i, casts) for i, casts in each.items()) / max(len(each), 1) for each in good]
        within = max((need.within_db or float("inf") for need in self.needs.values()), default=0.0)
        taken = next(each for each, value in zip(good, values, strict=True) if value >= max(values) - within)
        return {i: taken.get(i) for i in self.seen}


def units(seen: Mapping[int, Reads], needs: Mapping[int, Needs]) -> Iterable[Unit]:
    """A group's matmuls that were sampled."""
    for matmul in MATMULS:
        unit = Unit(matmul, seen, needs)
        sampled = {i: each for i, each in seen.items() if all(each.seen(read) for read in unit.reads)}
        if matmul == "dgrad":
            yield from (Unit(matmul, {i: each}, needs) for i, each in sampled.items())
        elif sampled:
            yield Unit(matmul, sampled, {i: needs[i] for i in sampled})


def decide(seen: Mapping[int, Reads], needs: Mapping[int, Needs], previous: Choice) -> Choice:
    """The choice for a group of layers, from what is remembered of them and their previous choice.

    seen: of some or all layers of `previous`; the others keep their casts.  The same arguments give the same choice.
    Reasons are those of the slots that changed.  A choice of `in_16_bits` stays.
    """
    if previous.changes >= FINAL:
        return replace(previous, reasons=None)
    matmuls, missed, cheaper = dict(previous.matmuls), {}, {}
    fades_db = min(previous.fades_db * RECOVERS, FADES_DB)
    spent = max(previous.spent - 1 / REFILL, 0.0)
    for unit in units(seen, needs):
        now = {i: previous.matmuls.get((i, unit.matmul)) for i in unit.seen}
        wish = unit.wish()
        if wish == now:
            continue
        slack = previous.changes > 0
        bad = {i: why for i, casts in now.items() if casts and (why := unit.missed(i, casts, slack))}
        if previous.changes and not bad:
            key = min(unit.seen), unit.matmul
            if sum(map(price, wish.values())) >= sum(map(price, now.values())):
                continue
            cheaper[key] = previous.cheaper.get(key, 0) + 1
            if cheaper[key] < PATIENCE or spent + 1 > CHANGES:
                continue
            spent += 1
        elif previous.changes:
            fades_db = max(fades_db / 2, FADES_DB / 16) if previous.spent > PAID else fades_db
            spent += SAFER
        missed |= {(i, unit.matmul): (OPERANDS[unit.matmul][operand], why) for i, (operand, why) in bad.items()}
        for i, casts in wish.items():
            matmuls.pop((i, unit.matmul), None)
            if casts:
                matmuls[i, unit.matmul] = casts
    new = replace(previous, matmuls=matmuls, reasons=None, spent=spent, fades_db=fades_db, cheaper=cheaper)
    if new.same_casts(previous):
        return new
    return replace(new, reasons=reasons(new, previous, missed), changes=previous.changes + 1)


def widen(previous: Choice, saturated: float) -> Choice:
    """More room above predicted amaxes, where more than a few elements saturated under them since the last sample."""
    if saturated <= BEYOND or previous.margin >= WIDEST:
        return previous
    by_tensor = {i for (i, _), casts in previous.used.items() if casts.granularity == "tensor"}
    why = f"{saturated:.2%} of the elements saturated under a predicted scale: margin {previous.margin + WIDER}"
    slots = [(i, role) for i in sorted(by_tensor) for role in ROLES]
    new = replace(previous, margin=previous.margin + WIDER, changes=previous.changes + 1)
    changed = {slot: why for slot in slots if label(slot, new) != label(slot, previous)}
    return replace(new, reasons=changed) if changed else previous


def reasons(new: Choice, old: Choice, missed: Mapping[tuple[int, str], tuple[str, str]]) -> dict[SlotKey, str]:
    """The reason of each slot that changes.  missed: by (layer, matmul), the operand whose need is missed, and why."""
    found = {}
    for slot in ((i, role) for i in new.layers for role in ROLES):
        if label(slot, new) == label(slot, old):
            continue
        (layer, role), before, after = slot, old.casts(slot), new.casts(slot)
        changed = [matmul for matmul in MATMULS if before.get(matmul) != after.get(matmul)]
        mine = [missed[layer, m] for m in changed if (layer, m) in missed]
        others = [each for (_, matmul), each in missed.items() if matmul in changed]
        if own := [why for partner, why in mine if partner == role]:
            found[slot] = own[0]
        elif mine:
            found[slot] = f"one granularity for the operands of a matmul; the {mine[0][0]}: {mine[0][1]}"
        elif others:
            found[slot] = f"a layer that reads the same input; its {others[0][0]}: {others[0][1]}"
        elif old.changes == 0:
            found[slot] = "first sample: as good as the best, and cheapest"
        else:
            found[slot] = "good enough in the latest samples, and cheaper"
    return found
