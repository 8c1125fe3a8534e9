"""The cost model of a layer: what has to hold whatever its constants are."""

import pytest

from fp8engine.numerics.cards import CARDS, H100_PCIE, H100_SXM, H200
from fp8engine.numerics.recipe import MATMULS, blockwise, current, delayed, high_precision, rowwise, rowwise_gw_hp
from fp8engine.ops.cost import layer_time, speedup, sums_of

LARGE, SMALL = (8192, 14336, 4096), (512, 512, 512)


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("recipe", [current(), delayed(), rowwise(), blockwise()], ids=lambda recipe: recipe.name)
def test_fp8_pays_for_large_layers_and_not_for_small_ones(recipe, card):
    assert speedup(recipe, *LARGE, card) > 1.05
    assert speedup(recipe, *SMALL, card) < 1.0


def test_without_fp8_nothing_is_cast_and_nothing_is_faster():
    found = layer_time(high_precision(), *LARGE)
    assert found.casts == 0.0
    assert found.speedup == pytest.approx(1.0)


def test_a_predicted_scale_saves_a_read_and_a_launch_of_each_operand():
    assert 1.3 < layer_time(current(), *LARGE).casts / layer_time(delayed(), *LARGE).casts < 1.6  # 6 bytes, not 4


def test_more_memory_bandwidth_makes_casts_cheaper_and_bf16_no_faster():
    slow, fast = layer_time(current(), *LARGE, H100_SXM), layer_time(current(), *LARGE, H200)
    assert fast.casts == pytest.approx(slow.casts * H100_SXM.memory / H200.memory, rel=0.1)
    assert fast.bf16 == pytest.approx(slow.bf16, rel=0.01)
    assert layer_time(current(), *LARGE, H100_PCIE).bf16 > 1.4 * slow.bf16


def test_recipes_are_told_apart():
    """One efficiency for all of them was optimistic for blocks, whose loop scales between its products."""
    assert speedup(rowwise_gw_hp(), *LARGE) < speedup(blockwise(), *LARGE) < speedup(rowwise(), *LARGE)
    assert speedup(rowwise(), *LARGE) < speedup(delayed(), *LARGE)
    assert [sums_of(rowwise(), name) for name in MATMULS] == ["fast", "fast", "promoted"]
    assert [sums_of(rowwise_gw_hp(), name) for name in MATMULS] == ["fast", "fast", None]
