"""What a result is stored in, where a flow is known: the decision, a pure function with hysteresis; in training, why.

Decisions are repeated from a plan, and resumed from a checkpoint.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from autos import Stored, plan_of
from support import converted, numerics_of
from torch import nn

import fp8engine as fe
from fp8engine.auto.outputs import MOST_CHANGES, PATIENCE, ResultConsumer, decide_output, widened
from fp8engine.auto.outputs import Stored as As
from fp8engine.auto.policy import Needs, needs_of
from fp8engine.auto.schedule import sampled_step
from fp8engine.numerics.recipe import auto
from fp8engine.ops.tensor import Float8Tensor
from fp8engine.report.state import controllers_of
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import Measured

NEEDS = needs_of(auto())
MATMULS = [ResultConsumer("matmul", "down"), ResultConsumer("matmul", "gate")]
NO_E5M2 = [ResultConsumer("matmul", "down", e5m2=False)]
TROUBLE = As(fe.BF16, 0, "trouble", 0, 1)


def normal() -> Measured:
    return read(measure(torch.randn(64, 256)))


def outlier() -> Measured:
    """One value 2^20 times the rest: E4M3 flushes nearly all of these, E5M2 keeps them."""
    x = torch.randn(64, 256)
    x[0, 0] = 2.0**20
    return read(measure(x))


def decide(look: Measured | None, before: As = As(), readers=MATMULS, needs: Needs = NEEDS) -> As:  # noqa: B008
    return decide_output(look, readers, needs, before)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("norm", "a norm reads it"), ("softmax", "a softmax reads it"), ("residual", "it is added to a residual"),
        ("loss", "a loss reads it"), ("output", "it leaves the model"), ("unknown", "something unknown reads it"),
        ("activation", "an activation of its own reads it"),
    ],
)  # fmt: skip
def test_one_other_reader_is_enough_for_16_bits(kind: str, why: str):
    readers, needs = [MATMULS[0], ResultConsumer(kind, "it")], needs_of(auto(), ("matmul", kind))
    found = decide(normal(), As(), readers, needs)
    assert (found.format, found.reason, found.changes) == (fe.BF16, why, 0)
    back = decide(normal(), As(fe.E4M3, 2, "", 0, 1), readers, needs)
    assert (back.format, back.margin, back.reason, back.changes) == (fe.BF16, 0, why, 2)


def test_a_need_that_the_user_names_for_a_kind_is_kept_like_a_matmuls():
    for need, format in ((25, fe.E4M3), (31.6, fe.BF16)):
        needs = needs_of(auto(min_sqnr_db={"matmul": 22, "norm": need}), ("matmul", "norm"))
        found = decide(normal(), As(), [MATMULS[0], ResultConsumer("norm")], needs)
        assert found.format == format, need
    assert found.reason.startswith("predicted SQNR 31.")


def test_outliers_want_e5m2_or_16_bits():
    table = {format: outlier().predict(fe.Cast(format)) for format in (fe.E4M3, fe.E5M2)}
    assert table[fe.E4M3].flushed > 0.9 > 0.01 > table[fe.E5M2].flushed
    assert decide(outlier()).format == fe.E5M2
    tied = decide(outlier(), readers=NO_E5M2)
    assert tied.format == fe.BF16
    assert "flushed to zero > 5.0%" in tied.reason


def test_the_same_arguments_give_the_same_answer_and_nothing_seen_changes_nothing():
    look = normal()
    assert decide(look) == decide(look)
    assert decide(look, readers=[]).reason == "nothing is known of what reads it"
    for previous in (As(), As(fe.E4M3, 2, "why", 1, 2)):
        assert decide(None, previous) == decide(read(measure(torch.zeros(4, 4))), previous) == previous


def test_what_is_there_may_miss_its_needs_by_a_little():
    look = normal()
    have = look.predict(fe.Cast(fe.E4M3)).sqnr_db
    for before, more, format in (
        (As(), 0.5, fe.BF16),
        (As(fe.E4M3, changes=1), 0.5, fe.E4M3),
        (As(fe.E4M3), 1.5, fe.BF16),
    ):
        assert decide(look, before, needs=Needs(have + more, None)).format == format


def test_after_trouble_fp8_has_to_look_right_four_times_and_in_the_end_never_again():
    now, looks = TROUBLE, 0
    while not now.format.is_fp8:
        now, looks = decide(normal(), now), looks + 1
        assert looks <= PATIENCE
    assert (looks, now.changes) == (PATIENCE, 2)
    now = decide(outlier(), now, NO_E5M2)
    for _ in range(2 * PATIENCE):
        assert (now.format, now.changes) == (fe.BF16, MOST_CHANGES)
        now = decide(normal(), now)


def test_one_look_that_misses_begins_the_count_again():
    now = TROUBLE
    for look in (normal(), normal(), outlier(), normal(), normal(), normal()):
        now = decide(look, now, NO_E5M2)
    assert (now.format, now.cheaper) == (fe.BF16, 3)


def test_a_margin_that_has_grown_is_taken_over_with_its_numbers():
    before = As(fe.E4M3, 0, "", 0, 1)
    assert widened(before, 0, 0.5) == before
    assert widened(As(), 2, 0.5) == As()
    found = widened(before, 2, 0.0123)
    assert (found.margin, found.changes) == (2, 1)
    assert found.reason == "1.23% of the elements saturated under a predicted scale: margin 2"


# In training

X = 64


def reader(kind: str, name: str = "") -> SimpleNamespace:
    """A stand-in of flow's Consumer."""
    return SimpleNamespace(kind=kind, name=name)


FLOW = {"up": [reader("matmul", "down")], "down": [reader("activation", "relu")], "last": [reader("output")]}


def net(recipe=None, flow=FLOW, between: nn.Module | None = None, steps: int = 0, **options) -> Stored:
    """A model of a known flow after so many steps."""
    torch.manual_seed(5)
    model = converted(Stored(between), recipe or fe.auto(interval=4), **options)
    for controller in controllers_of(model):
        controller.follow(flow)
    train(model, steps)
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


def formats(model: nn.Module) -> list[str]:
    return [line["after"] for line in outputs(model)]


def test_a_result_that_a_matmul_alone_reads_is_stored_in_fp8_and_the_report_says_so():
    model = net(steps=8)
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
    model = net(flow={}, steps=8)
    assert outputs(model) == []
    assert type(model.up(torch.randn(2, X))) is torch.Tensor
    assert not any(name.endswith(".output") for name in fe.scaling_state(model))


@pytest.mark.parametrize("options", [{}, {"freeze_after": 6}], ids=["", "frozen"])
def test_a_plan_repeats_the_run_bit_for_bit(options: dict, tmp_path):
    model = net(fe.auto(interval=4, **options))
    want = train(model, 24, jump=10)
    assert formats(model) == ["E4M3/tensor", "E4M3/tensor margin 2"][: 2 - len(options)]
    if options:
        assert numerics_of(model.up).recipe.stored_margin == fe.scaling_state(model)["up.output"].margin == 0
    again = net(plan_of(model, tmp_path))
    assert train(again, 24, jump=10) == want
    assert outputs(again) == outputs(model)


def test_saturation_is_answered_at_the_next_step_and_logged_at_the_next_look():
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
    # Of the elements since the look before: of all steps it is a third of that.
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
    assert formats(model) == ["E4M3/tensor", "16 bits"]
    assert "down reads it, and got no codes since the last look" in outputs(model)[1]["why"]
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
    model = net(**options, steps=8)
    assert outputs(model) == []
    assert fe.inspect(model).layers[0]["output"]["reason"] == why


def test_a_layer_whose_operands_change_goes_on_storing():
    model = net(steps=8)
    with torch.no_grad():
        model.up.weight[:, 0] = 0
    for _ in range(8):
        x = torch.randn(48, X)
        x[:, 0] = 1e7  # of which the result sees nothing
        model(x).sum().backward()
        model.zero_grad()
    assert any(line["slot"] == "up.input" and line["step"] > 8 for line in fe.inspect(model).decisions)
    assert formats(model) == ["E4M3/tensor"]
    assert isinstance(model.up(torch.randn(4, X)), Float8Tensor)


def test_a_result_of_wide_range_is_e5m2_as_its_reader_wants_it():
    model = net()
    with torch.no_grad():
        model.up.bias[0] = 1e7
        model.down.weight[:, 0] = 0  # which says nothing of the result, and leaves the others their need for range
    for _ in range(8):
        model(torch.randn(48, X)).sum().backward()
        model.zero_grad()
    assert formats(model) == ["E5M2/tensor"]
    assert numerics_of(model.down).recipe.input.format == fe.E5M2
    h = model.up(torch.randn(4, X))
    assert isinstance(h, Float8Tensor)
    assert h.format == fe.E5M2
    assert fe.inspect(model).layers[1]["input"]["dequantised"] == {}


def test_kinds_alone_are_a_flow_too():
    model = net(flow={"up": ["matmul"], "down": ["norm", "residual"]}, steps=4)
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
    assert formats(model) == ["E4M3/tensor"]
    assert numerics_of(model.down).ready == numerics_of(model.other).ready == {"": 4}
