"""Budget of loss: forward matmuls whose casts cost most get finer casts, and then 16 bits, until the sum fits.

The cost of a forward's two casts in nats is predicted at each sample (scaling/reads.py), and all of them are added.
`fe.auto(budget=0.005)` lets the sum be 0.5 % of the loss.  Where it is more, steps are taken in the order of what they
save for what they take:

    a finer granularity    for a group of layers that share an input; takes FINER of the group's FLOPs
    16 bits                for one layer; takes its FLOPs

The prediction is a diagonal approximation, and was 0.09 to 2.7 times the measured cost (docs/auto.md): it ranks the
casts.  How much the sum may be, losses say that are measured (measured.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8engine.auto.policy import price
from fp8engine.scaling.choice import GRANULARITIES, OPERANDS, Casts, Choice
from fp8engine.scaling.reads import OPTIONS, READS, Reads

FINER = 0.1  # of the matmul's time that finer scales are taken to need
FULL, LOW = 0.9, 0.5  # of the budget: filled to the first; everything is decided anew below the second
FORWARD = OPERANDS["forward"]


class Spent(NamedTuple):
    """What measuring found (measured.py).

    rate: the predicted nats that are allowed for each nat of loss.  budget: share of the loss.  loss: in nats, with all
    forwards in 16 bits.  predicted, cost, error, bound: what the casts cost, predicted and measured, the standard error
    of that, and what it is below in nine of ten cases, in nats.  batches, tokens: it was measured on.
    """

    rate: float
    budget: float
    loss: float
    predicted: float
    cost: float
    error: float
    bound: float
    batches: int
    tokens: int

    @property
    def kept(self) -> bool:
        """Whether the budget is."""
        return self.bound <= self.budget * self.loss

    def __str__(self) -> str:
        """As the report prints it.

        >>> print(Spent(0.004, 0.005, 2.5, 0.01, 0.008, 0.001, 0.0095, 8, 4096))
        the budget of 0.5 % of the loss is kept: all forward casts cost 0.32 % +- 0.04 %, below 0.38 % in nine of ten
        cases, on 8 batches, 4,096 tokens; 0.4 % were predicted
        """
        found = (self.cost, self.error, self.bound, self.predicted)
        cost, error, bound, predicted = (f"{100 * each / self.loss:.2g} %" for each in found)
        return (
            f"the budget of {100 * self.budget:g} % of the loss is {'kept' if self.kept else 'not kept'}: all forward "
            f"casts cost {cost} +- {error}, below {bound} in nine of ten cases, on {self.batches} batches, "
            f"{self.tokens:,} tokens; {predicted} were predicted"
        )


def spend(
    choices: Sequence[Choice], seen: Mapping[int, Reads], flops: Mapping[int, float], nats: float
) -> list[Choice]:
    """The choices with `paid` set so that the predicted costs of all layers add up to no more than `nats`.

    flops: of each layer's forward.  Choices that stay are the same objects.
    """
    able = [choice for choice in choices if known(choice, seen)]
    kept = {id(choice): _still_finer(choice) for choice in able}
    total = sum(cost(choice, kept[id(choice)], seen) for choice in able)
    anew = total < LOW * nats and any(kept.values())
    if anew:
        kept = {key: {} for key in kept}
    if anew or total > nats:
        kept = _fill(able, kept, seen, flops, FULL * nats)
    paid = [kept.get(id(choice), choice.paid) for choice in choices]
    return [
        choice if new == choice.paid else replace(choice, paid=new) for choice, new in zip(choices, paid, strict=True)
    ]


def _fill(choices, kept, seen, flops, nats: float):
    """Steps in the order of nats saved for time taken, until the sum is no more than `nats`."""
    total = sum(cost(choice, kept[id(choice)], seen) for choice in choices)
    best_of = lambda choice: max(_steps(choice, kept[id(choice)], seen, flops), default=None)  # noqa: E731
    steps = {id(choice): best_of(choice) for choice in choices}
    while total > nats and (left := [step for step in steps.values() if step]):
        best = max(left)
        kept[id(best.choice)] = best.paid
        steps[id(best.choice)] = best_of(best.choice)
        total -= best.saves
    return kept


@dataclass(frozen=True)
class _Step:
    """What a group's casts become.  saves: nats.  takes: FLOPs.  The better of two steps saves more for each FLOP."""

    choice: Choice
    paid: dict
    saves: float
    takes: float

    def __lt__(self, other: _Step) -> bool:
        return self.saves / self.takes < other.saves / other.takes


def _steps(choice: Choice, paid: dict, seen: Mapping[int, Reads], flops: Mapping[int, float]):
    """Every step that a group can take from where it is."""
    now, used = cost(choice, paid, seen), {**choice.matmuls, **paid}
    in_fp8 = {i: casts for i in choice.layers if (casts := used.get((i, "forward")))}
    place = max(map(price, in_fp8.values()), default=0)
    tried = [
        (paid | {(i, "forward"): _finest(granularity) for i in in_fp8}, FINER * sum(flops[i] for i in in_fp8))
        for granularity in GRANULARITIES[place + 1 :]
    ]
    tried += [(paid | {(i, "forward"): None}, flops[i]) for i in in_fp8]
    for new, takes in tried:
        if (saves := now - cost(choice, new, seen)) > 0:
            yield _Step(choice, new, saves, takes)


def _still_finer(choice: Choice) -> dict:
    """What the budget has paid for, less what statistics alone would now take as fine."""
    base = choice.matmuls
    return {key: casts for key, casts in choice.paid.items() if key in base and price(casts) > price(base[key])}


def _finest(granularity: str) -> Casts:
    """The casts of a forward at a finer granularity: E4M3, which an input then has for all of its layers."""
    e4m3 = next(format for each, format in OPTIONS if each == granularity)
    return Casts(granularity, e4m3, e4m3)


def cost(choice: Choice, paid: Mapping, seen: Mapping[int, Reads]) -> float:
    """Predicted nats of a group's forward casts, where the budget has paid for `paid`."""
    used = {**choice.matmuls, **paid}
    return sum(_cost(seen[i], used.get((i, "forward"))) for i in choice.layers)


def known(choice: Choice, seen: Mapping[int, Reads]) -> bool:
    """Whether the costs of all of a group's layers are known."""
    reads = [READS.index((role, "forward")) for role in FORWARD]
    return all(i in seen and all(map(seen[i].knows_cost, reads)) for i in choice.layers)


def all_costs(choices: Sequence[Choice], seen: Mapping[int, Reads]) -> float:
    """Predicted nats of the forward casts of all groups whose costs are known."""
    return sum(cost(choice, choice.paid, seen) for choice in choices if known(choice, seen))


def cost_of(seen: Reads, casts: Casts | None, role: str) -> float:
    """Nats that the cast of one operand of a forward costs; 0 in 16 bits."""
    return 0.0 if casts is None else seen.cost(READS.index((role, "forward")), casts.option(FORWARD.index(role)))


def _cost(seen: Reads, casts: Casts | None) -> float:
    return sum(cost_of(seen, casts, role) for role in FORWARD)
