"""MasterWeights: a gradient written by hand is stepped with or refused, whatever wrote it and whatever was read before.

`.data`, NumPy and collectives write without counting a version: neither the tensor's identity nor its version tells.
"""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_counts import WAITS, Counted
from torch import nn

from fp8engine.amp.master import MasterWeights
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import OptimizerError

LR = 2.0**-6


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda grad: grad.clamp_(-1, 1),
    "through data": lambda grad: grad.data.clamp_(-1, 1),
    "through NumPy": lambda grad: grad.numpy().clip(-1, 1, out=grad.numpy()),
}
READS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda optimizer: None,
    "the learning rate": lambda optimizer: optimizer.param_groups[0]["lr"],
    "the masters": lambda optimizer: list(optimizer.master_parameters()),
}


def weights() -> list[Any]:
    return [nn.Parameter(torch.ones(n, dtype=torch.float16)) for n in (1, 7, 40)]


def loss(params: list[nn.Parameter]) -> torch.Tensor:
    """The gradients are 0.5 of the first, which no clamp changes, and 2 and 3 of the others."""
    first, second, third = (p.float().sum() for p in params)
    return 0.5 * first + 2 * second + 3 * third


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_a_written_gradient_is_stepped_with(write: str, read: str):
    params = weights()
    optimizer = MasterWeights(torch.optim.SGD(params, lr=LR))
    for step in range(1, 4):
        optimizer.zero_grad()
        loss(params).backward()
        READS[read](optimizer)
        for p in params:
            WRITES[write](p.grad)
        optimizer.step()
        # powers of two: no rounding
        assert [p[0].item() for p in params] == [1 - step * LR * g for g in (0.5, 1.0, 1.0)]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("smallest", [0.5, 0.0])
def test_a_gradient_written_after_its_copy_was_unscaled_is_refused(
    smallest: float, clipped: bool, write: str, kind: Any
):
    params = weights()
    optimizer, scaler = MasterWeights(torch.optim.SGD(params, lr=LR)), kind("cpu", 16.0)
    scaler.scale(loss(params) - (0.5 - smallest) * params[0].float().sum()).backward()
    scaler.unscale_(optimizer)
    if clipped:
        nn.utils.clip_grad_norm_(optimizer.master_parameters(), 1e-3)
    WRITES[write](params[1].grad)
    with pytest.raises(OptimizerError, match=r"parameter 1 \(7,\) was changed after its FP32 copy"):
        scaler.step(optimizer)
    assert [p[0].item() for p in params] == [1.0] * 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_a_gradient_written_before_the_scaler_has_it(write: str, read: str, fused: bool):
    params = weights()
    optimizer, scaler = MasterWeights(torch.optim.SGD(params, lr=LR, fused=fused)), GradScaler("cpu", 0.25)
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(4 * factor * loss(params)).backward()
        READS[read](optimizer)
        for p in params:
            WRITES[write](p.grad)
            if factor == math.inf:  # which clamping has made finite
                p.grad.div_(0)
        if write != "in place" and read != "nothing" and not fused:
            with pytest.raises(OptimizerError, match="parameter 1"):
                scaler.step(optimizer)
            return
        scaler.step(optimizer)
        scaler.update()
    # the scaled gradients were 0.5, and 2 and 3 clamped to 1; the true ones are four times as large
    assert [p[0].item() for p in params] == [1 - LR * g for g in (2.0, 4.0, 4.0)]
    assert scaler.get_scale() == 0.125


def test_a_backward_pass_may_add_to_gradients_whose_copies_were_clipped():
    params = weights()
    optimizer = MasterWeights(torch.optim.SGD(params, lr=LR))
    loss(params).backward()
    nn.utils.clip_grad_norm_(optimizer.master_parameters(), 1e-3)
    loss(params).backward()
    optimizer.step()
    assert [p[0].item() for p in params] == [1 - LR * 2 * g for g in (0.5, 2.0, 3.0)]


def test_parameters_outlive_their_optimizer():
    params = weights()
    optimizer = MasterWeights(torch.optim.SGD(params, lr=LR))
    gone = [weakref.ref(master) for master in optimizer.master_parameters()]
    del optimizer
    gc.collect()
    assert [master() for master in gone] == [None] * 3
    loss(params).backward()
    assert [p.grad[0].item() for p in params] == [0.5, 2.0, 3.0]


def test_a_plain_step_and_a_fused_one_wait_for_nothing():
    params, scaler = weights(), torch.amp.GradScaler("cpu", 16.0)
    optimizer: Any = MasterWeights(torch.optim.SGD(params, lr=LR, fused=True))
    loss(params).backward()
    with Counted(*WAITS) as waits:
        optimizer.step()
    optimizer.zero_grad()
    scaler.scale(loss(params)).backward()
    with waits:
        scaler.step(optimizer)
    assert waits.count == 0
