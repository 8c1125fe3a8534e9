"""fp8engine/auto/policy.py: whatever is seen leads to recipes that are legal, and reasons say what changed."""

import math

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8engine.auto.policy import decide, needs_of
from fp8engine.numerics.formats import E5M2
from fp8engine.numerics.recipe import MATMULS, ROLES, auto
from fp8engine.scaling.choice import OPERANDS, Choice, begin, label, recipe_of
from fp8engine.scaling.reads import COST, OPTIONS, READS, SHAPE, Reads

AUTO = auto()


def legal(choice: Choice, layer: int) -> None:
    """Recipe refuses E5M2 by E5M2, and one operand in FP8: `recipe_of` would raise."""
    recipe = recipe_of(AUTO, choice, layer)
    for matmul in MATMULS:
        a, b = recipe.operands(matmul)
        assert a.is_fp8 == b.is_fp8 == ((layer, matmul) in choice.used)
        assert not a.format == b.format == E5M2
        assert not a.is_fp8 or type(a.granularity) is type(b.granularity)


tables = st.builds(
    lambda seed, missing, wide: _random(numpy.random.default_rng(seed), missing, wide),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)


def _random(random: numpy.random.Generator, missing: float, wide: bool) -> Reads:
    table = random.uniform(0, 40, SHAPE)
    if wide:
        table[:, [option for option, (_, format) in enumerate(OPTIONS) if format == E5M2]] += 30
    table[..., COST] = 10 ** random.uniform(-9, -2, SHAPE[:2])
    table[random.uniform(size=len(READS)) < missing] = math.nan
    return Reads(table)


@given(
    st.lists(st.tuples(tables, tables), min_size=1, max_size=6),
    st.sampled_from(["accuracy", "speed"]),
    st.floats(0, 31).map(lambda need: round(need, 1)),
)
@settings(max_examples=60)
def test_any_reads_lead_to_recipes_for_every_layer(seen, objective: str, need: float):
    recipe = auto(objective=objective, min_sqnr_db=need)
    choice, apart = begin([0, 1], recipe), set()
    for first, second in seen:
        after = decide({0: first, 1: second}, dict.fromkeys((0, 1), needs_of(recipe, loss=2.0)), choice)
        for i in after.layers:
            legal(after, i)
        changed = {(i, role) for i in (0, 1) for role in ROLES if label((i, role), after) != label((i, role), choice)}
        assert set(after.reasons or {}) == changed
        assert all((after.reasons or {}).values())
        for matmul in ("forward", "wgrad"):  # one cast of the input, as long as both have been sampled
            places = [READS.index((role, matmul)) for role in OPERANDS[matmul]]
            if not all(each.seen(place) for each in (first, second) for place in places):
                apart.add(matmul)
            place = 1 + OPERANDS[matmul].index("input")
            used = [after.matmuls[i, matmul] for i in (0, 1) if (i, matmul) in after.matmuls]
            assert matmul in apart or len({(casts.granularity, casts[place]) for casts in used}) <= 1
        choice = after
