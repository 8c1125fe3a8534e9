"""fe.keep_budget_in_training: the budget is kept on a training's own batches, and nothing else of it changes."""

import copy
import logging
import statistics
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from autos import controller
from support import converted, same
from torch import nn

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.errors import BudgetWarning, StateError
from tests.auto.test_keep_budget import SHARE, Taught, costs, forwards, plain_loss, taught, text

BATCHES = 4
OTHERS = [text(seed) for seed in range(100, 116)]


def under(budget: float | None) -> Any:
    return converted(taught(), fe.auto(budget=budget, interval=1))


def train(model: nn.Module, steps: int, first: int = 0, micro: int = 1, loss_of: Any = None) -> list[float]:
    """Losses of that many optimizer steps, each of `micro` batches that nobody has seen before.

    loss_of(number): of a batch; by default the model's on that text.
    """
    loss_of = loss_of or (lambda number: model(*text(1000 + number))["loss"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    losses = []
    for number in range(first * micro, (first + steps) * micro):
        loss = loss_of(number)
        fe.scaling_state(model).see_loss(loss)
        (loss / micro).backward()
        losses.append(float(loss.detach()))
        if number % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_training_without_text_keeps_the_budget_on_its_own_batches():
    free = under(None)
    train(free, 6)
    whole = statistics.fmean(costs(free, OTHERS))
    assert whole > 0
    model = under(0.3 * whole / plain_loss(free, OTHERS))
    fe.keep_budget_in_training(model, 2 * BATCHES)
    train(model, 2 * BATCHES)
    assert controller(model).spent is None
    train(model, 1, first=2 * BATCHES)
    spent: Any = controller(model).spent
    assert spent.kept
    assert spent.batches == BATCHES  # half of those kept check
    found = costs(model, OTHERS)
    error = statistics.stdev(found) / len(found) ** 0.5
    assert statistics.fmean(found) <= spent.budget * spent.loss + 3 * error


def test_it_measures_before_steps_5_and_20_until_it_is_removed_and_says_how_long_it_took(caplog):
    model = under(0.5)
    evaluated: list[bool] = []
    model.register_forward_pre_hook(lambda model, args: evaluated.append(True) if not model.training else None)
    fe.keep_budget_in_training(model, BATCHES)
    seen = []
    with caplog.at_level(logging.WARNING, logger="fp8engine.auto.measured"):
        for number in range(1, 25):
            evaluated.clear()
            train(model, 1, first=number)
            if evaluated:
                seen.append(number)
                assert 2 * BATCHES <= len(evaluated) <= 9 * BATCHES
        assert seen == [5, 20]
        assert [record.args[0] for record in caplog.records] == seen
        assert "kept" in caplog.records[0].getMessage()
        removed = under(0.5)
        fe.keep_budget_in_training(removed, BATCHES).remove()
        train(removed, BATCHES + 1)
    assert len(caplog.records) == 2


def test_nothing_but_the_recipes_changes():
    plain, watched = under(1.0), under(1.0)
    fe.keep_budget_in_training(watched, BATCHES)
    torch.manual_seed(1)
    without = train(plain, 8)
    torch.manual_seed(1)
    assert train(watched, 8) == without
    assert controller(watched).spent is not None
    assert watched.training
    assert same(list(plain.parameters()), list(watched.parameters()))


def test_microbatches_of_one_optimizer_step_have_one_recipe():
    model = under(SHARE)
    seen = []
    model.register_forward_pre_hook(lambda model, args: seen.append((model.training, forwards(model))))
    fe.keep_budget_in_training(model, BATCHES)
    train(model, 8, micro=3)
    recipes = [recipe for training, recipe in seen if training]
    assert len(recipes) == 24
    assert all(recipes[at] == recipes[at + 1] == recipes[at + 2] for at in range(3, 24, 3))
    assert any(not training for training, _ in seen)


def test_batches_are_kept_as_they_were():
    held, found = [torch.empty_like(part) for part in text(0)], []
    for reuse in (True, False):
        model = under(0.5)
        fe.keep_budget_in_training(model, BATCHES)

        def loss_of(number: int, model=model, reuse=reuse) -> torch.Tensor:
            filled = [part.copy_(new) for part, new in zip(held, text(number), strict=True)]
            return model(*(filled if reuse else text(number)))["loss"]

        torch.manual_seed(2)
        train(model, 5, loss_of=loss_of)
        found.append(controller(model).spent)
    assert found[0] == found[1] is not None


@pytest.mark.filterwarnings("ignore:auto samples and decides between graphs:fp8engine.errors.SamplingWarning")
def test_a_graph_of_the_whole_model_goes_on_unmeasured():
    model = under(0.5)
    train(model, 2)
    fe.keep_budget_in_training(model, BATCHES)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for number in range(BATCHES + 2):
        compiled(*text(number))["loss"].backward()
    assert controller(model).spent is None


def test_a_copy_measures_for_itself():
    model = under(0.5)
    fe.keep_budget_in_training(model, BATCHES)
    train(model, 3)
    other = copy.deepcopy(model)
    train(other, 3, first=3)
    assert controller(other).spent is not None
    assert controller(model).spent is None


def _on_rank(rank: int, ranks: int) -> tuple[list[str], object]:
    """A rank of DistributedDataParallel whose batches are its own."""
    model = under(SHARE)
    fe.keep_budget_in_training(model, BATCHES)
    parallel = nn.parallel.DistributedDataParallel(model)
    train(model, BATCHES + 2, loss_of=lambda number: parallel(*text(100 * rank + number))["loss"])
    return forwards(model), controller(model).spent


@pytest.mark.slow
def test_ranks_measure_at_the_same_step_and_decide_alike():
    (first, spent), (second, other) = run(_on_rank, 2)
    assert spent is not None
    assert (first, spent) == (second, other)


def test_what_cannot_be_measured_is_said_and_tried_again():
    class Silent(Taught):
        def forward(self, x, target):
            return super().forward(x, target)["loss"][None, None].expand(2, 1)  # no one number

    torch.manual_seed(0)
    model: Any = converted(Silent(), fe.auto(budget=0.5, interval=1))
    fe.keep_budget_in_training(model, BATCHES)
    said = r"returns no loss of one number.*measured again at step 20"
    for number in range(6):
        with pytest.warns(BudgetWarning, match=said) if number == 4 else nullcontext():
            train(model, 1, number, loss_of=lambda at: model(*text(at)).mean())
        assert controller(model).spent is None


@pytest.mark.parametrize(
    ("model", "batches", "why"),
    [
        (lambda: under(0.5), 3, "batches=3; want a whole number from 4 on"),
        (lambda: under(0.5), 4.5, "batches=4.5; want a whole number from 4 on"),
        (lambda: under(0.5), "8", "batches='8'; want a whole number from 4 on"),
        (lambda: under(None), 8, "no layer has a budget"),
        (lambda: converted(taught(), "current"), 8, "no layer is under `auto`"),
    ],
)
def test_what_is_refused(model, batches: Any, why: str):
    with pytest.raises(StateError, match=f"keep_budget_in_training: {why}"):
        fe.keep_budget_in_training(model(), batches)
