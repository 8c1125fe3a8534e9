"""What GradScaler refuses: scales that are none, FP16 gradients, calls out of order; and nothing has changed then."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaled_run import Run
from torch import nn

from fp8engine.amp.scaler import GradScaler, ScaleRules
from fp8engine.errors import LossScaleError, OptimizerError


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0, 1e-60, 1e60])
def test_no_such_scale(scale: float):
    run = Run(GradScaler("cpu", 16.0))
    run.step()
    before = run.scaler.state_dict()
    with pytest.raises(LossScaleError, match="finite and above 0"):
        GradScaler("cpu", scale)
    with pytest.raises(LossScaleError, match="nothing was loaded"):
        run.scaler.load_state_dict({**before, "scale": scale, "growth_interval": 5})
    with pytest.raises(LossScaleError, match="finite and above 0"):
        run.scaler.update(scale)
    assert run.scaler.state_dict() == before


@pytest.mark.parametrize(
    "wrong", [{"growth_factor": 1.0}, {"growth_factor": math.nan}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}]
)
def test_factors_that_make_no_rule(wrong: dict):
    with pytest.raises(LossScaleError, match="grows by more"):
        GradScaler("cpu", **wrong)
    scaler = GradScaler("cpu")
    with pytest.raises(LossScaleError, match="nothing was loaded"):
        scaler.load_state_dict({**scaler.state_dict(), **wrong})


def test_other_states_that_are_refused_or_moved():
    scaler = GradScaler("cpu", rules=ScaleRules(ceiling=2.0**20))
    with pytest.raises(OptimizerError, match="disabled"):
        scaler.load_state_dict({})
    with pytest.raises(LossScaleError, match=r"growth_factor, .* missing"):
        scaler.load_state_dict({"scale": 1.0})
    with pytest.raises(LossScaleError, match="-1"):
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": -1})
    with pytest.warns(UserWarning, match="moved to 1048576"):
        scaler.load_state_dict(torch.amp.GradScaler("cpu", 2.0**24).state_dict())
    assert scaler.get_scale() == 2.0**20
    rules: dict[str, Any]
    for rules in ({"decrease_every_n": 0}, {"floor": 0.0}, {"floor": 4.0, "ceiling": 2.0}, {"collapse_after": -1}):
        with pytest.raises(LossScaleError):
            ScaleRules(**rules)
    with pytest.raises(LossScaleError, match="outside"):
        GradScaler("cpu", 2.0**21, rules=ScaleRules(ceiling=2.0**20))
    scaler.scale(torch.ones(()))
    with pytest.raises(LossScaleError, match="outside"):
        scaler.update(2.0**21)


def test_fp16_gradients_are_named_and_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).half())
    for given, name in ((model.parameters(), "parameter 2 of group 0"), (model.named_parameters(), "1.weight")):
        optimizer, scaler = torch.optim.SGD(given), GradScaler("cpu")
        model.zero_grad()
        scaler.scale(model[1](model[0](torch.ones(3, 2)).half()).sum()).backward()
        before: Any = [p.grad.clone() for p in model.parameters()]  # pyright: ignore[reportOptionalMemberAccess]
        with pytest.raises(LossScaleError, match=rf"{name} \(1, 2\) has an FP16 gradient.*MasterWeights"):
            scaler.step(optimizer)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))  # pyright: ignore


def test_calls_out_of_order():
    run = Run(GradScaler("cpu"))
    scaler, optimizer = run.scaler, run.optimizer

    def refused(told: str, call: Callable, *arguments: Any, **more: Any) -> None:
        with pytest.raises(OptimizerError, match=told):
            call(*arguments, **more)

    refused("before any scale", scaler.update)
    refused("before any scale", scaler.step, optimizer)
    refused("before any scale", scaler.unscale_, optimizer)
    scaler.scale(run.weight.sum())
    refused("no parameter of SGD has a gradient", scaler.step, optimizer)
    refused("without a step", scaler.update)
    scaler.scale(run.weight.sum()).backward()
    scaler.unscale_(optimizer)
    refused("twice", scaler.unscale_, optimizer)
    scaler.step(optimizer)
    refused("stepped already", scaler.step, optimizer)
    refused("after step", scaler.unscale_, optimizer)
    scaler.update()
    refused("closure", scaler.step, optimizer, lambda: 0.0)
    refused("closure", scaler.step, optimizer, closure=lambda: 0.0)


def test_a_disabled_scaler_is_out_of_the_way():
    run = Run(GradScaler("cpu", enabled=False))
    run.step(2.0)
    assert run.weight.tolist() == [1 - 2.0**-7] * 2
    assert run.scaler.get_scale() == 1.0
    assert not run.scaler.step_skipped()
    run.scaler.load_state_dict({})
    assert pickle.loads(pickle.dumps(run.scaler)).is_enabled() is False
