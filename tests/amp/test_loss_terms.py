"""decorate: every term of a loss has its own weight in the gradients, whatever its way to them, or step() refuses.

The reference is the same script in FP32.  Terms that go past the model's outputs: a penalty on the weights, an
auxiliary loss that the model keeps, a penalty on the gradient of the input.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8engine.amp.decorate import decorate
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import OptimizerError

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A network that keeps an auxiliary loss, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(8, 32), nn.Linear(32, 1)
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.down(x))  # tanh: the gradient of its gradient is not zero
        self.kept = hidden.float().square().mean()
        return self.up(hidden)


def output(model: Any) -> torch.Tensor:
    return (model(X) - X[:, :1]).square().mean()


def with_gradient_penalty(model: Any) -> torch.Tensor:
    x = X.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y - X[:, :1]).square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def without_the_model(model: Any) -> torch.Tensor:
    return 0.5 * torch.stack([p.float().square().sum() for p in model.parameters()]).sum()


LOSSES = [
    output,
    lambda model: output(model) + without_the_model(model),
    lambda model: output(model) + 3.0 * model.kept,
    with_gradient_penalty,
    without_the_model,
]


def gradients(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Unscaled, in FP32."""
    if hasattr(optimizer, "unscale_"):
        optimizer.unscale_()
        optimizer.unscale_()  # once is once
    return [p.grad.float() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def start(level: str = "O1", decorated: bool = True, **given: Any) -> tuple[Any, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return decorate(model, optimizer, level=level, **given) if decorated else (model, optimizer)


@pytest.mark.parametrize(
    ("losses", "one_pass"), [*(([loss], True) for loss in LOSSES), (LOSSES * 2, True), (LOSSES * 2, False)]
)
def test_every_term_of_the_loss_has_its_gradient(losses: list[Callable], one_pass: bool, level: str):
    found = []
    for decorated in (False, True):
        model, optimizer = start(level, decorated, scaler=GradScaler("cpu", 1024.0))
        backward = optimizer.backward if decorated else torch.Tensor.backward
        for part in [losses] if one_pass else [[loss] for loss in losses]:
            backward(torch.stack([loss(model) for loss in part]).sum())
        found.append(gradients(model, optimizer))
    largest = max(float(g.abs().max()) for g in found[0])
    assert len(found[0]) == 4
    for wanted, one in zip(*found, strict=True):
        # Five matmuls and as many activations in FP16, each rounding relative 2^-11: within 2^-7 of the largest
        # gradient.  A term that lost the scale of 1024 would be nearly gone, and one that got it twice 1024 times.
        torch.testing.assert_close(one, wanted, rtol=0, atol=largest * 2.0**-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_plain_backward_is_refused_at_the_step(loss: Callable, level: str):
    model, optimizer = start(level)
    before = [p.detach().clone() for p in model.parameters()]
    for refused in (optimizer.step, optimizer.unscale_, lambda: optimizer.clip_grad_norm_(1.0)):
        optimizer.zero_grad()
        loss(model).backward()
        with pytest.raises(OptimizerError, match=r"write optimizer.backward\(loss\) for loss.backward\(\)"):
            refused()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ["before", "after", "between"])
def test_a_plain_backward_beside_a_scaled_one_is_refused(level: str, set_to_none: bool, order: str):
    model, optimizer = start(level, scaler=GradScaler("cpu", 64.0))
    for zeroed in (model.zero_grad, optimizer.zero_grad):
        zeroed(set_to_none)
        optimizer.backward(output(model))
        optimizer.step()
    model.zero_grad(set_to_none)
    for scaled in {"before": (False, True), "after": (True, False), "between": (True, False, True)}[order]:
        (optimizer.backward if scaled else torch.Tensor.backward)((output if scaled else without_the_model)(model))
    with pytest.raises(OptimizerError, match=r"parameter 0 \(32, 8\) .*for every loss.backward\(\)"):
        optimizer.step()
    optimizer.zero_grad(set_to_none)
    optimizer.backward(output(model))
    optimizer.step()
    assert optimizer.scaler.stats.skipped == 0


def test_a_plain_backward_into_a_parameter_that_the_scaled_one_did_not_reach():
    model, optimizer = start()
    optimizer.backward(model.up(torch.ones(2, 32)).sum())
    model.down.weight.square().sum().backward()
    with pytest.raises(OptimizerError, match=r"parameter 0 \(32, 8\)"):
        optimizer.step()


def test_backward_and_step_out_of_their_order():
    model, optimizer = start(scaler=GradScaler("cpu", 64.0))
    backward = lambda: optimizer.backward(output(model))  # noqa: E731
    for _ in range(2):  # before any backward, and after a step
        for refused in (optimizer.step, optimizer.unscale_):
            with pytest.raises(OptimizerError, match=r"no parameter of SGD has a gradient: call optimizer.backward"):
                refused()
        backward()
        optimizer.step()
        with pytest.raises(OptimizerError, match=r"or were stepped with already.*once before every step\(\)"):
            optimizer.step()
        optimizer.zero_grad()
    backward()
    optimizer.step()
    backward()
    with pytest.raises(OptimizerError, match=r"in part.*optimizer.zero_grad\(\) after step\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    backward()
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(OptimizerError, match=r"after the last backward"):
        backward()


def test_two_models_one_fed_by_the_other():
    for together in (True, False):
        first, second = Net(), nn.Linear(1, 1)
        optimizers: Any = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        if together:
            _, optimizers = decorate([first, second], optimizers, scaler=GradScaler("cpu", 64.0))
        else:
            optimizers = [decorate(m, o)[1] for m, o in zip((first, second), optimizers, strict=True)]
        loss = second(first(X)).square().mean() + first(X).square().mean()
        wanted = torch.autograd.grad(loss, first.up.bias, retain_graph=True)[0]
        optimizers[1].backward(loss)
        if together:
            optimizers[0].unscale_()
            # two sums of the same FP16 products, one of them 64 times as large: roundings of 2^-11 each
            torch.testing.assert_close(first.up.bias.grad, wanted, rtol=2.0**-8, atol=0)
        else:
            with pytest.raises(OptimizerError, match="decorated in the same call"):
                optimizers[0].step()


def test_a_discriminators_gradients_of_the_generators_pass():
    first, second = Net(), nn.Linear(1, 1)
    apart: Any = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    _, (one, two) = decorate([first, second], apart, scaler=GradScaler("cpu", 64.0))
    for _ in range(3):
        two.zero_grad()
        two.backward(second(first(X).detach()).square().mean())
        two.step()
        one.zero_grad()
        one.backward(second(first(X)).square().mean())
        one.step()
    assert (one.scaler.stats.skipped, one.scaler.stats.iterations) == (0, 3)


def test_an_optimizer_is_copied_between_backward_and_step():
    model: Any = nn.Linear(2, 1)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), 0.1), scaler=GradScaler("cpu"))
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 2)).sum())
        assert copy.deepcopy(optimizer).scaler.get_scale() == optimizer.scaler.get_scale()
