"""fp8engine/auto/budget.py: what the casts may cost the loss, and which of them give way, in which order."""

from dataclasses import replace

import numpy
import pytest

from fp8engine.auto.budget import FINER, FULL, LOW, cost, cost_of, spend
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.numerics.recipe import auto
from fp8engine.scaling.choice import GRANULARITIES, Casts, Choice, begin, recipe_of
from fp8engine.scaling.reads import COST, OPTIONS, SHAPE, Reads

TENSOR, ROW, BLOCK = (Casts(granularity, E4M3, E4M3) for granularity in GRANULARITIES)


def reads(*nats: float) -> Reads:
    """A forward that costs so many nats per tensor, per row and in blocks, in all; E5M2 four times that."""
    table = numpy.full(SHAPE, 30.0)
    table[..., COST] = numpy.nan
    for place, (granularity, format) in enumerate(OPTIONS):
        cost = nats[GRANULARITIES.index(granularity)] * (1 if format == E4M3 else 4)
        table[0, place, COST], table[1, place, COST] = 0.75 * cost, 0.25 * cost
    return Reads(table)


def alone(*layers: int) -> list[Choice]:
    return [begin([i], auto()) for i in layers]


def predicted(choice: Choice, layer: int, seen: Reads) -> float:
    """Of one layer of a group."""
    return cost(replace(choice, layers=(layer,)), {layer: seen})


def total(choices: list[Choice], seen: dict[int, Reads]) -> float:
    return sum(predicted(choice, i, seen[i]) for choice in choices for i in choice.layers)


def forwards(choices: list[Choice]) -> list[Casts | None]:
    """The forward's casts of each layer, None for 16 bits."""
    return [choice.used.get((i, "forward")) for choice in choices for i in choice.layers]


def after(nats: float, *costs: tuple[float, ...] | float, start: list[Choice] | None = None, flops=()) -> list[Choice]:
    """What `spend` makes of layers that cost so much per tensor, per row and in blocks; one number: for each."""
    seen = {i: reads(*(each if isinstance(each, tuple) else 3 * (each,))) for i, each in enumerate(costs)}
    return spend(start or alone(*seen), seen, dict(enumerate(flops)) or dict.fromkeys(seen, 1.0), nats)


def many(seed: int) -> tuple[list[Choice], dict[int, Reads], dict[int, float]]:
    """Twelve layers, some of which share their input, with random costs and sizes."""
    random = numpy.random.default_rng(seed)
    groups = [(0, 1, 2), (3,), (4, 5), (6,), (7,), (8, 9, 10), (11,)]
    choices = [begin(group, auto()) for group in groups]
    costs = {i: 10 ** random.uniform(-6, -2) * numpy.cumprod([1, *random.uniform(0.2, 1.2, 2)]) for i in range(12)}
    return choices, {i: reads(*cost) for i, cost in costs.items()}, {i: 10 ** random.uniform(5, 8) for i in range(12)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 1e-3, 1e-9])
def test_the_sum_stays_under_the_budget_and_one_that_does_changes_nothing(seed: int, share: float):
    choices, seen, flops = many(seed)
    nats = share * total(choices, seen)
    found = spend(choices, seen, flops, nats)
    assert found == spend(choices, seen, flops, nats)
    assert total(found, seen) <= nats
    for old, new in zip(choices, found, strict=True):
        assert new.matmuls == old.matmuls  # the policy's casts are what they were
        assert set(new.paid) <= {(i, "forward") for i in old.layers}
        assert len({casts.first for casts in forwards([new]) if casts}) <= 1  # the input is cast once
        for i in new.layers:
            assert recipe_of(auto(), new, i).operands("dgrad") == recipe_of(auto(), old, i).operands("dgrad")
    assert all(old is new for old, new in zip(choices, found, strict=True) if not new.paid)
    assert all(a is b for a, b in zip(spend(choices, seen, flops, 1.01 * nats / share), choices, strict=True))


def test_what_costs_most_for_its_flops_goes_first():
    costs = (4e-3, 2e-3, 1e-3)
    assert forwards(after(6e-3, *costs, flops=(16.0, 2.0, 2.0))) == [TENSOR, None, TENSOR]
    assert forwards(after(6e-3, *costs, flops=(1.0, 2.0, 2.0))) == [None, TENSOR, TENSOR]


def test_finer_casts_come_before_16_bits():
    # Rows save 60 % for a tenth of the time; 16 bits all, for ten times that.  Blocks where rows are not enough.
    found = [forwards(after(nats, (1e-3, 4e-4, 2e-4))) for nats in (9e-4, 3e-4, 1e-4)]
    # Blocks save more for the same FINER: one step leads to them.
    assert found == [[BLOCK], [BLOCK], [None]]
    assert forwards(after(9e-4, (1e-3, 4e-4, 8e-4))) == [ROW]
    assert forwards(after(9.9e-4, (1e-3, 0.95e-3, 0.95e-3))) == [None], "saves less than a tenth"
    assert FINER < 1


def test_a_group_gets_finer_casts_together_and_16_bits_one_by_one():
    group = [begin([0, 1], auto())]
    assert forwards(after(5e-4, (1e-3, 1e-4, 1e-4), 1e-5, start=group)) == [ROW, ROW]
    assert forwards(after(5e-4, 1e-3, 1e-5, start=group)) == [None, TENSOR]


def test_e5m2_gives_way_to_e4m3():
    start = alone(0)[0]
    start = replace(start, matmuls={**start.matmuls, (0, "forward"): Casts("tensor", E5M2, E4M3)})
    seen = {0: reads(1e-3, 5e-4, 5e-4)}
    assert predicted(start, 0, seen[0]) == pytest.approx(4 * 0.75e-3 + 0.25e-3)
    found = spend([start], seen, {0: 1.0}, 1e-3)[0]
    assert (*forwards([found]), predicted(found, 0, seen[0])) == (ROW, pytest.approx(5e-4))
    assert cost_of(seen[0], None, "input") == 0


def test_what_is_paid_stays_until_the_sum_is_below_half_of_the_budget():
    assert (FULL, LOW) == (0.9, 0.5)
    first = after(5e-4, 8e-4, 3e-4)
    assert forwards(first) == [None, TENSOR]
    for factor in (1.1, 0.9, 1.05, 0.95):
        wobbled = after(5e-4, 8e-4 * factor, 3e-4 * factor, start=first)
        assert all(a is b for a, b in zip(wobbled, first, strict=True)), factor
    # The sum is below the budget without what was paid for, but not below half of it with: it stays.
    assert forwards(after(5e-4, 1e-4, 3e-4, start=first)) == [None, TENSOR]
    # Less: 3.3e-4 of layer 0 would fit beside 1.4e-4, but for the tenth that is kept free.
    assert forwards(after(5e-4, 3.3e-4, 1.4e-4, start=first)) == [None, TENSOR]
    back = after(5e-4, 2.7e-4, 1e-4, start=first)
    assert forwards(back) == [TENSOR, TENSOR]
    assert not any(choice.paid for choice in back)
    # More is taken where the cost grows, and what was paid stays.
    second = after(5e-4, 8e-4, (2e-3, 2e-4, 2e-4), start=first)
    assert forwards(second) == [None, ROW]
    assert second[0] is first[0]


@pytest.mark.parametrize("base", [BLOCK, None], ids=str)
@pytest.mark.parametrize("nats", [1e-3, 1e-6], ids=["much", "little"])
def test_statistics_that_ask_for_more_than_was_paid_for_win(base: Casts | None, nats: float):
    start = alone(0)[0]
    matmuls = {key: casts for key, casts in start.matmuls.items() if key != (0, "forward")}
    start = replace(start, paid={(0, "forward"): ROW}, matmuls=matmuls | ({(0, "forward"): base} if base else {}))
    assert forwards(after(nats, (1e-3, 6e-4, 6e-4), start=[start])) == [base if nats == 1e-3 else None]


def test_layers_without_a_known_cost_are_left_alone():
    unknown = Reads(numpy.where(numpy.arange(5) == COST, numpy.nan, numpy.full(SHAPE, 30.0)))
    choices = [begin([0, 1], auto()), *alone(2), *alone(3)]
    seen = {0: reads(1.0, 1.0, 1.0), 1: unknown, 2: reads(1e-3, 1e-4, 1e-4)}
    found = spend(choices, seen, dict.fromkeys(range(4), 1.0), 5e-4)
    assert [found[i] is choices[i] for i in range(3)] == [True, False, True]
    assert forwards(found[1:2]) == [ROW]
    assert spend(choices, {}, {}, 0.0) == choices


@pytest.mark.parametrize("start", [TENSOR, ROW, BLOCK], ids=str)
@pytest.mark.parametrize("nats", [0.0, 1e-12])
def test_a_budget_of_nothing_leaves_nothing_in_fp8(start: Casts, nats: float):
    choice = alone(0)[0]
    choice = replace(choice, matmuls={**choice.matmuls, (0, "forward"): start})
    (found,) = after(nats, (1e-3, 5e-4, 2e-4), start=[choice])
    assert forwards([found]) == [None]
    assert found.matmuls[0, "forward"] == start
    assert not recipe_of(auto(), found, 0).operands("forward")[0].is_fp8
