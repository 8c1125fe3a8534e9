"""fe.auto where a flow is known: results stored in FP8, why, repeated from a plan, resumed from a checkpoint."""

import json
from types import SimpleNamespace

import pytest
import torch
from autos import Stored, plan_of
from support import converted, numerics_of, state_of
from torch import nn

import fp8engine as fe
from fp8engine.auto.schedule import sampled_step
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.report.state import controllers_of

X = 64


def reader(kind: str, name: str = "") -> SimpleNamespace:
    """A stand-in of flow's Consumer."""
    return SimpleNamespace(kind=kind, name=name)


FLOW = {"up": [reader("matmul", "down")], "down": [reader("activation", "relu")], "last": [reader("output")]}


def net(recipe=None, flow=FLOW, between: nn.Module | None = None, **options) -> Stored:
    torch.manual_seed(5)
    model = converted(Stored(between), recipe or fe.auto(interval=4), **options)
    for controller in controllers_of(model):
        controller.follow(flow)
    return model


def train(model: Stored, steps: int, jump: int = -1, start: int = 0) -> list[float]:
    """Losses of SGD on the same numbers every time; `jump`: the step whose input is 20 times as large."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(start, start + steps):
        x = torch.randn(48, X, generator=torch.Generator().manual_seed(step)) * (20.0 if step == jump else 1.0)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outputs(model: nn.Module) -> list[dict]:
    """Decisions about results."""
    return [line for line in fe.inspect(model).decisions if line["slot"].endswith(".output")]


def test_a_result_that_a_matmul_alone_reads_is_stored_in_fp8_and_the_report_says_so():
    model = net()
    train(model, 8)
    (line,) = outputs(model)
    assert (line["step"], line["slot"], line["before"], line["after"]) == (1, "up.output", "16 bits", "E4M3/tensor")
    assert line["why"] == "all that read it read FP8: down"
    assert 31 < line["sqnr_db"] < 32
    report = fe.inspect(model)
    up, down, last = report.layers
    assert (up["output"]["format"], up["output"]["cast"]) == ("E4M3", "E4M3 per tensor (delayed)")
    assert up["output"]["consumers"] == ["matmul down"]
    assert down["output"]["reason"] == "an activation of its own reads it"
    assert last["output"]["reason"] == "it leaves the model"
    assert down["output"]["format"] == "float32"
    # step 0 before the look, step 1 finds the scale, 2 to 7 are in FP8
    assert (up["output"]["calls"], down["input"]["ready"]) == (7, 6)
    assert "E4M3 per tensor (delayed)" in report.table()
    json.dumps(report.to_dict())
    assert "down.output" not in list(fe.scaling_state(model))
    assert isinstance(model.up(torch.randn(2, X)), Float8Tensor)


def test_without_a_flow_nothing_is_stored():
    model = net(flow={})
    train(model, 8)
    assert outputs(model) == []
    assert type(model.up(torch.randn(2, X))) is torch.Tensor
    assert state_of(model).live_2S.shape[1] == 9


@pytest.mark.parametrize("options", [{}, {"freeze_after": 6}], ids=["", "frozen"])
def test_a_plan_repeats_the_run_bit_for_bit(options: dict, tmp_path):
    model = net(fe.auto(interval=4, **options))
    want = train(model, 24, jump=10)
    assert [line["after"] for line in outputs(model)] == ["E4M3/tensor", "E4M3/tensor margin 2"][: 2 - len(options)]
    if options:
        assert numerics_of(model.up).recipe.stored_margin == fe.scaling_state(model)["up.output"].margin == 0
    again = net(plan_of(model, tmp_path))
    assert train(again, 24, jump=10) == want
    assert outputs(again) == outputs(model)


def test_saturation_is_answered_at_the_next_step_and_logged_at_the_next_look():
    """With the share of the elements that saturated since the look before: of all steps it is a third of that."""
    model, counted = net(), {}
    for step in range(18):
        train(model, 1, jump=10, start=step)
        if step == 11:
            assert len(outputs(model)) == 1
        if slot := fe.scaling_state(model).get("up.output"):
            assert slot.margin == (0 if step <= 10 else 2)
            counted[step] = torch.stack([slot.saturated, slot.elements])
    line = outputs(model)[-1]
    last, before = (sampled_step(number, 4) for number in (2, 1))
    assert line["step"] == last + 1
    saturated, elements = (counted[last] - counted[before]).tolist()
    why = "of the elements saturated under a predicted scale: margin 2"
    assert line["why"] == f"{saturated / elements:.2%} {why}"
    assert saturated / elements > 2 * counted[last][0] / counted[last][1] > 0.02


def test_answers_before_training_leave_no_stored_result_behind():
    quiet, answering = net(), net()
    with torch.no_grad():
        for _ in range(3):
            answering(torch.randn(48, X, generator=torch.Generator().manual_seed(9)))
    assert outputs(answering)
    assert train(answering, 6) == train(quiet, 6)
    assert outputs(answering) == outputs(quiet)


def test_what_takes_the_codes_apart_on_the_way_is_found_out():
    model = net(between=nn.Tanh())  # flow was wrong, or the model has changed
    train(model, 16)
    lines = outputs(model)
    assert [line["after"] for line in lines] == ["E4M3/tensor", "16 bits"]
    assert "down reads it, and got no codes since the last look" in lines[1]["why"]
    assert type(model.up(torch.randn(2, X))) is torch.Tensor
    assert fe.inspect(model).layers[0]["output"]["format"] == "float32"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"overrides": {"down": "rowwise"}}, "down reads it, and casts per row"),
        ({"overrides": {"down": "bf16"}}, "down reads it, and its matmul is in 16 bits"),
        ({"skip": lambda name, module: name == "down"}, "down reads it, and is no FP8 layer beside it"),
    ],
)
def test_a_reader_that_takes_no_codes_is_named(options: dict, why: str):
    model = net(**options)
    train(model, 8)
    assert outputs(model) == []
    assert fe.inspect(model).layers[0]["output"]["reason"] == why


def test_a_layer_whose_operands_change_goes_on_storing():
    model = net()
    train(model, 8)
    with torch.no_grad():
        model.up.weight[:, 0] = 0
    for _ in range(8):
        x = torch.randn(48, X)
        x[:, 0] = 1e7  # of which the result sees nothing
        model(x).sum().backward()
        model.zero_grad()
    assert any(line["slot"] == "up.input" and line["step"] > 8 for line in fe.inspect(model).decisions)
    assert [line["after"] for line in outputs(model)] == ["E4M3/tensor"]
    assert isinstance(model.up(torch.randn(4, X)), Float8Tensor)


def test_a_result_of_wide_range_is_e5m2_as_its_reader_wants_it():
    model = net()
    with torch.no_grad():
        model.up.bias[0] = 1e7
        model.down.weight[:, 0] = 0  # which says nothing of the result, and leaves the others their need for range
    for _ in range(8):
        model(torch.randn(48, X)).sum().backward()
        model.zero_grad()
    assert [line["after"] for line in outputs(model)] == ["E5M2/tensor"]
    assert numerics_of(model.down).recipe.input.format == fe.E5M2
    h = model.up(torch.randn(4, X))
    assert isinstance(h, Float8Tensor)
    assert h.format == fe.E5M2
    assert fe.inspect(model).layers[1]["input"]["dequantised"] == {}


def test_kinds_alone_are_a_flow_too():
    model = net(flow={"up": ["matmul"], "down": ["norm", "residual"]})
    train(model, 4)
    assert [line["slot"] for line in outputs(model)] == ["up.output"]
    assert fe.inspect(model).layers[1]["output"]["reason"] == "a norm reads it"


def test_shared_readers_take_one_tensor():
    class Shared(Stored):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(96, X)

        def forward(self, x):
            h = self.up(x)
            return self.down(h) + self.other(h)

    torch.manual_seed(5)
    model = converted(Shared(), fe.auto(interval=2))
    controllers_of(model)[0].follow({"up": [reader("matmul", "down"), reader("matmul", "other")]})
    train(model, 6)
    assert [line["after"] for line in outputs(model)] == ["E4M3/tensor"]
    assert numerics_of(model.down).ready == numerics_of(model.other).ready == {"": 4}
