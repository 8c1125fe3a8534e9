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
from dataclasses import replace
from typing import NamedTuple

from fp8engine.auto.policy import price
from fp8engine.numerics.formats import E4M3
from fp8engine.scaling.choice import GRANULARITIES, OPERANDS, Casts, Choice
from fp8engine.scaling.reads import READS, Reads

FINER = 0.1  # of the matmul's time that finer scales are taken to need
FULL, LOW = 0.9, 0.5  # of the budget: filled to the first; everything is decided anew below the second


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
    able = {i: choice for i, choice in enumerate(choices) if known(choice, seen)}
    new = {i: replace(choice, paid=_still_finer(choice)) for i, choice in able.items()}
    total = sum(cost(choice, seen) for choice in new.values())
    if total < LOW * nats and any(choice.paid for choice in new.values()):
        new = _fill({i: replace(choice, paid={}) for i, choice in able.items()}, seen, flops, FULL * nats)
    elif total > nats:
        new = _fill(new, seen, flops, FULL * nats)
    return [new[i] if i in new and new[i].paid != choice.paid else choice for i, choice in enumerate(choices)]


class _Step(NamedTuple):
    """What a group becomes.  worth: nats saved for each FLOP that it takes.  saves: nats."""

    worth: float
    saves: float
    choice: Choice


def _fill(
    choices: Mapping[int, Choice], seen: Mapping[int, Reads], flops: Mapping[int, float], nats: float
) -> dict[int, Choice]:
    """Steps in the order of nats saved for time taken, until the sum is no more than `nats`."""
    found = dict(choices)
    total = sum(cost(choice, seen) for choice in found.values())
    steps = {i: _best_step(choice, seen, flops) for i, choice in found.items()}
    while total > nats and (left := {i: step for i, step in steps.items() if step}):
        i, best = max(left.items(), key=lambda step: step[1].worth)
        found[i] = best.choice
        steps[i] = _best_step(best.choice, seen, flops)
        total -= best.saves
    return found


def _best_step(choice: Choice, seen: Mapping[int, Reads], flops: Mapping[int, float]) -> _Step | None:
    """The best step that a group can take from where it is; None where none saves anything.

    Finer casts are to E4M3, which an input then has for all of its layers.
    """
    now, used, forwards = cost(choice, seen), choice.used, forwards_in_fp8(choice)
    place = max((price(used[key]) for key in forwards), default=0)
    takes = FINER * sum(flops[i] for i, _ in forwards)
    tried: list[tuple[Mapping[tuple[int, str], Casts | None], float]] = [
        (dict.fromkeys(forwards, Casts(granularity, E4M3, E4M3)), takes) for granularity in GRANULARITIES[place + 1 :]
    ]
    tried += [({key: None}, flops[key[0]]) for key in forwards]
    steps = []
    for paid, takes in tried:
        new = replace(choice, paid={**choice.paid, **paid})
        if (saves := now - cost(new, seen)) > 0:
            steps.append(_Step(saves / takes, saves, new))
    return max(steps, key=lambda step: step.worth, default=None)


def _still_finer(choice: Choice) -> dict:
    """What the budget has paid for, less what statistics alone would now take as fine."""
    base = choice.matmuls
    return {key: casts for key, casts in choice.paid.items() if key in base and price(casts) > price(base[key])}


def forwards_in_fp8(choice: Choice) -> list[tuple[int, str]]:
    """The forward matmuls of a choice that are in FP8."""
    return [(i, "forward") for i in choice.layers if (i, "forward") in choice.used]


def cost(choice: Choice, seen: Mapping[int, Reads]) -> float:
    """Predicted nats of a group's forward casts."""
    used = choice.used
    return sum(
        sum(cost_of(seen[i], used.get((i, "forward")), role) for role in OPERANDS["forward"]) for i in choice.layers
    )


def known(choice: Choice, seen: Mapping[int, Reads]) -> bool:
    """Whether the costs of all of a group's layers are known."""
    reads = [READS.index((role, "forward")) for role in OPERANDS["forward"]]
    return all(i in seen and all(map(seen[i].knows_cost, reads)) for i in choice.layers)


def all_costs(choices: Sequence[Choice], seen: Mapping[int, Reads]) -> float:
    """Predicted nats of the forward casts of all groups whose costs are known."""
    return sum(cost(choice, seen) for choice in choices if known(choice, seen))


def cost_of(seen: Reads, casts: Casts | None, role: str) -> float:
    """Nats that the cast of one operand of a forward costs; 0 in 16 bits."""
    read, operand = READS.index((role, "forward")), OPERANDS["forward"].index(role)
    return 0.0 if casts is None else seen.cost(read, casts.option(operand))
