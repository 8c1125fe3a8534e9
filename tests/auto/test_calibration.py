"""`fe.auto(budget=...)` in a training, calibration at conversion, and a model that only answers."""

import copy
import types
from typing import Any

import pytest
import tiny_models
import torch
from autos import batch, controller, lines, loss_of, plain, train
from blocks import Net
from support import converted, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.errors import InvalidRecipe, ShapeError
from fp8engine.files import HostCopy
from fp8engine.nn.experts import Float8Experts


class WithLoss(nn.Module):
    """Returns its loss as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        y = self.net(x)
        return types.SimpleNamespace(loss=(y - 3).square().mean(), logits=y)


def trained(budget: float | None, steps: int = 3) -> Any:
    torch.manual_seed(0)
    model = converted(WithLoss(), fe.auto(interval=1, budget=budget))
    for step in range(steps):
        model(batch(step)).loss.backward()
        model.zero_grad()
    return model


def test_the_predicted_sum_is_kept_under_the_budget():
    free = trained(None)
    cost = fe.inspect(free).totals["cost_millinats"] / 1e3
    loss = controller(free).loss
    assert loss is not None
    assert cost > 0
    share = cost / loss / 3
    kept = trained(share)
    assert 0 < fe.inspect(kept).totals["cost_millinats"] / 1e3 <= share * (controller(kept).loss or 0)
    assert [line for line in lines(kept) if "are the budget of all casts" in line]
    assert fe.inspect(kept).totals["fp8_flops_share"] > 0
    # Nothing fits into next to nothing: every forward is in 16 bits, and the report counts the backwards' FLOPs.
    none = trained(1e-9)
    assert fe.inspect(none).totals["cost_millinats"] == 0
    assert fe.inspect(none).totals["fp8_flops_share"] == pytest.approx(2 / 3, abs=0.12)
    assert not any(m.numerics.recipe.input.is_fp8 for m in none.modules() if isinstance(m, fe.Linear))


def test_the_cost_is_that_of_the_casts():
    """Of one layer: 1/2 T sum of (error of y)^2 dy^2 where the input alone is cast, as a float64 sum over a batch."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    x, dy = torch.randn(64, 64), torch.randn(64, 64) / 64
    plain_weight = copy.deepcopy(layer.weight.detach())
    model = converted(nn.Sequential(layer), fe.auto(interval=1))
    for _ in range(2):
        model(x.clone().requires_grad_()).backward(dy)
        model.zero_grad()
    found = fe.inspect(model).layers[0]
    error = (fe.quantize(x, fe.Cast(fe.E4M3)).dequantize() - x).double() @ plain_weight.double().t()
    wanted = 0.5 * 64 * float((error.square() * dy.double().square()).sum())
    # The diagonal leaves out products of two errors of a row: of 64 x 64 elements a few per cent.
    assert found["input"]["cost_millinats"] == pytest.approx(1e3 * wanted, rel=0.1)
    assert found["grad_output"]["cost_millinats"] is None


@pytest.mark.parametrize("told", [False, True])
def test_a_budget_without_a_loss_says_so(told: bool):
    model = plain(fe.auto(interval=1, budget=0.01))

    def call(x):
        y = model(x)
        if told:
            fe.scaling_state(model).see_loss(loss_of(y))
        return y

    train(model, 3, call)
    assert ("the budget of loss is not kept" in str(fe.inspect(model))) == (not told)
    for several, what in {torch.ones(2): r"shape \[2\]", None: "type NoneType", "x": "type str"}.items():
        with pytest.raises(ShapeError, match=f"a loss of {what}; want one number"):
            fe.scaling_state(model).see_loss(several)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("budget", [0, -1.0, 1.5, "much"])
def test_a_budget_is_a_share(budget):
    with pytest.raises(InvalidRecipe, match="a share of the loss"):
        fe.auto(budget=budget)


@pytest.mark.parametrize("with_loss", [False, True])
def test_example_inputs_calibrate_and_leave_the_model_as_it_was(with_loss: bool):
    torch.manual_seed(0)
    model: Any = WithLoss() if with_loss else Net()
    before, accumulated = copy.deepcopy(model.state_dict()), []
    for p in model.parameters():  # an optimizer that steps in such a hook would train the model
        p.register_post_accumulate_grad_hook(accumulated.append)
    x = batch(0).detach()
    random = torch.get_rng_state()
    converted(model, fe.auto(), example_inputs=(x,))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert accumulated == []
    assert model.training
    found = controller(model)
    assert found.step == -1
    assert set(found.choices) == set(range(len(found.layers)))
    grads = {str(m.numerics.recipe.grad_output.format) for m in model.modules() if isinstance(m, fe.Linear)}
    assert grads == ({"E4M3"} if with_loss else {"E5M2"})  # without a backward nothing is known of gradients
    chosen = dict(found.choices)
    out = model(x)
    (out.loss if with_loss else loss_of(out)).backward()
    assert found.step == 0
    assert dict(found.choices) == chosen  # what was calibrated stays when training begins


class Counts(WithLoss):
    """Writes buffers in every mode, as routers count tokens, and sets one anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("latest", None)

    def forward(self, x):
        self.calls += 1
        self.latest = x.detach().mean()
        return super().forward(x)


def test_buffers_that_a_forward_writes_are_put_back():
    model: Any = Counts()
    calls = model.calls
    converted(model, fe.auto(budget=0.005), example_inputs=(batch(0),))
    fe.flow.record(model, batch(0))
    fe.keep_budget(model, [(batch(step),) for step in range(4)])
    assert model.calls is calls
    assert (calls.item(), model.latest) == (0, None)


@pytest.mark.parametrize("options", [{"example_inputs": (torch.ones(8, 64),)}, {}], ids=["calibrated", "not"])
def test_calibration_leaves_no_copies_of_weights(options: dict):
    layers = nn.Linear(64, 64), fe.Linear(64, 64, recipe=fe.delayed(margin=2))
    model, x = converted(nn.Sequential(*layers), "auto", **options), torch.randn(8, 64, requires_grad=True)
    model(x).sum().backward()
    model(x)
    assert fe.scaling_state(model)["1.weight"].history[0] == layers[1].weight.abs().max()


def test_calibration_is_no_run_of_any_matrix_of_experts():
    model = converted(tiny_models.mixtral(), fe.auto(), example_inputs={"input_ids": torch.arange(8)[None]})
    experts = [module for module in model.modules() if isinstance(module, Float8Experts)]
    assert [numerics.ran for each in experts for numerics in each.parts.values()] == [None] * 4


def test_a_reentrant_checkpoint_calibrates_the_forward_alone_and_says_so():
    class Recomputed(WithLoss):
        def forward(self, x):
            y = checkpoint(self.net, x, use_reentrant=True)
            return types.SimpleNamespace(loss=(y - 3).square().mean(), logits=y)

    model = Recomputed()
    with pytest.warns(UserWarning, match="calibrate the forward alone"):
        converted(model, fe.auto(), example_inputs=(batch(0),))
    assert set(controller(model).choices) == set(range(len(controller(model).layers)))


def test_a_model_that_only_answers_decides_before_its_second_forward():
    torch.manual_seed(0)
    model: Any = Net()
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight[:, 5] = 0
            block.gate.weight[:, 5] = 0
            block.norm.weight[5] = 1e6
    quiet, answering = (converted(copy.deepcopy(model), fe.auto(interval=4)) for _ in range(2))
    with torch.no_grad():
        first = answering(batch(0))
        assert lines(answering) == []
        second = answering(batch(0))
        assert any("forward" in line for line in lines(answering))
        third = answering(batch(0))
        exact = model(batch(0))
    assert state_of(answering).samples is None
    assert (second - exact).square().sum() < (first - exact).square().sum()
    assert torch.equal(second, third)
    assert train(answering, 6) == train(quiet, 6)
    assert lines(answering) == lines(quiet)


@pytest.mark.parametrize("between", ["a card's copy", "a recorded flow"])
def test_the_second_forward_decides_and_nothing_before(between: str, monkeypatch: pytest.MonkeyPatch):
    model = plain()
    if between == "a card's copy":  # it has hardly begun when the second forward begins: no later one would decide
        monkeypatch.setattr(HostCopy, "done", lambda _: False)
    with torch.no_grad():
        model(batch(0))
        if between == "a recorded flow":
            fe.flow.record(model, batch(0))
        assert lines(model) == []
        model(batch(0))
    assert lines(model)
