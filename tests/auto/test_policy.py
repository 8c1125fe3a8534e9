"""fp8engine/auto/policy.py: which casts statistics of planted trouble lead to, and how seldom they change.

Layer 0 has the slots; tensors of helpers/planted.py.  What E4M3 holds per tensor: normal values down to 2^-15 of amax,
half of the smallest subnormal at 2^-18.8 of it, below which all is flushed; E5M2: 2^-32.8.
"""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import channels, elements, look, looks, normal, rows

from fp8engine.auto.policy import MOST_CHANGES, PATIENCE, Needs, decide, enough, needs_of, widen
from fp8engine.errors import InvalidRecipe, UnknownName
from fp8engine.numerics.formats import BF16, E4M3, E5M2
from fp8engine.numerics.recipe import MATMULS, auto
from fp8engine.scaling.choice import (
    FINAL,
    GRANULARITIES,
    OPERANDS,
    Choice,
    begin,
    in_16_bits,
    label,
    predicted,
    recipe_of,
)

AUTO = auto()
NEEDS = needs_of(AUTO)
START = begin([0], AUTO)
ROLES = ("input", "weight", "grad_output")


def short(choice: Choice) -> tuple[str, str, str]:
    """Granularity, formats of input, weight and grad_output, matmuls in FP8; each by its first letters."""
    formats = " ".join(str(choice.formats[0, role]) for role in ROLES)
    return choice.granularity, formats, " ".join(sorted(matmul[0] for _, matmul in choice.fp8))


@pytest.mark.parametrize(
    ("name", "tensors", "want"),
    [
        ("normal", {}, ("tensor", "E4M3 E4M3 E4M3", "d f w")),
        # amax is 3300 times the ordinary rms: those are rounded as all normal values are.
        ("channel x1000", {"input": channels(1e3)}, ("tensor", "E4M3 E4M3 E4M3", "d f w")),
        # 14 % flushed; a quarter of that in blocks, which the other three quarters do not notice.
        ("channel x30000", {"input": channels(3e4)}, ("block", "E4M3 E4M3 E4M3", "d f w")),
        # In its block all is flushed, a quarter of the tensor: only E5M2 reaches so far.
        ("channel x1e6", {"input": channels(1e6)}, ("tensor", "E5M2 E4M3 E4M3", "d f w")),
        ("dy over 6 decades", {"grad_output": elements(6, 128, 64)}, ("tensor", "E4M3 E4M3 E5M2", "d f w")),
        # Two E5M2 cannot be multiplied: wgrad is what is left out.
        (
            "x and dy over 9 decades",
            {"input": elements(9), "grad_output": elements(9, 128, 64)},
            ("tensor", "E5M2 E4M3 E5M2", "d f"),
        ),
        # Each row has its scale for dgrad; wgrad reads columns, in which small rows are lost.
        ("dy rows of 12 decades", {"grad_output": rows(12, 128, 64)}, ("row", "E4M3 E4M3 E4M3", "d f")),
        ("x rows of 12 decades", {"input": rows(12)}, ("row", "E4M3 E4M3 E4M3", "d f")),
        # No scale helps: what reads them is in 16 bits, and the rest stays as it is.
        ("dy over 12 decades", {"grad_output": elements(12, 128, 64)}, ("tensor", "E4M3 E4M3 BF16", "f")),
        ("x over 12 decades", {"input": elements(12)}, ("tensor", "BF16 E4M3 E4M3", "d")),
        ("w over 12 decades", {"weight": elements(12, 64, 512)}, ("tensor", "E4M3 BF16 E4M3", "w")),
        (
            "all over 12 decades",
            {"input": elements(12), "grad_output": elements(12, 128, 64), "weight": elements(12, 64, 512)},
            ("", "BF16 BF16 BF16", ""),
        ),
    ],
)
def test_what_planted_trouble_leads_to(name: str, tensors: dict, want: tuple):
    found = decide(looks(**tensors), NEEDS, START)
    assert short(found) == want
    assert found.changes == 1 or found.same_casts(START)  # dy over 6 decades wants what is there
    changed = {slot for slot in found.formats if label(slot, found) != label(slot, START)}
    assert set(found.reasons or {}) == changed
    assert all(found.reasons.values() if found.reasons else [])


def test_reasons_name_the_number_that_was_missed_and_whose():
    found = decide(looks(input=channels(3e4)), NEEDS, START)
    assert found.reasons is not None
    assert found.reasons[0, "input"].startswith("14.0% of the elements flushed to zero > 5.0%")
    assert "amax" in found.reasons[0, "input"]
    assert "x rms" in found.reasons[0, "input"]
    assert found.reasons[0, "weight"].startswith("one granularity for the operands of a matmul; the input: 14.0%")
    one = decide(looks(grad_output=rows(12, 128, 64)), NEEDS, START)
    assert one.reasons is not None
    assert one.reasons[0, "grad_output"].startswith("2")
    assert one.reasons[0, "input"].startswith("wgrad in 16 bits for the grad_output: ")


@pytest.mark.parametrize("objective", ["accuracy", "speed"])
@pytest.mark.parametrize("x", [0, 6, 9, 12])
@pytest.mark.parametrize("dy", [0, 6, 9, 12])
@pytest.mark.parametrize("kind", [rows, elements])
def test_a_choice_is_a_recipe_whatever_was_seen(objective: str, x: int, dy: int, kind):
    """Recipe refuses E5M2 by E5M2, and one operand in FP8: `recipe_of` would raise."""
    recipe = auto(objective=objective)
    found = decide(looks(input=kind(x), grad_output=kind(dy, 128, 64)), needs_of(recipe), begin([0], recipe))
    made = recipe_of(recipe, found, 0)
    for matmul in MATMULS:
        a, b = made.operands(matmul)
        assert a.is_fp8 == b.is_fp8 == ((0, matmul) in found.fp8)
        assert not a.format == b.format == E5M2
        assert not a.is_fp8 or type(a.granularity) is type(b.granularity)


def test_layers_that_read_one_tensor_have_one_granularity_and_one_format_of_it():
    """q sees trouble in its gradient alone, k none: their common input is cast once."""
    q, k = looks(grad_output=rows(12, 128, 64)), looks(layer=1)
    found = decide(q | k, NEEDS, begin([0, 1], AUTO))
    assert found.granularity == "row"
    assert found.formats[0, "input"] == found.formats[1, "input"] == E4M3
    assert sorted(found.fp8) == [(0, "dgrad"), (0, "forward"), *((1, matmul) for matmul in sorted(MATMULS))]
    first, second = (recipe_of(AUTO, found, i) for i in range(2))
    assert first.input == second.input


@pytest.mark.parametrize("missing", ROLES)
def test_what_was_not_seen_keeps_its_format(missing: str):
    seen = looks(input=elements(6), grad_output=elements(6, 128, 64), weight=normal(64, 512))
    del seen[0, missing]
    assert decide(seen, NEEDS, START).formats[0, missing] == START.formats[0, missing]
    assert decide({}, NEEDS, START).same_casts(START)


def test_a_gradient_first_seen_later_is_still_given_the_better_format():
    """The first look was at a zero gradient (zero-initialised layers), and changed the input."""
    first = looks(input=channels(3e4))
    del first[0, "grad_output"]
    once = decide(first, NEEDS, START)
    assert (once.changes, once.formats[0, "grad_output"]) == (1, E5M2)
    assert decide(looks(input=channels(3e4)), NEEDS, once).formats[0, "grad_output"] == E4M3


def test_noise_around_every_threshold_never_flaps():
    """Flushed shares over and under the 5 % that are wanted, under the 7.5 % at which what is there is given up."""
    choice = decide(looks(grad_output=normal(128, 64)), NEEDS, START)
    sizes = []
    for seed in range(40):
        noise = 10 ** (0.12 * math.sin(seed * 1.7))
        seen = looks(input=channels(round(1.2e4 * noise)))
        sizes.append(seen[0, "input"].predict(recipe_of(AUTO, START, 0).input).flushed)
        after = decide(seen, NEEDS, choice)
        assert after.same_casts(choice), (seed, after.reasons)
        choice = after
    assert min(sizes) < 0.05 < max(sizes) < 0.075


def test_something_cheaper_must_look_right_four_times_in_a_row():
    bad, good = looks(input=channels(3e4)), looks()
    choice = decide(bad, NEEDS, START)
    assert choice.granularity == "block"
    for seen in [good] * (PATIENCE - 1) + [bad] + [good] * (PATIENCE - 1):
        choice = decide(seen, NEEDS, choice)
        assert (choice.granularity, choice.changes) == ("block", 1)
    choice = decide(good, NEEDS, choice)
    assert (choice.granularity, choice.changes, choice.cheaper) == ("tensor", 2, 0)
    assert choice.reasons is not None
    assert "4 times in a row, and cheaper" in choice.reasons[0, "input"]


def test_the_third_change_is_for_good_and_the_safest():
    """Trouble, quiet, trouble: then the finest granularity, what misses its needs there in 16 bits."""
    bad, good = looks(input=channels(3e4)), looks()
    choice = decide(bad, NEEDS, START)
    for _ in range(PATIENCE):
        choice = decide(good, NEEDS, choice)
    choice = decide(looks(grad_output=rows(12, 128, 64)), NEEDS, choice)
    assert (choice.granularity, choice.changes) == ("block", MOST_CHANGES)
    assert (0, "wgrad") not in choice.fp8
    assert (0, "forward") in choice.fp8
    for seen in (bad, good, looks(input=elements(12)), *[good] * 9):
        assert decide(seen, NEEDS, choice).same_casts(choice)


def test_the_last_change_is_kept_for_trouble():
    """After two changes nothing is changed for being cheaper."""
    choice = decide(looks(input=channels(3e4)), NEEDS, START)
    choice = Choice(choice.granularity, choice.formats, choice.fp8, changes=MOST_CHANGES - 1)
    for _ in range(3 * PATIENCE):
        choice = decide(looks(), NEEDS, choice)
    assert (choice.granularity, choice.changes) == ("block", 2)


def test_any_sequence_of_looks_changes_a_group_three_times_at_most():
    kinds = [looks(), looks(input=channels(3e4)), looks(input=elements(12)), looks(grad_output=rows(12, 128, 64))]
    for order in itertools.product(range(len(kinds)), repeat=3):
        choice, changes = START, 0
        for kind in order:
            for _ in range(PATIENCE + 1):
                after = decide(kinds[kind], NEEDS, choice)
                changes += not after.same_casts(choice)
                assert after.same_casts(choice) == (not after.reasons)
                choice = after
        assert changes <= MOST_CHANGES, order


def test_sixteen_bits_for_the_cards_sake_is_for_good():
    choice = in_16_bits(START, "slower")
    assert choice.changes == FINAL
    assert set(choice.formats.values()) == {BF16}
    for _ in range(2 * PATIENCE):
        assert decide(looks(), NEEDS, choice).same_casts(choice)


def test_sixteen_bits_are_left_when_numbers_allow():
    choice = decide(
        looks(input=elements(12), grad_output=elements(12, 128, 64), weight=elements(12, 64, 512)), NEEDS, START
    )
    for _ in range(PATIENCE):
        choice = decide(looks(), NEEDS, choice)
    assert short(choice) == ("tensor", "E4M3 E4M3 E4M3", "d f w")


def test_a_margin_grows_where_predicted_scales_saturate():
    recipe = auto(objective="speed")
    choice = begin([0], recipe)
    assert widen(choice, 1e-5) is choice
    wider = widen(choice, 0.01)
    assert wider.margin == 2
    assert recipe_of(recipe, wider, 0).margin == 2
    assert wider.reasons is not None
    assert "1.00% of the elements saturated" in wider.reasons[0, "grad_output"]
    assert widen(widen(wider, 1.0), 1.0).margin == 6
    assert widen(widen(widen(wider, 1.0), 1.0), 1.0).margin == 6  # three changes
    # 12 decades would fill the range: two powers of two less of it flush more.
    flushed = [predicted(look(elements(12), "input"), (0, "input"), each).flushed for each in (choice, wider)]
    assert flushed[1] > flushed[0] + 0.03  # 2 of 40 octaves


@pytest.mark.parametrize(
    ("consumers", "need"), [(("matmul",), 22), (("activation",), 22), (("matmul", "norm"), math.inf), ((), math.inf)]
)
def test_the_strictest_consumer_is_heard(consumers: tuple, need: float):
    assert needs_of(AUTO, consumers).min_sqnr_db == need
    assert needs_of(auto(min_sqnr_db={"matmul": 25}), ("matmul", "activation")).min_sqnr_db == 25


def test_needs_that_fp8_never_meets_are_refused_and_those_it_hardly_meets_lead_to_16_bits():
    with pytest.raises(InvalidRecipe, match=r"between 0 and 31\.6 dB.*overrides"):
        auto(min_sqnr_db=60)
    with pytest.raises(InvalidRecipe):
        auto(min_sqnr_db=math.nan)
    with pytest.raises(UnknownName, match="accuracy"):
        auto(objective="precision")
    strict = auto(min_sqnr_db=31.6)  # a normal distribution gets 31.5
    found = decide(looks(), needs_of(strict), begin([0], strict))
    assert found.fp8 == frozenset()
    assert found.reasons is not None
    assert "dB < 31.6 dB" in found.reasons[0, "input"]


tensors = st.builds(
    lambda kind, size, m, k, seed: kind(size, m, k) * 2.0**seed,
    st.sampled_from([channels, rows, elements, lambda size, m, k: normal(m, k)]),
    st.floats(0.5, 12).map(lambda size: round(size, 2)),
    st.sampled_from([3, 40]),
    st.sampled_from([16, 200]),
    st.integers(-20, 20),
)


@given(st.tuples(tensors, tensors, tensors), st.sampled_from(["accuracy", "speed"]), st.floats(15, 31))
@settings(max_examples=30)
def test_a_look_per_tensor_that_is_enough_says_what_a_closer_one_would(three, objective: str, need: float):
    recipe = auto(objective=objective, min_sqnr_db=round(need, 1))
    cheap, close = (
        {(0, role): look(x, role, closely) for role, x in zip(ROLES, three, strict=True)} for closely in (False, True)
    )
    needs = {slot: needs_of(recipe) for slot in cheap}
    choice = begin([0], recipe)
    for _ in range(2):
        if enough(cheap, needs, choice):
            assert decide(cheap, needs, choice).same_casts(decide(close, needs, choice))
        choice = decide(close, needs, choice)
    assert enough(close, needs, choice)


def test_normal_tensors_need_no_closer_look_and_trouble_does():
    slots = dict.fromkeys(START.formats, NEEDS)
    assert enough(looks(closely=False), slots, START)
    assert not enough(looks(closely=False, input=channels(3e4)), slots, START)
    assert enough(
        looks(closely=False, input=channels(3e4)), slots, Choice("tensor", START.formats, START.fp8, changes=3)
    )


def test_relaxed_needs_are_weaker_in_every_part():
    assert Needs(22, 0.05, 0.01, 1.0).relaxed() == Needs(21, 0.05 * 1.5, 0.01 * 1.5, 2.0)
    assert Needs(22, 0.05, 0.01, None).relaxed().within_db is None


def test_labels_say_what_is_left_out():
    choice = decide(looks(grad_output=rows(12, 128, 64)), NEEDS, START)
    assert label((0, "grad_output"), choice) == "E4M3/row (wgrad BF16)"
    assert label((0, "weight"), choice) == "E4M3/row"
    assert OPERANDS["wgrad"] == ("grad_output", "input")
    assert GRANULARITIES[-1] == "block"
