"""The timing model of a matmul: its parts, where each is known by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8engine.errors import UnknownName
from fp8engine.numerics import matmul_time
from fp8engine.numerics.cards import CARDS, H100_PCIE, H100_SXM, H200, card_named, card_of
from fp8engine.numerics.matmul_time import Kernel, library, predict, sustained_clock

WIDE = Kernel(128, 256)
HIGHEST = matmul_time.BURST * H100_SXM.clock
sizes = st.integers(1, 20_000)


def test_a_tile_more_than_there_are_multiprocessors_takes_a_second_wave():
    one, two = (predict(H100_SXM, WIDE, (m, 256, 4096), sustained=False) for m in (128 * 132, 128 * 132 + 1))
    assert two.compute == pytest.approx(2 * one.compute)


def test_where_a_card_waits_it_draws_less_and_its_clock_stays_higher():
    """131 of 132 multiprocessors have no tile in the second wave; and a short kernel is over before the next starts."""
    full, half = (predict(H100_SXM, WIDE, (m, 256, 4096)) for m in (128 * 132, 128 * 132 + 1))
    assert half.clock > 1.05 * full.clock
    short, long = (library(H100_SXM, "fast", 16, (size, size, size)) for size in (2048, 8192))
    assert short.clock > 1.05 * long.clock


def test_the_main_loop_is_as_long_as_its_ceiling_says_where_l2_is_no_limit():
    few = (128, 256, 8192)  # one tile: all of L2 is its own
    full, half = (predict(H100_SXM, Kernel(128, 256, ceiling=c), few) for c in (1.0, 0.5))
    assert half.loop == pytest.approx(2 * full.loop)
    assert full.loop == pytest.approx(64 * 1024 / matmul_time.LOOP)  # 64 passes of 128x256x128 at 4096 a clock


def test_narrow_tiles_are_limited_by_l2_when_all_multiprocessors_load():
    assert predict(H100_SXM, Kernel(64, 128), (8192, 8192, 8192)).limit == "L2"


def test_l2_answers_once_what_all_multiprocessors_ask_for():
    """One row of tiles: all read the same rows of a, and each its own of b.  Measured: DeepGEMM, 128x2112x7168."""
    one, two = (predict(H100_SXM, Kernel(128, 16), (m, 16 * 132, 7168), sustained=False) for m in (128, 256))
    assert one.loop == pytest.approx(7168 * (128 + 16) / matmul_time.L2_OF_PROCESSOR)
    assert two.loop == pytest.approx(7168 * (128 + 16) * 132 / matmul_time.L2_OF_CARD)


def test_a_cluster_shares_the_larger_operand():
    wide, tall = (predict(H100_SXM, Kernel(*tile, cluster=2), (8192, 8192, 8192)) for tile in ((64, 128), (128, 64)))
    assert wide.loop == tall.loop == pytest.approx(8192 * (64 + 64) * 132 / matmul_time.L2_OF_CARD)


def test_few_tokens_are_limited_by_memory_and_a_faster_one_helps():
    slow, fast = (predict(card, Kernel(64, 64), (16, 8192, 8192)) for card in (H100_SXM, H200))
    assert slow.limit == "memory"
    assert fast.memory == pytest.approx(slow.memory * H100_SXM.memory / H200.memory)


def test_overlapped_loads_and_a_second_program_hide_the_start_of_a_tile():
    shape = (8192, 8192, 1024)
    plain, flat = (predict(H100_SXM, Kernel(128, 256, overlapped=o), shape) for o in (False, True))
    assert plain.exposed - flat.exposed == pytest.approx(matmul_time.LATENCY)
    one, two = (predict(H100_SXM, Kernel(64, 128, ceiling=0.6, programs=p), shape) for p in (1, 2))
    assert two.seconds < one.seconds


def test_parts_of_k_fill_a_card_that_has_few_tiles():
    whole, parts = (predict(H100_SXM, Kernel(128, 128, split=s), (128, 1024, 16384)) for s in (1, 8))
    assert parts.compute < whole.compute / 3


def test_a_card_without_power_to_spare_multiplies_slower_and_never_above_its_boost():
    assert sustained_clock(H100_PCIE, 8, 0.9) < sustained_clock(H100_SXM, 8, 0.9) < HIGHEST
    assert sustained_clock(H100_SXM, 8, 0.9) < sustained_clock(H100_SXM, 16, 0.9)
    assert sustained_clock(H100_SXM, 16, 0.1) == HIGHEST == pytest.approx(1.98e9, rel=0.01)
    limited = dataclasses.replace(H100_SXM, watts=500)
    shape = (8192, 8192, 8192)
    assert library(limited, "fast", 8, shape).seconds > library(H100_SXM, "fast", 8, shape).seconds
    single = library(H100_SXM, "fast", 8, shape, sustained=False)
    assert single.clock == HIGHEST


@given(sizes, sizes, sizes, st.sampled_from(list(CARDS.values())), st.sampled_from([8, 16]))
def test_no_prediction_beats_the_data_sheet(m, n, k, card, bits):
    found = predict(card, Kernel(128, 128, 1024 // bits, bits=bits), (m, n, k))
    assert found.seconds >= 2 * m * n * k / card.rate(bits)
    assert found.seconds >= (m * n * 2 + (m + n) * k * bits / 8) / card.memory


@given(sizes, sizes, sizes)
def test_more_work_never_takes_less_time(m, n, k):
    single = predict(H100_SXM, WIDE, (m, n, k), sustained=False)
    for more in ((m + 128, n, k), (m, n + 256, k), (m, n, k + 128)):
        assert predict(H100_SXM, WIDE, more, sustained=False).seconds >= single.seconds * 0.999


def test_cards_by_name():
    assert card_named("h200") is H200
    assert card_of("NVIDIA H100 80GB HBM3", 132) is H100_SXM
    with pytest.raises(UnknownName, match="h100-sxm"):
        card_named("h300")
