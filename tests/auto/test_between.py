"""A decision is adopted between optimizer steps: never between microbatches, nor by a second forward."""

from functools import partial
from typing import Any

import pytest
import torch
from autos import batch, controller, decided, loss_of, plain

import fp8engine as fe
from fp8engine.auto import between


def formats(model: Any) -> list[str]:
    return [str(numerics.recipe) for numerics in controller(model).layers]


def by_torch(model: Any, foreach: bool | None = None) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3, foreach=foreach)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(model: Any, unseen: bool = False) -> Any:
    """unseen: no version counter moves; the gradients go."""

    def step() -> None:
        for p in model.parameters():
            if p.grad is not None:
                (p.data if unseen else p.detach()).sub_(p.grad, alpha=1e-3)
                p.grad = None if unseen else p.grad.zero_()

    return step


STEPS = {"torch": by_torch, "singly": partial(by_torch, foreach=False)}
STEPS |= {"by hand": by_hand, "unseen": partial(by_hand, unseen=True)}


def microbatches(model: Any, number: int) -> None:
    for i in range(3):
        loss_of(model(batch(3 * number + i))).backward()


def siamese(model: Any, number: int) -> None:
    first, second = (model(batch(2 * number + i)) for i in range(2))
    (loss_of(first) - loss_of(second)).square().backward()


def pipeline(model: Any, number: int) -> None:
    """More forwards than a sampled step waits for its backward."""
    losses = [loss_of(model(batch(6 * number + i))) for i in range(6)]
    for loss in losses:
        loss.backward()


def evaluated(model: Any, number: int) -> None:
    microbatches(model, number)
    with torch.no_grad():
        model(batch(0))
    microbatches(model, number)


@pytest.mark.parametrize("step_of", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("forwards", [microbatches, siamese, pipeline, evaluated])
def test_formats_change_between_optimizer_steps_alone(forwards: Any, step_of: Any):
    model = plain(fe.auto(interval=1))
    step, changes = step_of(model), 0
    for number in range(6):
        seen = []
        handle = model.blocks[0].up.register_forward_pre_hook(lambda *_, seen=seen: seen.append(formats(model)))
        forwards(model, number)
        handle.remove()
        assert all(each == seen[0] for each in seen), number
        assert formats(model) == seen[0]
        changes += seen[0] != formats(plain(fe.auto(interval=1))) if number == 1 else 0
        step()
    assert changes == 1, "what the first optimizer step has shown is adopted at the second"
    assert len(decided(model)) > 1


def test_where_nothing_tells_a_decision_is_waited_for_and_then_adopted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(between, "PATIENCE", 6)
    model = plain(fe.auto(interval=1))
    for number in range(12):
        loss = loss_of(model(batch(number)))
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=1e-3)
    assert decided(model)[0] == 7


def test_a_write_after_an_evaluation_adopts_nothing_between_the_first_microbatches():
    model = plain(fe.auto(interval=1))
    with torch.no_grad():
        model(batch(0))
        for p in model.parameters():
            p.mul_(1.0)
    seen = []
    model.blocks[0].up.register_forward_pre_hook(lambda *_: seen.append(formats(model)))
    microbatches(model, 0)
    assert seen == [seen[0]] * 3
