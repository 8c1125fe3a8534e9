"""`auto` under torch.func: functional_call is a step; a transform, which FP8 layers refuse, is none and not sampled."""

from typing import Any

import pytest
import torch
from autos import batch, controller, lines, loss_of, plain, train
from support import same, state_of, tables
from torch.func import functional_call, grad, grad_and_value, vjp

import fp8engine as fe
from fp8engine.auto.schedule import sampled_step
from fp8engine.numerics.recipe import resolve


def loss(model: Any, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    found = loss_of(functional_call(model, parameters, (x,)))
    fe.scaling_state(model).see_loss(found)
    return found


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


TRANSFORMS = {
    "grad": lambda model, x: grad(lambda p: loss(model, p, x))(values(model)),
    "grad_and_value": lambda model, x: grad_and_value(lambda p: loss(model, p, x))(values(model)),
    "vjp": lambda model, x: vjp(lambda p: loss(model, p, x), values(model)),
}


def looks(model: Any) -> dict:
    return {slot: list(seen) for slot, seen in controller(model).history.samples.items()}


@pytest.mark.parametrize("where", ["between steps", "between a forward and its backward"])
@pytest.mark.parametrize("what", TRANSFORMS)
def test_a_refused_transform_changes_no_sample_and_no_decision(where: str, what: str):
    quiet, disturbed = plain(), plain()

    def transform(*_: Any) -> None:
        with pytest.raises(fe.errors.GradientError, match=r"does not take torch\.func's transforms"):
            TRANSFORMS[what](disturbed, batch(0).detach())

    def call(x):
        y = disturbed(x)
        transform()
        return y

    steps = sampled_step(3, 4) + 2
    where_to: Any = {"between": transform} if where == "between steps" else {"call": call}
    assert train(disturbed, steps, **where_to) == train(quiet, steps)
    assert lines(quiet) == lines(disturbed) != []
    assert looks(quiet) == looks(disturbed)


@pytest.mark.parametrize("what", TRANSFORMS)
def test_layers_decided_to_be_in_16_bits_take_them_and_are_not_sampled_there(what: str):
    quiet, disturbed, fixed = plain(), plain(), plain("bf16")
    for model in (quiet, disturbed):
        for numerics in controller(model).layers:
            numerics.adopt(resolve("bf16"))
    for model in (quiet, disturbed):
        y = model(batch(0))
        samples: Any = state_of(model).samples
        if model is disturbed:
            before = [part.clone() for part in samples.parts]
            found = TRANSFORMS[what](model, 7 * batch(1).detach())
            assert same(before, samples.parts)
            if what == "grad":
                expected = TRANSFORMS[what](fixed, 7 * batch(1).detach())
                assert same(list(found.values()), list(expected.values()))
        loss_of(y).backward()
        model.zero_grad()
    assert train(quiet, 4, start=1) == train(disturbed, 4, start=1)
    assert lines(quiet) == lines(disturbed)
    assert looks(quiet) == looks(disturbed) != {}
    assert fe.inspect(disturbed).auto.failed == ()


def test_functional_call_without_a_transform_is_a_step():
    called, functional = plain(), plain()

    def call(x):
        return functional_call(functional, dict(functional.named_parameters()), (x,))

    losses = train(called, 9)
    assert train(functional, 9, call) == losses
    assert lines(called) == lines(functional) != []
    assert same(tables(called), tables(functional))
