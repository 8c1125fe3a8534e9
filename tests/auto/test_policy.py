"""fp8engine/auto/policy.py: which casts planted trouble leads to, how seldom they change, and that any are legal.

Tensors of helpers/planted.py, and tables of made numbers.  What E4M3 holds per tensor: normal values down to 2^-15 of
amax, half of the smallest subnormal at 2^-18.8 of it, below which all is flushed; E5M2: 2^-32.8.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import channels, deaf, looks, rows

from fp8engine.auto import outputs, policy
from fp8engine.auto.policy import CHANGES, PATIENCE, REFILL, Needs, needs_of, widen
from fp8engine.errors import InvalidRecipe, UnknownName
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.numerics.recipe import CONSUMERS, MATMULS, ROLES, auto
from fp8engine.scaling.choice import FINAL, GRANULARITIES, OPERANDS, Casts, Choice, begin, in_16_bits, label, recipe_of
from fp8engine.scaling.reads import COST, FADES_DB, OPTIONS, READS, SHAPE, Reads

AUTO = auto()
NEEDS = needs_of(AUTO)
START = begin([0], AUTO)
TENSOR, ROW, BLOCK = (Casts(granularity, E4M3, E4M3) for granularity in GRANULARITIES)
WIDE = Casts("tensor", E5M2, E4M3)


def decide(seen: dict[int, Reads], needs: Needs, previous: Choice) -> Choice:
    """The policy's decision for layers with the same needs."""
    return policy.decide(seen, dict.fromkeys(seen, needs), previous)


def after(choice: Choice, *samples: Reads) -> Choice:
    """The choice for one layer after these samples of it."""
    for seen in samples:
        choice = decide({0: seen}, NEEDS, choice)
    return choice


def made(cost: float = math.nan, **values: Sequence[float]) -> Reads:
    """Reads of 31 dB in E4M3 and 25 in E5M2, but for those named role_matmul, given in the order of OPTIONS."""
    table = numpy.zeros(SHAPE)
    table[..., :3] = numpy.array([31.0 if format == E4M3 else 25.0 for _, format in OPTIONS])[:, None]
    table[..., COST] = math.nan
    table[:2, :, COST] = cost
    for name, found in values.items():
        role, _, matmul = name.rpartition("_")
        table[READS.index((role, matmul)), :, :3] = numpy.array(found)[:, None]
    return Reads(table)


GOOD = made()
NOT_TENSOR = made(input_forward=[10, 31, 31, 20, 25])  # a forward whose input needs rows
PATIENTLY = [GOOD] * PATIENCE  # as many samples as a cheaper cast needs
SETTLED = after(START, GOOD)


def forward(seen: Reads | list[float], needs: Needs = NEEDS, start: Choice = START) -> Casts | None:
    """The forward's casts after a sample; a list: dB of its input.  None for 16 bits."""
    seen = made(input_forward=seen) if isinstance(seen, list) else seen
    return decide({0: seen}, needs, start).matmuls.get((0, "forward"))


def test_the_premise_of_what_follows():
    assert SETTLED.matmuls == {(0, matmul): TENSOR for matmul in MATMULS}
    assert SETTLED.changes == 1  # the gradient's E5M2 became E4M3


@pytest.mark.parametrize(
    ("name", "tensors", "want"),
    [
        ("normal", {}, {"forward": TENSOR, "dgrad": TENSOR, "wgrad": TENSOR}),
        # amax is 3300 times the ordinary rms: those are rounded as all normal values are.
        ("deaf x1000", {"input": channels(1e3), "weight": deaf(1e3)}, {"forward": TENSOR, "wgrad": TENSOR}),
        # 14 % flushed; a quarter of that in blocks, which the other three quarters do not notice.  dw's rows are those
        # of one channel each, and columns of x have scales of their own.
        ("deaf x30000", {"input": channels(3e4), "weight": deaf(3e4)}, {"forward": BLOCK, "wgrad": ROW}),
        # In its block all is flushed, a quarter of the tensor: only E5M2 reaches so far.
        ("deaf x1e6", {"input": channels(1e6), "weight": deaf(1e6)}, {"forward": WIDE, "wgrad": ROW}),
        # The channel is the result: rounded alone it has 28 dB, as each row's largest it is exact.
        ("channel x1000", {"input": channels(1e3)}, {"forward": ROW, "wgrad": TENSOR}),
        # A scale per tensor loses most tokens' results, one per row none; dw sums over tokens, of which the largest are
        # what there is.
        ("rows of x", {"input": rows(12)}, {"forward": ROW, "dgrad": TENSOR}),
        ("rows of dy", {"grad_output": rows(12, 128, 256)}, {"forward": TENSOR, "dgrad": ROW}),
        # Rows of w are features of y: lost for the forward; for dx the large ones count.
        ("rows of w", {"weight": rows(12, 256, 512)}, {"forward": ROW, "wgrad": TENSOR}),
    ],
)
def test_what_planted_trouble_leads_to(name: str, tensors: dict, want: dict):
    found = decide(looks(**tensors), NEEDS, START)
    assert {matmul: found.matmuls.get((0, matmul)) for matmul in want} == want, name
    changed = {(0, role) for role in ROLES if label((0, role), found) != label((0, role), START)}
    assert set(found.reasons or {}) == changed
    assert found.changes == 1


def test_two_operands_that_both_need_e5m2_are_multiplied_in_16_bits():
    both = [0, 5, 5, 25.5, 25]
    found = after(START, made(input_forward=both, weight_forward=both))
    assert found.matmuls == {(0, "dgrad"): TENSOR, (0, "wgrad"): TENSOR}
    assert label((0, "input"), found) == "E4M3/tensor (forward BF16)"
    assert forward(both) == WIDE


def test_where_nothing_is_good_enough_the_best_is_within_one_db():
    # Needs of 22 dB are met by all, the best of 31.6 by none at one granularity for both operands.
    assert forward(made(input_forward=[31, 28, 28, 25, 25], weight_forward=[26.5, 31, 31, 25, 25])) == ROW
    # Within 1 dB of rows' 27.5:
    assert forward(made(input_forward=[31, 27.5, 27.5, 25, 25], weight_forward=[27, 31, 31, 25, 25])) == TENSOR


def test_reasons_name_the_read_the_percentile_the_numbers_and_the_cost():
    seen = made(cost=4e-5, input_forward=[12.34, 31.2, 31, 20, 25])
    seen.table[0, 0, :3] = 31.0, 20.0, 12.34
    found = after(START, seen)
    why = "forward, the rows' 10th percentile: predicted SQNR 12.3 dB < 22 dB, cost 0.04 millinats"
    assert found.reasons == {
        (0, "input"): why,
        (0, "weight"): f"one granularity for the operands of a matmul; the input: {why}",
        # The recipe's own E5M2 of the gradient, where E4M3 has more.
        (0, "grad_output"): "dgrad, the whole result: predicted SQNR 25.0 dB where 31.0 dB can be had",
    }
    cheaper = dict.fromkeys([(0, "input"), (0, "weight")], "good enough in the latest samples, and cheaper")
    assert after(found, *PATIENTLY).reasons == cheaper


def test_layers_that_read_one_tensor_share_its_casts_and_name_whose_need_it_was():
    # q needs rows for its forward, k none: their common input is cast once; their dgrads are their own.
    q = made(input_forward=[10, 31, 31, 20, 25], grad_output_dgrad=[10, 31, 31, 20, 25])
    k = made(input_wgrad=[10, 20, 31, 9, 9])
    found = decide({0: q, 1: k}, NEEDS, begin([0, 1], AUTO))
    assert [found.matmuls[i, "forward"] for i in (0, 1)] == [ROW, ROW]
    assert [found.matmuls[i, "wgrad"] for i in (0, 1)] == [BLOCK, BLOCK]
    assert [found.matmuls[i, "dgrad"] for i in (0, 1)] == [ROW, TENSOR]
    first, second = (recipe_of(AUTO, found, i) for i in (0, 1))
    assert (first.input, first.input_for_wgrad) == (second.input, second.input_for_wgrad)
    why: Any = found.reasons
    assert why[1, "weight"].startswith("a layer that reads the same input; its input: forward, ")


@pytest.mark.parametrize("matmul", MATMULS)
def test_what_was_not_sampled_keeps_its_casts(matmul: str):
    seen = made(math.nan, **{f"{role}_{matmul}": [math.nan] * 5 for role in OPERANDS[matmul][:1]})
    assert after(START, seen).matmuls[0, matmul] == START.matmuls[0, matmul]
    assert decide({}, NEEDS, START).same_casts(START)
    two = decide({0: GOOD}, NEEDS, begin([0, 1], AUTO))
    assert {key[1]: casts for key, casts in two.matmuls.items() if key[0] == 1} == {
        each: casts for (_, each), casts in START.matmuls.items()
    }


def test_more_than_normal_values_can_have_is_not_asked_for():
    assert forward([31, 60, 60, 25, 50]) == TENSOR
    assert forward([30.5, 60, 60, 25, 50]) == ROW


def test_a_cast_stays_while_it_misses_by_no_more_than_a_db():
    # Rows have 31: to begin with 30 are asked of a scale per tensor, and of one that is there 29; of a need, too.
    speed = needs_of(auto(objective="speed"))
    for needs, db in ((NEEDS, 29.0), (speed, 21.0)):
        assert forward([db + 0.1, 31, 31, 20, 25], needs, START) == ROW
        assert forward([db + 0.1, 31, 31, 20, 25], needs, SETTLED) == TENSOR
        assert forward([db - 0.1, 31, 31, 20, 25], needs, SETTLED) == ROW


def test_noise_around_every_threshold_never_flaps():
    choice = SETTLED
    for seed in range(60):
        db = 29.95 + 0.9 * math.sin(seed * 1.7)  # over and under the 30 that are asked of a new one
        choice = after(choice, made(input_forward=[db, 31, 31, 20, 25]))
        assert choice.same_casts(SETTLED), (seed, choice.reasons)


def test_a_missed_need_is_acted_on_at_once_however_often():
    choice, cheaper = SETTLED, []
    for step in range(400):
        trouble = step % (PATIENCE + 1) == 0
        found = after(choice, NOT_TENSOR if trouble else GOOD)
        if trouble:
            assert found.matmuls[0, "forward"] == ROW, step
        elif not found.same_casts(choice):
            cheaper.append(step)
            assert found.matmuls[0, "forward"] == TENSOR
        assert found.same_casts(choice) == (not found.reasons)
        choice = found
    # CHANGES at first, and what refills in 400 samples; each cheaper one makes a safer one necessary.
    assert len(cheaper) == pytest.approx((CHANGES + 400 / REFILL) / (1 + policy.SAFER), abs=2)
    assert cheaper[2] < 4 * (PATIENCE + 1)
    assert choice.spent <= CHANGES + policy.SAFER


def test_a_group_whose_cheaper_cast_was_taken_back_remembers_for_longer():
    choice, faded = after(SETTLED, NOT_TENSOR), []
    assert choice.fades_db == FADES_DB
    for _ in range(2):
        choice = after(choice, *PATIENTLY, NOT_TENSOR)
        faded.append(choice.fades_db)
    assert faded == pytest.approx([FADES_DB / 2, FADES_DB / 4 * policy.RECOVERS ** (PATIENCE + 1)])
    assert after(choice, *[NOT_TENSOR] * 200).fades_db == FADES_DB


def test_a_spent_budget_refills():
    spent = replace(after(SETTLED, NOT_TENSOR), spent=CHANGES)
    waited = [after(spent, *[GOOD] * samples).matmuls[0, "forward"] for samples in range(REFILL + 1)]
    assert waited == [ROW] * REFILL + [TENSOR]
    assert after(spent, NOT_TENSOR).matmuls[0, "forward"] == ROW
    worse = made(input_forward=[10, 10, 31, 9, 9])
    assert after(spent, worse).matmuls[0, "forward"] == BLOCK  # safer, whatever is spent


def test_sixteen_bits_are_left_when_numbers_allow():
    choice = after(START, made(math.nan, **{f"{role}_{matmul}": [5.0] * 5 for role, matmul in READS}))
    assert choice.matmuls == {}
    assert not recipe_of(AUTO, choice, 0).is_fp8
    assert after(choice, GOOD).matmuls == {}
    assert after(choice, *PATIENTLY).matmuls == SETTLED.matmuls


def test_a_cheaper_cast_has_to_be_good_enough_in_several_samples_in_a_row():
    choice = after(SETTLED, NOT_TENSOR, *[*PATIENTLY[1:], NOT_TENSOR] * 3)
    assert (choice.matmuls[0, "forward"], choice.changes) == (ROW, SETTLED.changes + 1)


def test_sixteen_bits_for_the_cards_sake_are_for_good():
    choice = in_16_bits(START, "slower")
    assert choice.changes == FINAL
    assert choice.reasons == {(0, role): "slower" for role in ROLES}
    for _ in range(2 * REFILL):
        choice = after(choice, GOOD)
        assert choice.matmuls == {}


def test_speed_takes_what_is_good_enough_and_what_is_harmless_and_accuracy_neither():
    recipe = auto(objective="speed")
    start = begin([0], recipe)
    assert forward([23, 31, 31, 20, 25], needs_of(recipe), start) == TENSOR
    assert forward([23, 31, 31, 20, 25]) == ROW
    needs = needs_of(recipe, loss=3.0)
    assert needs.harmless == pytest.approx(3 * policy.HARMLESS)
    for times, want in ((0.9, TENSOR), (1.1, ROW)):  # of what 3 nats of loss allow
        bad = made(cost=times * needs.harmless, input_forward=[5, 31, 31, 5, 25])
        assert forward(bad, needs, start) == want
        assert forward(bad, needs_of(recipe), start) == ROW  # the loss is not known
    unknown = {0: made(grad_output_dgrad=[5, 31, 31, 5, 25])}
    assert decide(unknown, needs, START).matmuls[0, "dgrad"] == ROW
    assert needs_of(AUTO, loss=3.0).harmless == 0
    assert forward(made(cost=0.0, input_forward=[5, 31, 31, 5, 25]), needs_of(AUTO, loss=3.0)) == ROW


@pytest.mark.parametrize(
    ("consumers", "need"), [(("matmul",), 22), (("activation",), 22), (("matmul", "norm"), math.inf), ((), math.inf)]
)
def test_the_strictest_consumer_is_heard(consumers: tuple, need: float):
    assert needs_of(AUTO, consumers).min_sqnr_db == need
    assert needs_of(auto(min_sqnr_db={"matmul": 25}), ("matmul", "activation")).min_sqnr_db == 25


def test_needs_that_fp8_never_meets_are_refused_and_those_it_hardly_meets_lead_to_16_bits():
    for error, words, options in (
        (InvalidRecipe, r"between 0 and 31\.6 dB.*overrides", {"min_sqnr_db": 60}),
        (InvalidRecipe, None, {"min_sqnr_db": math.nan}),
        (UnknownName, "accuracy", {"objective": "precision"}),
        (
            *(UnknownName, r"'matmull'; did you mean 'matmul'.*known: matmul, activation, norm"),
            {"min_sqnr_db": {"matmull": 30}},
        ),
        *((InvalidRecipe, "the path of a file of decisions, or None", {"plan": plan}) for plan in (3, True, b"p.json")),
    ):
        with pytest.raises(error, match=words):
            auto(**options)  # pyright: ignore[reportArgumentType]
    assert {*CONSUMERS} == {"matmul", "activation", *outputs.REASONS}
    assert auto(plan=Path("a/plan.json")).plan == auto(plan="a/plan.json").plan == str(Path("a/plan.json"))
    strict = auto(min_sqnr_db=31.6)
    found = decide({0: GOOD}, needs_of(strict), begin([0], strict))
    assert found.matmuls == {}
    assert "31.0 dB < 31.6 dB" in found.reasons[0, "input"]  # pyright: ignore[reportOptionalSubscript]


def test_relaxed_needs_are_weaker_in_every_part():
    assert Needs(22, 1.0, 1e-5).relaxed() == Needs(21, 2.0, 1e-5)
    assert Needs(22, None).relaxed().within_db is None


def test_a_margin_grows_where_predicted_scales_saturate():
    recipe = auto(objective="speed")
    choice = begin([0], recipe)
    assert widen(choice, 1e-5) is choice
    wider: Any = widen(choice, 0.01)
    assert (wider.margin, recipe_of(recipe, wider, 0).margin) == (2, 2)
    assert "1.00% of the elements saturated" in wider.reasons[0, "grad_output"]
    widest = widen(wider, 1.0)
    assert widest.margin == 4
    assert widen(widest, 1.0) is widest
    by_row = replace(choice, matmuls=dict.fromkeys(choice.matmuls, ROW))
    assert widen(by_row, 1.0) is by_row  # their scales are not predicted


def test_labels_say_what_is_left_out():
    choice = after(START, made(grad_output_wgrad=[5.0] * 5, input_forward=[5, 31, 31, 5, 5]))
    assert label((0, "grad_output"), choice) == "E4M3/tensor (wgrad BF16)"
    assert label((0, "weight"), choice) == "E4M3/row (dgrad E4M3/tensor)"
    assert label((0, "input"), choice) == "E4M3/row (wgrad BF16)"
    assert policy.reasons(choice, choice, {}) == {}


# Whatever is seen leads to legal recipes, and reasons say what changed


def legal(choice: Choice, layer: int) -> None:
    """Recipe refuses E5M2 by E5M2, and one operand in FP8: `recipe_of` would raise."""
    recipe = recipe_of(AUTO, choice, layer)
    for matmul in MATMULS:
        a, b = recipe.operands(matmul)
        assert a.is_fp8 == b.is_fp8 == ((layer, matmul) in choice.used)
        assert not a.format == b.format == E5M2
        assert not a.is_fp8 or type(a.granularity) is type(b.granularity)


@st.composite
def tables(draw: st.DrawFn) -> Reads:
    random, missing = numpy.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.sampled_from([0.0, 0.3, 1.0]))
    table = random.uniform(0, 40, SHAPE)
    if draw(st.booleans()):
        table[:, [option for option, (_, format) in enumerate(OPTIONS) if format == E5M2]] += 30
    table[..., COST] = 10 ** random.uniform(-9, -2, SHAPE[:2])
    table[random.uniform(size=len(READS)) < missing] = math.nan
    return Reads(table)


@given(
    st.lists(st.tuples(tables(), tables()), min_size=1, max_size=6),
    st.sampled_from(["accuracy", "speed"]),
    st.floats(0, 31).map(lambda need: round(need, 1)),
)
@settings(max_examples=60)
def test_any_reads_lead_to_recipes_for_every_layer(seen, objective: str, need: float):
    recipe = auto(objective=objective, min_sqnr_db=need)
    choice, apart = begin([0, 1], recipe), set()
    for each in seen:
        found = decide(dict(enumerate(each)), needs_of(recipe, loss=2.0), choice)
        for i in found.layers:
            legal(found, i)
        changed = {(i, role) for i in (0, 1) for role in ROLES if label((i, role), found) != label((i, role), choice)}
        assert set(found.reasons or {}) == changed
        assert all((found.reasons or {}).values())
        for matmul in ("forward", "wgrad"):  # one cast of the input, as long as both have been sampled
            places = [READS.index((role, matmul)) for role in OPERANDS[matmul]]
            if not all(reads.seen(place) for reads in each for place in places):
                apart.add(matmul)
            place = 1 + OPERANDS[matmul].index("input")
            used = [found.matmuls[i, matmul] for i in (0, 1) if (i, matmul) in found.matmuls]
            assert matmul in apart or len({(casts.granularity, casts[place]) for casts in used}) <= 1
        choice = found
