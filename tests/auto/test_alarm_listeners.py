"""`fe.scaling_state(model).on_alarm`: a callable hears of growing outliers, in this program and in no copy."""

import copy
import io
import json

import pytest
import torch
from autos import grow
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.auto import Alarm
from fp8engine.errors import StateError
from fp8engine.report.state import controllers_of


def watched() -> nn.Module:
    return converted(nn.Sequential(nn.Linear(64, 32)), fe.auto(interval=1))


def test_a_listener_hears_each_alarm_until_it_is_stopped():
    model = watched()
    heard: list[Alarm] = []
    stop = fe.scaling_state(model).on_alarm(heard.append)
    grow(model, 12)
    named = [alarm for alarm in heard if alarm.slot == "0.input"]
    assert len(named) >= 1
    assert named[0].growth >= 4
    assert named[0].ratio >= 16
    assert str(named[0]).startswith(f"step {named[0].step} 0.input: amax/rms x")
    assert [alarm._asdict() for alarm in heard] == fe.inspect(model).alarms
    stop()
    stop()  # twice is once
    before = len(heard)
    history = controllers_of(model)[0].history
    history.trends.clear()
    grow(model, 12)
    assert len(fe.inspect(model).alarms) > before
    assert len(heard) == before


def test_a_listener_may_end_its_own_listening():
    model = watched()
    first: list[Alarm] = []
    second: list[Alarm] = []
    stops = []
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
    again = torch.load(memory, weights_only=False)
    assert controllers_of(again)[0].history.listeners == []
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
    torch.manual_seed(1)
    grow(model, 2)
    torch.manual_seed(1)
    grow(resumed, 2)
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
