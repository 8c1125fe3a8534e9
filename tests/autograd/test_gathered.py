"""A weight that arrives as codes: what its layer reads in each direction, and what enters its slot."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import EXACT_SCALES

import fp8engine as fe
from fp8engine.autograd.gathered import GatheredWeight, for_dgrad, for_forward, why_not
from fp8engine.errors import ParallelError
from fp8engine.numerics.cast import Cast, PerRow, PerTensor
from fp8engine.numerics.recipe import Recipe, resolve
from fp8engine.ops import casts
from fp8engine.scaling.table import ScalingState

N, K = 129, 333
ROW = Cast(fe.E4M3, PerRow())


def gathered(weight_NK: torch.Tensor, recipe: Recipe) -> GatheredWeight:
    how = recipe.forward[1]
    q = casts.quantize(weight_NK, replace(how, scaling="current"))
    found = GatheredWeight(q.data, q.scale, how.granularity, weight_NK.dtype)
    found.power_of_2, found.layer = how.power_of_2, "up"
    found.amax, found.s = weight_NK.abs().max(), (1 / q.scale).min()
    return found


def slot_of(recipe: Recipe, record: bool = True):
    """The weight's slot of a fresh table, and the table."""
    state = ScalingState([("up", recipe)])
    return state.slots[0][1, record, record], state


@pytest.mark.parametrize("recipe", ["current", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", EXACT_SCALES[1]])
def test_both_directions_read_what_a_cast_of_the_weight_gives(recipe: str | Recipe):
    """Per column from the row codes: the same but for elements that are subnormal in one of the casts; 0.01 dB."""
    torch.manual_seed(0)
    weight, chosen = torch.randn(N, K) * 2.0 ** torch.randint(-4, 4, (N, 1)), resolve(recipe)
    forward, dgrad = chosen.forward[1], chosen.dgrad[1]
    slot, _ = slot_of(chosen)
    codes = gathered(weight, chosen)
    a, direct = for_forward(codes, forward, slot, False), casts.quantize(weight, forward)
    assert torch.equal(a.data.view(torch.uint8), direct.data.view(torch.uint8))
    assert torch.equal(a.scale, direct.scale)
    errors = []
    for b in (for_dgrad(codes, (forward, dgrad), slot, False), casts.quantize(weight, dgrad)):
        values = fe.Float8Tensor(b.data, b.scale, dgrad.granularity, torch.float32).values()
        errors.append(10 * math.log10(weight.square().sum() / (values - weight).square().sum()))
    assert abs(errors[0] - errors[1]) < 0.01


ROW_EXACT = "its dgrad casts the weight E4M3 per column, which its codes E4M3 per row do not give exactly"
WIDE: dict[str, Any] = {
    "weight_for_dgrad": Cast(fe.BF16),
    "grad_output": Cast(fe.BF16),
    "input_for_wgrad": Cast(fe.BF16),
}
DGRAD_IN_16_BITS = Recipe(name="dgrad in 16 bits", input=Cast(fe.E4M3), weight=Cast(fe.E4M3), **WIDE)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("bf16", "its forward reads the weight in BF16"),
        ("delayed", ""),
        ("blockwise", ""),
        (DGRAD_IN_16_BITS, "its dgrad reads the weight in BF16"),
        (fe.rowwise(power_of_2=False), ROW_EXACT),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_why_a_weight_is_gathered_in_high_precision(recipe: str | Recipe, why: str):
    assert why_not(resolve(recipe)) == why


def test_a_call_enters_the_slot_as_a_cast_does():
    """Calls, elements, amax and s; the versions of the tables stay, which a graph's backward compares."""
    weight, recipe = torch.randn(N, K), resolve("current")
    (ours, state), (theirs, other) = slot_of(recipe), slot_of(recipe)
    versions = state.live_2S._version, state.counts_CS._version
    for_forward(gathered(weight, recipe), recipe.forward[1], ours, False)
    casts.quantize(weight, recipe.forward[1], theirs)
    assert torch.equal(state.live_2S, other.live_2S)
    assert state.counts_CS[:2, 1].tolist() == [1, N * K]
    assert (state.live_2S._version, state.counts_CS._version) == versions


def test_a_recipe_that_changed_after_the_gather_is_an_error():
    recipe = resolve("rowwise")
    slot, _ = slot_of(recipe)
    message = "up: its weight was gathered as E4M3 codes per tensor, and its recipe now casts E4M3 per row"
    with pytest.raises(ParallelError, match=message):
        for_forward(gathered(torch.randn(N, K), resolve("current")), recipe.forward[1], slot, False)


def test_views_that_fully_shard_makes_keep_the_codes():
    weight = gathered(torch.randn(N, K), resolve("rowwise"))
    parameter = torch.nn.Parameter(torch.as_strided(weight, (N, K), (K, 1), 0))
    assert type(parameter) is GatheredWeight
    assert parameter.layer == "up"
    assert parameter.t().granularity == PerRow(0)
    assert type(parameter * 2) is torch.Tensor, "other code computes on the values"
    assert gathered(torch.randn(N, K), resolve("current")).granularity == PerTensor()
