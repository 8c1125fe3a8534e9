"""`auto` under torch.func: inside a transform nothing is sampled or decided, and what was decided so far computes."""

from typing import Any

import pytest
import torch
from autos import batch, controller, lines, loss_of, plain, train, twin
from support import converted, same, state_of, tables
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vjp

import fp8engine as fe
from fp8engine.auto.schedule import sampled_step


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def loss(model: Any, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return loss_of(functional_call(model, parameters, (x,)))


def gradients(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return grad(lambda parameters: loss(model, parameters, x))(values(model))


def fixed(model: Any) -> Any:
    """A copy that neither samples nor decides."""
    other = twin(model)
    state = state_of(other)
    state.samples = None
    state.on_step = lambda backward: None
    return other


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return list(mine) == list(theirs) and same(list(mine.values()), list(theirs.values()))


@pytest.mark.parametrize("recipe", [None, fe.auto(interval=1), fe.auto(interval=4, objective="speed")])
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_grad_and_vjp_compute_under_the_recipes_decided_so_far(recipe: Any, steps: int):
    model = plain(recipe)
    train(model, steps)
    decided = lines(model)
    x = batch(steps).detach()
    for _ in range(2):
        expected = gradients(fixed(model), x)
        assert equal(gradients(model, x), expected)
        _, back, *_ = vjp(lambda parameters: loss(model, parameters, x), values(model))
        assert equal(back(torch.ones(()))[0], expected)
    assert lines(model) == decided
    assert controller(model).step == steps - 1
    assert fe.inspect(model).auto.failed == ()


def test_a_training_by_transforms_alone_keeps_the_formats_it_began_with():
    ours, fixed = plain(), plain("current")
    for step in range(3):
        for model in (ours, fixed):
            found = gradients(model, batch(step).detach())
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in found:
                        p -= 0.02 * found[name]
    assert same(list(ours.parameters()), list(fixed.parameters()))
    assert lines(ours) == []
    assert all("torch.func's transforms" in row["reason"] for row in fe.inspect(ours).layers if row["rows"])


@pytest.mark.parametrize("where", ["between steps", "between a forward and its backward"])
@pytest.mark.parametrize("what", ["grad", "vjp without a backward", "see_loss"])
def test_transforms_between_steps_change_no_sample_and_no_decision(where: str, what: str):
    def transform(model: Any) -> None:
        x = batch(0).detach()
        if what == "grad":
            gradients(model, x)
        elif what == "see_loss":

            def seen(parameters):
                found = loss(model, parameters, x)
                fe.scaling_state(model).see_loss(found)
                return found

            grad_and_value(seen)(values(model))
        else:
            vjp(lambda parameters: loss(model, parameters, x), values(model))

    quiet, disturbed = plain(), plain()
    steps = sampled_step(3, 4) + 2
    losses = train(quiet, steps)
    if where == "between steps":
        assert train(disturbed, steps, between=lambda step: transform(disturbed)) == losses
    else:

        def call(x):
            y = disturbed(x)
            transform(disturbed)
            return y

        assert train(disturbed, steps, call) == losses
    assert lines(quiet) == lines(disturbed) != []
    seen = (controller(model).history.samples for model in (quiet, disturbed))
    mine, theirs = ({slot: list(looks) for slot, looks in each.items()} for each in seen)
    assert mine == theirs


def test_functional_call_without_a_transform_is_a_step():
    called, functional = plain(), plain()
    losses = train(called, 9)
    assert (
        train(functional, 9, lambda x: functional_call(functional, dict(functional.named_parameters()), (x,))) == losses
    )
    assert lines(called) == lines(functional) != []
    assert same(tables(called), tables(functional))


def test_what_auto_begins_with_has_the_gradients_of_backward():
    """Bit for bit in a model whose other layers torch.func computes as backward does (GELU; SiLU is an ulp off)."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), "auto")
    x = torch.randn(8, 32)
    found = gradients(model, x)
    loss_of(model(x)).backward()
    assert equal(found, {name: p.grad for name, p in model.named_parameters()})
