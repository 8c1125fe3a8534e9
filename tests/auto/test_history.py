"""What `auto` remembers of a slot: bounded in bytes, thinned so that what was bad is still told; who hears of alarms.

`fe.scaling_state(model).on_alarm`: a callable hears of growing outliers, in this program and in no copy.
"""

import copy
import io
import json
import math
import tracemalloc
from typing import Any

import numpy
import pytest
import torch
from autos import grow
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.auto.alarm import Trend
from fp8engine.auto.history import OLDER, RECENT, History, Sample, Samples, trends_from_dict
from fp8engine.errors import StateError
from fp8engine.numerics.recipe import E4M3, Cast
from fp8engine.report.state import controllers_of
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import Prediction

MOST = 16_000  # bytes of host memory a slot


def look(step: int, cast: str = "E4M3/tensor", **numbers: Any) -> Sample:
    usual = Sample(step, cast, amax=2.0, rms=1.0, kurtosis=3.0, sqnr_db=31.4, flushed=0.0, saturated=0.0, nonfinite=0)
    return usual._replace(**numbers)


@pytest.mark.parametrize("looks", [10, RECENT + OLDER, 2000])
def test_a_slot_takes_16_kb_however_long_the_training(looks: int):
    history, slots = History(), 4
    measured = read(measure(torch.randn(64, 64)))
    found = measured.predict(Cast(E4M3))
    for i in range(looks):
        for slot in range(slots):
            history.enter(16 * i, f"blocks.{slot}.up.input", "E4M3/tensor", measured, found)
    tracemalloc.start()
    again = copy.deepcopy(history)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(again.samples) == slots
    assert held / slots < MOST


def test_of_few_looks_every_one_is_kept_as_it_was():
    kinds = ("BF16", "E4M3/row", "E4M3/row")
    seen = [look(16 * i, kinds[i % 3], amax=float(i), sqnr_db=math.inf) for i in range(RECENT + OLDER)]
    looks = Samples(seen)
    assert list(looks) == looks.evenly() == seen
    assert looks.since(16 * 100) == seen[101:]
    assert (looks[-1], looks[3], looks[2:4]) == (seen[-1], seen[3], seen[2:4])


def test_the_latest_looks_are_whole_and_the_older_ones_cover_the_whole_training_evenly():
    seen = [look(16 * i, amax=1.0 + i) for i in range(4000)]
    looks = Samples(seen)
    assert looks[-RECENT:] == seen[-RECENT:]
    assert len(looks) <= RECENT + OLDER
    steps = numpy.array([each.step for each in looks.evenly()])
    assert steps[-1] == seen[-1].step
    assert set(numpy.diff(steps)[:-1].tolist()) == {looks.span}
    assert OLDER // 4 <= len(steps) <= OLDER  # a span doubles where half of OLDER are too few
    assert [each.amax for each in looks.evenly()] == [1.0 + each.step / 16 for each in looks.evenly()]


def test_what_was_worst_is_still_told_by_the_look_that_stands_for_it():
    seen = [look(16 * i) for i in range(4000)]
    seen[1000] = look(16000, sqnr_db=9.5, flushed=0.25, nonfinite=3)
    seen[1001] = look(16016, "E4M3/row", amax=100.0, rms=10.0, kurtosis=50.0, saturated=0.125)
    seen[1002] = look(16032, amax=6.0, rms=0.25, nonfinite=4)
    looks = Samples(seen)
    (bad,) = [each for each in looks if each.sqnr_db < 31]
    assert bad.step // looks.span == 16000 // looks.span
    assert (bad.sqnr_db, bad.flushed, bad.saturated, bad.nonfinite, bad.kurtosis) == (9.5, 0.25, 0.125, 7, 50.0)
    assert bad.amax == 100.0
    assert bad.amax / bad.rms == pytest.approx(6.0 / 0.25)  # the largest of the three
    assert bad.cast == "E4M3/tensor"
    assert sum(each.nonfinite for each in looks) == 7


def test_slots_that_are_looked_at_more_often_keep_the_same_steps():
    often, rarely = (Samples(look(step) for step in range(0, 8192, every)) for every in (4, 16))
    assert {each.step // often.span for each in often.evenly()} >= {each.step // often.span for each in rarely.evenly()}
    assert often.span % rarely.span == 0
    steps = [each.step // often.span for each in often.evenly()]
    assert [each.step // often.span for each in rarely.evenly(often.span)] == steps


def test_zeros_and_what_is_not_finite_stay_what_they_are():
    looks = Samples(look(i, amax=0.0, rms=0.0, sqnr_db=math.inf if i % 2 else -math.inf) for i in range(1000))
    assert {(each.amax, each.rms) for each in looks} == {(0.0, 0.0)}
    assert looks[0].sqnr_db == -math.inf
    assert Prediction(math.inf, 0, 0, 0).sqnr_db == looks[-1].sqnr_db


def test_several_samples_of_one_step_are_no_trend():
    trend = Trend("up.input")
    assert [trend.add(0, 2.0**i) for i in range(8)] == [None] * 8
    assert trend.add(16, 2.0**8) is not None
    history = History()
    history.trends["up.input"] = trend
    resumed = trends_from_dict(history.trends_to_dict())["up.input"]
    assert (resumed.points, resumed.warned) == (trend.points, trend.warned), "what a resumed run goes on from"


# Alarms


def watched() -> nn.Module:
    return converted(nn.Sequential(nn.Linear(64, 32)), fe.auto(interval=1))


def test_a_listener_hears_each_alarm_until_it_is_stopped():
    model = watched()
    heard: list[Alarm] = []
    stop = fe.scaling_state(model).on_alarm(heard.append)
    grow(model, 12)
    first = next(alarm for alarm in heard if alarm.slot == "0.input")
    assert first.growth >= 4
    assert first.ratio >= 16
    assert str(first).startswith(f"step {first.step} 0.input: amax/rms x")
    assert [alarm._asdict() for alarm in heard] == fe.inspect(model).alarms
    stop()
    stop()  # twice is once
    before = len(heard)
    controllers_of(model)[0].history.trends.clear()
    grow(model, 12)
    assert len(fe.inspect(model).alarms) > before == len(heard)


def test_a_listener_may_end_its_own_listening():
    model, stops = watched(), []
    first: list[Alarm] = []
    second: list[Alarm] = []
    stops.append(fe.scaling_state(model).on_alarm(lambda alarm: (first.append(alarm), stops[0]())))
    fe.scaling_state(model).on_alarm(second.append)
    grow(model, 12)
    assert len(first) == 1
    assert [alarm._asdict() for alarm in second] == fe.inspect(model).alarms


def test_a_copy_and_a_saved_model_have_no_listeners():
    model = watched()
    heard: list[Alarm] = []
    fe.scaling_state(model).on_alarm(lambda alarm: heard.append(alarm))
    grow(copy.deepcopy(model), 12)
    assert heard == []
    memory = io.BytesIO()
    torch.save(model, memory)  # a lambda would not be saved
    memory.seek(0)
    assert controllers_of(torch.load(memory, weights_only=False))[0].history.listeners == []
    grow(model, 12)
    assert heard


def test_a_resumed_run_has_the_early_warnings_of_before_and_tells_them_no_second_time():
    model, resumed = watched(), watched()
    grow(model, 12)
    wanted, saved, heard = fe.inspect(model).alarms, fe.scaling_state_dict(model), []
    fe.scaling_state(resumed).on_alarm(heard.append)
    fe.load_scaling_state_dict(resumed, saved)
    assert wanted
    assert fe.inspect(resumed).alarms == wanted
    for each in (model, resumed):
        torch.manual_seed(1)
        grow(each, 2)
    assert fe.inspect(resumed).alarms == fe.inspect(model).alarms
    assert [alarm._asdict() for alarm in heard] == fe.inspect(model).alarms[len(wanted) :]


def test_a_state_that_was_saved_without_early_warnings_is_loaded():
    model = watched()
    grow(model, 12)
    saved = fe.scaling_state_dict(model)
    decided = json.loads(saved["auto"][0]["decided"])
    saved["auto"][0]["decided"] = json.dumps({k: v for k, v in decided.items() if k not in ("alarms", "told")})
    fe.load_scaling_state_dict(model, saved)
    assert fe.inspect(model).alarms == []


def test_a_model_that_nobody_watches_says_so():
    with pytest.raises(StateError, match='no layer is under "auto", and only those are watched'):
        fe.scaling_state(converted(nn.Linear(4, 4), "delayed")).on_alarm(print)
    with pytest.raises(StateError, match=r"on_alarm\(3\): want a function"):
        fe.scaling_state(watched()).on_alarm(3)  # pyright: ignore[reportArgumentType]
