"""Recipes are values: what they say, what they refuse, what survives JSON and pickle."""

import copy
import dataclasses
import json
import pickle
from typing import cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fp8engine as fe
from fp8engine.errors import InvalidRecipe, UnknownName
from fp8engine.numerics.recipe import MATMULS, RECIPES, Cast, Recipe, resolve

E4M3, E5M2, BF16 = Cast(fe.E4M3), Cast(fe.E5M2), Cast(fe.BF16)
DELAYED_E5M2 = Cast(fe.E5M2, scaling="delayed")
SIZES = st.integers(1, 512)
GRANULARITIES = st.one_of(
    st.just(fe.PerTensor()), st.builds(fe.PerRow, st.sampled_from([-1, 0])), st.builds(fe.PerBlock, SIZES, SIZES)
)
FP8_CASTS = st.one_of(
    st.builds(Cast, st.sampled_from([fe.E4M3, fe.E5M2]), GRANULARITIES, power_of_2=st.booleans()),
    st.builds(Cast, st.sampled_from([fe.E4M3, fe.E5M2]), scaling=st.just("delayed"), power_of_2=st.booleans()),
)
WIDE_CASTS = st.builds(Cast, st.sampled_from([fe.BF16, fe.FP16, fe.FP32]))


@st.composite
def recipes(draw) -> Recipe:
    """Any recipe that contradicts itself nowhere, with each matmul in FP8 or not."""
    one = {matmul: FP8_CASTS if draw(st.booleans()) else WIDE_CASTS for matmul in MATMULS}
    # A scale is predicted for an operand's first cast alone.
    second = {
        matmul: casts.map(lambda cast: dataclasses.replace(cast, scaling="current")) for matmul, casts in one.items()
    }
    dgrad, wgrad = draw(one["dgrad"]), draw(second["wgrad"])
    casts = {
        "input": draw(one["forward"]),
        "weight": draw(one["forward"]),
        "grad_output": dgrad,
        "weight_for_dgrad": draw(second["dgrad"]),
        "input_for_wgrad": draw(second["wgrad"]),
        "grad_output_for_wgrad": wgrad,
    }
    for key, same in (("weight_for_dgrad", "weight"), ("input_for_wgrad", "input")):
        if casts[key].is_fp8 == casts[same].is_fp8 and draw(st.booleans()):
            casts[key] = None
    options = st.fixed_dictionaries(
        {
            "history": st.integers(1, 2048),
            "margin": st.integers(-32, 32),
            "algo": st.sampled_from(["max", "most_recent"]),
            "fast_accumulation": st.lists(st.sampled_from(MATMULS), unique=True).map(tuple),
            "output": st.sampled_from([fe.BF16, fe.FP16, fe.FP32]),
            "name": st.text(max_size=8),
        }
    )
    try:
        return Recipe(**casts, **draw(options))
    except InvalidRecipe as error:
        assume("E5M2 by E5M2" not in str(error))  # the one contradiction that the draws above can make
        raise


@given(recipes())
def test_json_and_pickle_give_back_an_equal_recipe(recipe: Recipe):
    for again in (Recipe.from_json(recipe.to_json()), pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert again == recipe
        assert hash(again) == hash(recipe)
        assert again.casts == recipe.casts
        assert str(again) == str(recipe)
    assert json.loads(recipe.to_json()).keys() == {field.name for field in dataclasses.fields(Recipe) if field.init}
    assert recipe.fp8_share == sum(a.is_fp8 and b.is_fp8 for a, b in map(recipe.operands, MATMULS)) / 3


@given(st.one_of(FP8_CASTS, WIDE_CASTS))
def test_a_cast_is_its_text_and_along_another_dimension_its_groups_turn(cast: Cast):
    """What operators, `x.fp8` and pickles carry says all that a cast is; no other cast has that text."""
    again = Cast.parse(cast.text)
    assert again == cast
    assert hash(again) == hash(cast)
    assert (again.dtype, again.rows, again.cols, again.delayed) == (cast.dtype, cast.rows, cast.cols, cast.delayed)
    assert cast.t().t() == cast
    assert cast.text_of_transpose != cast.t().text
    group = cast.granularity
    turned = fe.PerRow(0) if isinstance(group, fe.PerRow) else group
    turned = fe.PerBlock(group.cols, group.rows) if isinstance(group, fe.PerBlock) else turned
    assert cast.along(0) == dataclasses.replace(cast, granularity=turned)
    assert cast.along(-1) == (cast if group != fe.PerRow(0) else dataclasses.replace(cast, granularity=fe.PerRow()))


def test_scales_lie_along_the_dimension_that_each_matmul_reduces():
    """DESIGN section 5: output x(-1), w(-1); dx: dy(-1), w(0); dw: dy(0), x(0)."""
    groups = {
        "rowwise": ("1x-1 1x-1", "1x-1 -1x1", "-1x1 -1x1"),
        "blockwise": ("1x128 128x128", "1x128 128x128", "128x1 128x1"),
        "mxfp8": ("1x32 1x32", "1x32 32x1", "32x1 32x1"),
        "rowwise_gw_hp": ("1x-1 1x-1", "1x-1 -1x-1", "-1x-1 -1x-1"),
    }
    for name, wanted in groups.items():
        recipe = resolve(name)
        casts = [recipe.operands(matmul) for matmul in MATMULS]
        assert tuple(" ".join(f"{cast.rows}x{cast.cols}" for cast in both) for both in casts) == wanted, name


SENTENCES = {
    fe.delayed(history=4, margin=1): ("delayed: input E4M3 per tensor, ", "largest of 4 steps, margin 2^1; fast"),
    fe.delayed(algo="most_recent"): ("predicted from the last step, ", "in forward and dgrad, promoted in wgrad."),
    fe.rowwise_gw_hp(): ("weight E4M3 per row (power of 2), ", "input_for_wgrad BF16, ", "; scales from each tensor"),
    fe.high_precision(fe.FP16): ("fp16: input FP16, weight FP16, grad_output FP16; no FP8.",),
    Recipe(input=E4M3, weight=E4M3, grad_output=Cast.parse("e5m2 1x64 p2"), fast_accumulation=MATMULS): (
        "custom: input E4M3", "E5M2 per 1x64 block (power of 2); ", "accumulation in forward and dgrad and wgrad."
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", SENTENCES, ids=lambda recipe: f"{recipe.name} {recipe.algo}")
def test_a_recipe_prints_as_a_sentence(recipe: Recipe):
    assert all(part in str(recipe) for part in SENTENCES[recipe])
    assert recipe.window == (1 if recipe.algo == "most_recent" else recipe.history)


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes(name: str):
    recipe = resolve(name)
    assert recipe.name == name
    assert resolve(recipe) is recipe
    assert {recipe: name}[resolve(name)] == name
    assert recipe.delayed == (name == "delayed")
    assert recipe.fp8_share == {"rowwise_gw_hp": 2 / 3, "bf16": 0, "fp16": 0, "fp32": 0}.get(name, 1)
    assert "wgrad" not in recipe.fast_accumulation
    assert recipe.is_fp8 or recipe.output.name.lower() == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.input.format = fe.FP32  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("make", [fe.rowwise, fe.blockwise])
def test_exact_scales_have_a_name_of_their_own_and_change_nothing_else(make):
    named, exact = make(), make(power_of_2=False)
    assert exact.name == f"{named.name}_exact"
    assert make(power_of_2=True) == named == resolve(named.name)
    for role in ("input", "weight", "grad_output"):
        assert getattr(exact, role) == dataclasses.replace(getattr(named, role), power_of_2=False)
    casts = {role: getattr(named, role) for role in ("input", "weight", "grad_output")}
    assert dataclasses.replace(exact, name=named.name, **casts) == named
    assert "power of 2" not in str(exact)


def test_all_named_recipes_differ_and_serve_as_keys():
    made = [resolve(name) for name in RECIPES]
    assert len(set(made)) == len({recipe.to_json() for recipe in made}) == len(RECIPES)
    # A list is as good as a tuple, and leaves the recipe hashable.
    assert dataclasses.replace(fe.current(), fast_accumulation=["forward", "dgrad"]) == fe.current()  # pyright: ignore


NEAREST = {
    "curent": "'current'",
    "blockwize": "'blockwise'",
    "row_wise": "'rowwise'",
    "BF16": "'bf16'",
    None: "",
    16: "",
}


@pytest.mark.parametrize("name", NEAREST)
def test_a_misspelt_recipe_gets_the_nearest_name(name):
    with pytest.raises(UnknownName, match=f"unknown recipe {name!r}.*{NEAREST[name]}.* known: auto, current, delayed"):
        resolve(name)


def recipe(**changes) -> Recipe:
    return Recipe(**{"input": E4M3, "weight": E4M3, "grad_output": E5M2, **changes})


CONTRADICTIONS = {
    "per tensor": (lambda: fe.PerRow(1), r"PerRow\(dim=1\)"),
    "empty block": (lambda: fe.PerBlock(0, 128), r"PerBlock\(rows=0, cols=128\)"),
    "half a column": (lambda: fe.PerBlock(1, 1.5), r"cols=1\.5\): rows and columns of a block are whole"),  # pyright: ignore[reportArgumentType]
    "a quotient": (lambda: fe.blockwise(256 / 4), r"cols=64\.0\)"),  # pyright: ignore[reportArgumentType]
    "text": (lambda: fe.blockwise("128"), "cols='128'"),  # pyright: ignore[reportArgumentType]
    "blockwise of nothing": (lambda: fe.blockwise(0), "whole numbers of 1 or more"),
    "format by name": (lambda: Cast("E4M3"), "format='E4M3'"),  # pyright: ignore[reportArgumentType]
    "granularity class": (lambda: Cast(fe.E4M3, fe.PerRow), "granularity="),  # pyright: ignore[reportArgumentType]
    "delayed rows": (lambda: Cast(fe.E4M3, fe.PerRow(), "delayed"), "per row needs scaling='current'"),
    "delayed blocks": (lambda: Cast(fe.E4M3, fe.PerBlock(1, 128), "delayed"), "per 1x128 block needs"),
    "scaled BF16 rows": (lambda: Cast(fe.BF16, fe.PerRow()), "BF16 is not scaled"),
    "delayed FP16": (lambda: Cast(fe.FP16, scaling="delayed"), "FP16 is not scaled"),
    "FP32 in powers of two": (lambda: Cast(fe.FP32, power_of_2=True), "FP32 is not scaled"),
    "no cast": (lambda: recipe(input=fe.E4M3), "input=E4M3"),
    "no cast for dgrad": (lambda: recipe(weight_for_dgrad="E4M3"), "weight_for_dgrad='E4M3'"),
    "no cast for wgrad": (lambda: recipe(input_for_wgrad=fe.BF16), "input_for_wgrad=BF16"),
    "missing cast": (lambda: recipe(weight=None), "weight=None"),
    "no window": (lambda: fe.delayed(history=0), "history=0"),
    "half a step": (lambda: fe.delayed(history=1.5), "history=1.5"),  # pyright: ignore[reportArgumentType]
    "margin beyond FP32": (lambda: fe.delayed(margin=33), "margin=33"),
    "margin in words": (lambda: recipe(margin="1"), "margin='1'"),
    "FP8 output": (lambda: recipe(output=fe.E4M3), "output=E4M3"),
    "output by name": (lambda: recipe(output="bf16"), "output='bf16'"),
    "FP8 by BF16": (lambda: recipe(weight=BF16), "forward would multiply E4M3 per tensor by BF16"),
    "FP8 by BF16 in dgrad": (lambda: recipe(weight_for_dgrad=BF16), "dgrad would multiply"),
    "BF16 by FP8 in wgrad": (lambda: recipe(input_for_wgrad=BF16), "wgrad would multiply"),
    "E5M2 by E5M2": (lambda: recipe(weight=E5M2), "dgrad would multiply E5M2 by E5M2"),
    "E5M2 by E5M2 in wgrad": (lambda: recipe(input_for_wgrad=E5M2), "wgrad would multiply E5M2 by E5M2"),
    "two formats under one prediction": (
        lambda: recipe(grad_output=Cast(fe.E4M3, scaling="delayed"), grad_output_for_wgrad=DELAYED_E5M2),
        "grad_output_for_wgrad=E5M2 per tensor beside grad_output=E4M3 per tensor: a scale is predicted",
    ),
    "a prediction for the second cast alone": (
        lambda: recipe(weight_for_dgrad=Cast(fe.E4M3, scaling="delayed")),
        "give weight_for_dgrad scaling='current'",
    ),
    "high precision in FP8": (lambda: fe.high_precision(fe.E5M2), "high_precision"),
    "high precision by name": (lambda: fe.high_precision("bf16"), "'bf16'"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case: str):
    make, words = CONTRADICTIONS[case]
    with pytest.raises(InvalidRecipe, match=words):
        make()


def test_misspelt_words_get_the_nearest():
    for make, nearest in (
        (lambda: Cast(fe.E4M3, scaling="delay"), r"unknown scaling 'delay'; did you mean 'delayed'"),
        (lambda: fe.delayed(algo="most_resent"), "did you mean 'most_recent'"),
        (lambda: recipe(fast_accumulation=("foward",)), "unknown matmul 'foward'; did you mean 'forward'"),
        (lambda: Recipe.from_json(fe.current().to_json().replace("E4M3", "E4M4")), "E4M3"),
    ):
        with pytest.raises(UnknownName, match=nearest):
            make()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '"current"', '{"input": {"cast": "E4M3"}}'])
def test_what_is_no_recipes_json_is_refused(text: str):
    with pytest.raises(InvalidRecipe, match="not a recipe's JSON"):
        Recipe.from_json(text)


def test_json_from_another_version_is_refused():
    parts = json.loads(fe.current().to_json())
    column = {**parts["input"], "granularity": {**parts["input"]["granularity"], "kind": "PerColumn"}}
    without = {key: value for key, value in parts.items() if key != "weight"}
    for changed, words in (
        ({**parts, "colour": 1}, "colour"),
        (without, "weight"),
        ({**parts, "input": column}, "PerColumn"),
    ):
        with pytest.raises(InvalidRecipe, match=words):
            Recipe.from_json(json.dumps(changed))


@pytest.mark.parametrize("text", ["", "e4m3 1x", "e4m3 1x128x2", "e4m3 p3", "e4m3 0x4", "e4m3 1x-1 delayed", "bf16 p2"])
def test_a_text_that_is_no_cast_is_refused(text: str):
    with pytest.raises(InvalidRecipe):
        Cast.parse(text)
    with pytest.raises(InvalidRecipe, match=r"Cast\.parse\(None\): .* want for example"):
        Cast.parse(cast("str", None))
