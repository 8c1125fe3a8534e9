"""The decision what a result is stored in: a pure function, its answers and its hysteresis."""

import pytest
import torch

import fp8engine as fe
from fp8engine.auto.outputs import MOST_CHANGES, PATIENCE, ResultConsumer, Stored, decide_output, widened
from fp8engine.auto.policy import Needs, needs_of
from fp8engine.numerics.recipe import auto
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import Measured

NEEDS = needs_of(auto())
MATMULS = [ResultConsumer("matmul", "down"), ResultConsumer("matmul", "gate")]


def measured(x: torch.Tensor) -> Measured:
    return read(measure(x))


def normal() -> Measured:
    return measured(torch.randn(64, 256))


def outlier() -> Measured:
    """One value 2^20 times the rest: E4M3 flushes nearly all of these, E5M2 keeps them."""
    x = torch.randn(64, 256)
    x[0, 0] = 2.0**20
    return measured(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("norm", "a norm reads it"),
        ("softmax", "a softmax reads it"),
        ("residual", "it is added to a residual"),
        ("loss", "a loss reads it"),
        ("output", "it leaves the model"),
        ("unknown", "something unknown reads it"),
        ("activation", "an activation of its own reads it"),
    ],
)
def test_one_other_reader_is_enough_for_16_bits(kind: str, why: str):
    kinds = ("matmul", kind)
    consumers = [ResultConsumer("matmul", "down"), ResultConsumer(kind, "it")]
    found = decide_output(normal(), consumers, needs_of(auto(), kinds), Stored())
    assert (found.format, found.reason, found.changes) == (fe.BF16, why, 0)
    back = decide_output(normal(), consumers, needs_of(auto(), kinds), Stored(fe.E4M3, 2, "", 0, 1))
    assert (back.format, back.margin, back.reason, back.changes) == (fe.BF16, 0, why, 2)


def test_a_need_that_the_user_names_for_a_kind_is_kept_like_a_matmuls():
    consumers = [ResultConsumer("matmul"), ResultConsumer("norm")]
    for need, format in ((25, fe.E4M3), (31.6, fe.BF16)):
        recipe = auto(min_sqnr_db={"matmul": 22, "norm": need})
        found = decide_output(normal(), consumers, needs_of(recipe, ("matmul", "norm")), Stored())
        assert found.format == format, need
    assert found.reason.startswith("predicted SQNR 31.")


def test_nobody_known_reads_it():
    assert decide_output(normal(), [], NEEDS, Stored()).reason == "nothing is known of what reads it"


def test_outliers_want_e5m2_or_16_bits():
    free = decide_output(outlier(), MATMULS, NEEDS, Stored())
    table = {format: outlier().predict(fe.Cast(format)) for format in (fe.E4M3, fe.E5M2)}
    assert table[fe.E4M3].flushed > 0.9 > 0.01 > table[fe.E5M2].flushed
    assert free.format == fe.E5M2
    tied = decide_output(outlier(), [ResultConsumer("matmul", "down", e5m2=False)], NEEDS, Stored())
    assert tied.format == fe.BF16
    assert "flushed to zero > 5.0%" in tied.reason


def test_the_same_arguments_give_the_same_answer_and_nothing_seen_changes_nothing():
    look = normal()
    assert decide_output(look, MATMULS, NEEDS, Stored()) == decide_output(look, MATMULS, NEEDS, Stored())
    for previous in (Stored(), Stored(fe.E4M3, 2, "why", 1, 2)):
        assert decide_output(None, MATMULS, NEEDS, previous) == previous
        assert decide_output(measured(torch.zeros(4, 4)), MATMULS, NEEDS, previous) == previous


def test_what_is_there_may_miss_its_needs_by_a_little():
    look = normal()
    have = look.predict(fe.Cast(fe.E4M3)).sqnr_db
    needs = Needs(have + 0.5, None)
    assert decide_output(look, MATMULS, needs, Stored()).format == fe.BF16
    assert decide_output(look, MATMULS, needs, Stored(fe.E4M3, changes=1)).format == fe.E4M3
    assert decide_output(look, MATMULS, needs._replace(min_sqnr_db=have + 1.5), Stored(fe.E4M3)).format == fe.BF16


def test_after_trouble_fp8_has_to_look_right_four_times_and_in_the_end_never_again():
    now, looks = Stored(fe.BF16, 0, "trouble", 0, 1), 0
    while not now.format.is_fp8:
        now, looks = decide_output(normal(), MATMULS, NEEDS, now), looks + 1
        assert looks <= PATIENCE
    assert (looks, now.changes) == (PATIENCE, 2)
    now = decide_output(outlier(), [ResultConsumer("matmul", e5m2=False)], NEEDS, now)
    assert (now.format, now.changes) == (fe.BF16, MOST_CHANGES)
    for _ in range(2 * PATIENCE):
        now = decide_output(normal(), MATMULS, NEEDS, now)
    assert (now.format, now.changes) == (fe.BF16, MOST_CHANGES)


def test_one_look_that_misses_begins_the_count_again():
    now = Stored(fe.BF16, 0, "trouble", 0, 1)
    for look in (normal(), normal(), outlier(), normal(), normal(), normal()):
        now = decide_output(look, [ResultConsumer("matmul", e5m2=False)], NEEDS, now)
    assert (now.format, now.cheaper) == (fe.BF16, 3)


def test_a_margin_that_has_grown_is_taken_over_with_its_numbers():
    before = Stored(fe.E4M3, 0, "", 0, 1)
    assert widened(before, 0, 0.5) == before
    assert widened(Stored(), 2, 0.5) == Stored()
    found = widened(before, 2, 0.0123)
    assert (found.margin, found.changes) == (2, 1)
    assert found.reason == "1.23% of the elements saturated under a predicted scale: margin 2"
