"""The loss scaler beside FP8: when the loss scale changes, the histories of delayed scaling follow."""

import pytest
import torch
from support import converted
from torch import nn

import fp8engine as fe


def train(joined: bool, first: float, growth: float, steps: int = 6) -> tuple[list[float], int, list[float]]:
    """Losses, recasts of gradients, and the scale factors' histories of a model whose loss scale grows every step."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), fe.delayed(history=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same gradients every step
    scaler = fe.amp.GradScaler("cpu", init_scale=first, growth_interval=1, growth_factor=growth)
    if joined:
        scaler.on_scale_change(fe.scaling_state(model).rescale_gradients)
    x, losses, scales = torch.randn(16, 32), [], []
    for _ in range(steps):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(fe.scaling_state(model)["0.grad_output"].history[:1].sum().item())
    recasts = sum(int(fe.scaling_state(model)[f"{layer}.grad_output"].recasts) for layer in "02")
    return losses, recasts, scales


def test_a_larger_loss_scale_saturates_no_prediction_when_the_histories_follow():
    alone, joined = train(False, 2.0**4, 4.0), train(True, 2.0**4, 4.0)
    # The first step of two layers measures, then each of five steps has gradients four times the predicted ones.
    assert alone[1] == 2 * 5
    assert joined[1] == 0
    assert alone[0] == joined[0], "the same losses: a recast repairs what a prediction spoils"


def test_the_histories_are_those_of_a_run_at_that_loss_scale():
    *_, moved = train(True, 2.0**4, 2.0, steps=4)
    *_, fixed = train(True, 2.0**8, 1.0 + 1e-9, steps=4)
    assert moved[-1] == pytest.approx(fixed[-1], rel=1e-6)
