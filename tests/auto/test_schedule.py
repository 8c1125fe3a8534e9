"""fp8engine/auto/schedule.py: one sampled step an interval, at a place that no period can hide from; early samples.

The doctest of `sampled_step` says which steps: the same on every machine, as a plan and a resumed run need them.
"""

import numpy
import pytest

from fp8engine.auto.schedule import MOVED, TRIES, Moves, is_sampled, sampled_step


@pytest.mark.parametrize("interval", [1, 2, 3, 16, 100])
def test_each_interval_has_one_sampled_step(interval: int):
    steps = [step for step in range(50 * interval) if is_sampled(step, interval)]
    assert steps == [sampled_step(number, interval) for number in range(50)]
    assert [step // interval for step in steps] == list(range(50))
    assert is_sampled(-1, interval)  # before the first step counts as the first
    assert steps[0] == 0


@pytest.mark.parametrize("interval", [8, 16, 64])
def test_no_period_hides_a_task(interval: int):
    # Tasks come in turns, `period` of them: every one is sampled, and none much more often than the others.
    # Over n = 1,000 intervals each of p tasks is expected n / p times, with a standard deviation below sqrt(n / p):
    # five of them are met by chance once in two million; p = 2 to 64 has 2,079 tasks.  A period longer than the
    # interval and a multiple of it needs every place of the interval; the largest, 64, has 15.6 an expected task.
    steps = numpy.array([sampled_step(number, interval) for number in range(1, 1001)])
    for period in range(2, 65):
        found = numpy.bincount(steps % period, minlength=period)
        expected = len(steps) / period
        assert found.min() >= 1, period
        assert abs(found - expected).max() < 5 * expected**0.5, period


START = numpy.array([(1.0, 1, 1), (2, 3, 4), (0, 1, 1)])


def begun() -> Moves:
    moves = Moves()
    moves.sampled(range(3), START, True)
    return moves


@pytest.mark.parametrize("operand", range(3))
@pytest.mark.parametrize(("times", "found"), [(1.01 * MOVED, True), (0.99 / MOVED, True), (0.99 * MOVED, False)])
def test_a_layer_whose_amax_moves_far_is_found(operand: int, times: float, found: bool):
    now = START.copy()
    now[1, operand] *= times
    assert begun().moved(now, 0) == ({1} if found else set())


@pytest.mark.parametrize("now", [0.0, -1.0, numpy.nan, numpy.inf])
def test_what_did_not_run_and_what_is_not_finite_moves_nothing(now: float):
    assert begun().moved(numpy.full_like(START, now), 0) == set()
    assert Moves().moved(START, 0) == set()
    assert begun().moved(START[:2] * 100, 0) == set()  # of a state with other layers
    zero = START.copy()
    zero[2, 0] = 1e6
    assert begun().moved(zero, 0) == set()  # there is no ratio to it


def test_a_layer_has_so_many_tries_an_interval():
    moves = begun()
    for _ in range(TRIES):
        assert moves.moved(START * 10, 0) == {0, 1, 2}
    assert moves.moved(START * 10, 0) == set()
    assert moves.moved(START * 10, 1) == {0, 1, 2}


def test_a_layer_is_looked_for_until_a_sample_has_met_what_moved():
    moves = begun()
    assert moves.moved(START * 10, 0) == {0, 1, 2}
    moves.sampled([1], START, False)
    assert moves.moved(START, 0) == {0, 1, 2}
    moves.sampled([1], START * 10, False)
    assert moves.moved(START, 0) == {0, 2}
    assert 1 not in moves.moved(START * 10, 0)  # nor does it move back and forth


def test_the_range_narrows_with_each_sample_of_all_layers():
    """16 times was met; three samples later half of half of half of that is the end of the range, and 16 has moved."""
    moves = begun()
    moves.sampled(range(3), START * 16, False)
    assert moves.moved(START * 16, 0) == moves.moved(START, 0) == set()
    for _ in range(3):
        assert moves.moved(START * 16, 0) == set()
        moves.sampled(range(3), START, True)
    assert moves.moved(START * 16, 0) == {0, 1, 2}


def test_the_ranges_and_tries_are_what_a_resumed_run_needs():
    moves = begun()
    moves.moved(START * 10, 0)
    resumed = Moves(moves.ranges.copy(), moves.number, moves.tries.items())
    assert resumed.moved(START, 0) == moves.moved(START, 0) == {0, 1, 2}
    assert resumed.tries == moves.tries == dict.fromkeys(range(3), 2)
    assert Moves().ranges.size == 0
