"""GradScaler with optimizers that handle the scale themselves: what torch's scaler does, step by step.

Three kinds have `_step_supports_amp_scaling`: torch's fused ones, which read `grad_scale` and `found_inf`; those whose
step takes a `grad_scaler` and calls it; and those that take it and never call it.
"""

import functools
import math
from typing import Any

import pytest
import torch
from scaled_run import scaled_step
from torch import nn

from fp8engine.amp.master import MasterWeights
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import OptimizerError

KINDS = (torch.amp.GradScaler, GradScaler)
VALUES = (1.0, math.inf, 2.0, math.nan, -math.inf, 1.0, 1.0, 0.5)


class Own(torch.optim.SGD):
    """Steps with or without a scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        assert grad_scaler is None
        super().step(closure)


class Itself(Own):
    """Unscales and skips in its own step."""

    def step(self, closure=None, *, grad_scaler):
        grad_scaler.unscale_(self)
        if not any(found.item() for found in grad_scaler._found_inf_per_device(self).values()):
            super().step(closure)
        return 7.0


class Checks(Own):
    """Looks for Inf and NaN through the scaler, divides by the scale itself."""

    def step(self, closure=None, *, grad_scaler):
        if not any(found.item() for found in grad_scaler._check_inf_per_device(self).values()):
            for p in self.param_groups[0]["params"]:
                p.grad = None if p.grad is None else p.grad.div_(grad_scaler._get_scale_async())
            super().step(closure)


class Alone(Own):
    """Asks the scaler for nothing but the scale."""

    def step(self, closure=None, *, grad_scaler):
        for p in self.param_groups[0]["params"]:
            p.grad.div_(grad_scaler._get_scale_async()).nan_to_num_(0.0, 0.0, 0.0)
        super().step(closure)


FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
OPTIMIZERS: dict[str, Any] = {"unscales": Itself, "checks": Checks}
OPTIMIZERS |= {name: functools.partial(getattr(torch.optim, name), fused=True) for name in FUSED}


pytestmark = pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")


@pytest.mark.parametrize(("name", "clipped"), [*((n, False) for n in OPTIMIZERS), *((n, True) for n in FUSED)])
def test_steps_scales_and_results_are_torchs(name: str, clipped: bool):
    runs = []
    for kind in KINDS:
        weight, seen = nn.Parameter(torch.ones(2)), []
        optimizer = OPTIMIZERS[name]([weight], lr=0.125)
        scaler: Any = kind("cpu", 16.0, growth_interval=2)
        for value in VALUES:
            optimizer.zero_grad()
            scaler.scale((weight * value).sum()).backward()
            if clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([weight], 1.0)
            result = scaler.step(optimizer)
            scaler.update()
            seen.append((result, weight.tolist(), scaler.get_scale(), scaler._growth_tracker.item()))
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
        runs.append(str(seen))
    assert runs[0] == runs[1]
    assert isinstance(scaler, GradScaler)
    assert (scaler.stats.iterations, scaler.stats.skipped) == (8, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_tells_the_scaler_nothing(kind: Any):
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, beside = Alone([weight], lr=0.125), torch.optim.SGD([other], lr=0.125)
    scaler: Any = kind("cpu", 16.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.875] * 2
    with pytest.raises((AssertionError, OptimizerError), match=r"No inf checks|takes a grad_scaler must"):
        scaler.update()
    with pytest.raises(RuntimeError, match="already"):
        scaler.step(optimizer)
    scaler.scale(other.sum() * math.inf).backward()
    scaler.step(beside)
    scaler.update()
    assert (scaler.get_scale(), other.tolist()) == (8.0, [1.0] * 2)
    if kind is GradScaler:
        assert [scaler.step_skipped(one) for one in (beside, optimizer)] == [True, False]


def scales_itself(name: str) -> bool:
    """Whether this torch's optimizer handles the scale: its fused Adagrad does not in 2.11."""
    return getattr(OPTIMIZERS[name]([nn.Parameter(torch.ones(2))], lr=0.125), "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("name", ["unscales", "checks", *filter(scales_itself, FUSED)])
def test_one_of_two_optimizers_without_a_gradient(name: str):
    runs = []
    for kind in KINDS:
        weight, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer, without = OPTIMIZERS[name]([weight], lr=0.125), OPTIMIZERS[name]([idle], lr=0.125)
        scaler = kind("cpu", 16.0, growth_interval=1)
        scaler.scale(weight.sum()).backward()
        for one in (optimizer, without):
            scaler.step(one)
        scaler.update()
        runs.append((weight.tolist(), idle.tolist(), scaler.get_scale()))
    assert runs[0] == runs[1]
    assert runs[0][1:] == ([1.0] * 2, 32.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_warning_that_torch_gives_is_given(kind: Any):
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = Itself([weight], lr=0.125), kind("cpu", 16.0)
    scaler.scale(weight.sum()).backward()
    with pytest.warns(FutureWarning, match="stop passing itself") as told:
        scaler.step(optimizer)
    assert len(told) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_under_master_weights_the_scaler_unscales(kind: Any):
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = MasterWeights(Own([weight], lr=2.0**-10)), kind("cpu", 16.0)
    for factor in (2.0, math.inf):
        scaled_step(scaler, optimizer, (weight.float() * factor).sum())
    assert weight.tolist() == [1 - 2.0**-9] * 2
    assert scaler.get_scale() == 8.0
