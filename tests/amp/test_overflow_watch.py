"""What a watch leaves behind, counts, says and survives: hooks, steps, scales, pins, threads, exceptions, syncs."""

import copy
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from op_counts import WAITS, Counted
from overflow_cases import BY_NAME, HEALTHY, PART, Case, Part, Times, first, in_fp16, make, step, told, watched
from scaled_run import scaled_step
from torch import nn

from fp8engine.amp.overflow import find_overflow
from fp8engine.errors import ConversionError, UnknownName

EXP, SQRT = BY_NAME["exp"], BY_NAME["sqrt'(0)"]


def state(model: nn.Module) -> list:
    """Everything of a model that a watch could leave changed."""
    parts = [(type(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    grads = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
    return [parts, hooks, grads]


def test_the_model_is_as_it_was_after_the_block_and_after_an_error_in_it(mode: str):
    model, net = make(EXP, "nothing")
    before = state(model)

    def fail(x):
        raise FloatingPointError("planted")

    with find_overflow(model, mode=mode) as watch:
        step(model, EXP)
        assert state(model) != before
    assert state(model) == before
    net.blocks[2].between = fail
    with pytest.raises(FloatingPointError), find_overflow(model, mode=mode):
        step(model, EXP)
    assert state(model) == before
    assert torch._C._len_torch_dispatch_stack() == 0
    assert watch.first() is not None, "asked after the block"


def test_an_error_in_the_model_that_the_loop_catches_does_not_confuse_the_next_step():
    model, net = make(EXP, "nothing")
    part = net.blocks[1].part.function
    with find_overflow(model) as watch:
        for broken in (True, False, False):
            net.blocks[1].part.function = (lambda x: 1 / 0) if broken else part
            with pytest.raises(ZeroDivisionError) if broken else nullcontext():
                step(model, EXP)
    assert first(watch, "layer", "op", "step") == (PART, "exp", 1)


def test_gradients_are_bit_for_bit_those_without_and_counters_wait_for_nothing(mode: str):
    model, _ = make(HEALTHY, "nothing")
    alone, waits = copy.deepcopy(model), Counted(*WAITS)
    with waits, find_overflow(model, mode=mode):
        for _ in range(3):
            step(model, HEALTHY)
    for _ in range(3):
        step(alone, HEALTHY)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    assert bool(waits.count) == (mode == "ops")


def test_one_reduction_per_module_output():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    with find_overflow(model), torch.no_grad(), Counted("aminmax") as reductions:
        model(torch.randn(2, 4))
    # The batch, 4 outputs (a container hands on its last part's tensor), and the 6 parameters.
    assert reductions.count == 1 + 4 + 6


def test_a_backward_after_the_block_is_not_watched(mode: str):
    model = nn.Sequential(nn.Linear(4, 4), Part(lambda x: torch.sqrt(x * 0)))
    with find_overflow(model, mode=mode) as watch:
        loss = model(torch.ones(2, 4)).sum()
    with Counted("aminmax") as reductions:
        loss.backward()
    assert reductions.count == 0
    assert watch.first() is None


def test_steps_are_counted_by_the_scaler_or_else_by_passes():
    model: Any = nn.Sequential(nn.Linear(4, 4), Part(lambda x: x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    with find_overflow(model, scaler) as watch, find_overflow(model) as other:
        for number in range(6):
            for micro in range(2):  # two passes a step
                if (number, micro) == (4, 1):
                    model[1].function = lambda x: x * torch.inf
                scaler.scale(model(torch.ones(2, 4)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert first(watch, "layer", "step", "loss_scale") == ("1", 4, 16.0)
    assert first(other, "step") == (9,)
    assert watch.scales == [(0, 4.0), (2, 8.0), (4, 16.0), (5, 8.0), (6, 4.0)]
    assert "loss scale: 4 (step 0) -> 8 (step 2) -> 16 (step 4)" in str(watch.report())
    assert "update" not in scaler.__dict__
    assert watch.report().passes == 12


def test_a_loss_scale_too_large_for_one_layer_is_found_with_its_scale():
    case = BY_NAME["weight gradient"]
    model, _ = make(case, "nothing")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    with find_overflow(model, scaler, mode="ops") as watch:
        for _ in range(3):
            with in_fp16():
                loss = model(x).float().pow(2).mean()
            scaled_step(scaler, optimizer, loss)
    found = (case.layer, "grad_weight", f"{case.layer}.weight", case.scale)
    assert first(watch, "layer", "operand", "parameter", "loss_scale") == found
    assert f"at loss scale {case.scale:g}" in str(watch.first())


def test_victims_are_not_named_and_the_report_says_who_is_who():
    model, _ = make(EXP, "nothing")
    with find_overflow(model) as watch:
        step(model, EXP)
        before = watch.report()
        text, plain = str(before), before.to_dict()
        step(model, EXP)
    report = watch.report()
    assert (str(before), before.to_dict()) == (text, plain), "a report stays as it was when it was made"
    assert report.to_dict() != plain
    assert len(report.findings) == 1, "neither what follows nor its gradients"
    rows = {layer.name: layer for layer in report.layers}
    assert [layer.name for layer in report.layers if layer.guilty] == [PART]
    assert rows["blocks.1.down"].nonfinite == rows["head"].nonfinite == 2
    assert rows["blocks.0.norm"].nonfinite == 0
    first_words = f"first: step 0: output of '{PART}' is Inf in float16 from values up to "
    for words in ("victim", "guilty x2", first_words, " and made by exp (as step 1 showed)"):
        assert words in str(report)
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))["findings"][0]
    assert (found["layer"], found["output_amax"]) == (PART, "inf")


def test_a_report_shows_the_worst_layers_and_both_ends_of_a_long_search():
    """29 layers after the first, each nearer to FP16's end; a scale that doubles at each of 20 steps."""
    near = [Part(lambda x, e=e: (x * 0).half() + 2.0**e) for e in range(-13, 16)]
    model = nn.Sequential(nn.Linear(2, 2), *near)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1)
    with find_overflow(model, scaler) as watch:
        for _ in range(20):
            scaled_step(scaler, optimizer, model(torch.ones(1, 2)).float().sum())
    text = str(watch.report())
    shown = [line.split("│")[1].strip() for line in text.splitlines() if " Part " in line]
    assert shown == [str(n) for n in range(29, 5, -1)]
    assert "6 more layers, all farther from the end of their range" in text
    assert "1 (step 0) -> 2 (step 1) -> 4 (step 2) -> 8 (step 3) -> ... -> 8192 (step 13) -> " in text


def test_each_culprit_of_a_pass_is_named_once_the_first_first():
    parts: Any = nn.ModuleDict({"a": Part(lambda x: x / 0), "b": Part(lambda x: (x * 1e6).half())})
    both = Part(lambda x: parts["a"](x).clamp(0, 1).nan_to_num() + parts["b"](x), parts=parts)
    found = [("parts.a", "div"), ("parts.b", "cast to float16")]
    assert told(watched(both, torch.ones(2, 2)), "layer", "op") == found
    part = Part(torch.exp)
    twice = nn.Sequential(part, Part(lambda x: x.clamp(max=12).half()), part)
    assert told(watched(twice, torch.full((2, 2), 3.0)), "layer", "op", "dtype") == [("0", "exp", torch.float16)]


@pytest.mark.parametrize("masked", [False, True])
def test_what_an_op_made_and_no_output_shows_is_told_as_hidden(masked: bool):
    part = Part(lambda x: x.softmax(-1))
    given = (lambda x: x.masked_fill(x > 0, -torch.inf)) if masked else nn.Identity()
    model = Part(lambda x: part(given(x)) + 1 / (1 + torch.exp(x.half() * 12)), part=part)
    watch = watched(model, torch.tensor([[-1.0, 1.0]]))
    assert watch.first() is None
    assert watch.report().hidden == [("", "exp", "Inf", 1)]
    assert "hidden: exp in '' made Inf 1 times; no output shows it" in str(watch.report())


def test_an_overflow_that_does_not_come_again_keeps_its_layer_and_has_no_op():
    model, net = make(EXP, "nothing")
    with find_overflow(model) as watch:
        step(model, EXP)
        net.blocks[1].part.function = lambda x: x
        step(model, HEALTHY)
    assert first(watch, "layer", "op", "step") == (PART, None, 0)
    assert 'or by mode="ops"' in str(watch.first())


@pytest.mark.parametrize("case", [EXP, SQRT], ids=str)
def test_weights_made_bad_by_the_step_are_named_once_after_the_cause(case: Case):
    model, _ = make(case, "nothing")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with find_overflow(model) as watch:
        for _ in range(4):  # no scaler: NaN gradients reach the weights
            step(model, case)
            optimizer.step()
    assert first(watch, "layer", "operand", "step") == (PART, case.operand, 0)
    assert [f.operand for f in watch.findings].count("weight") == 1


def test_weights_made_bad_by_the_last_step_are_seen():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e38)
    with find_overflow(model) as watch:
        (model(torch.ones(2, 4)) * 1e3).sum().backward()
        optimizer.step()
    assert told(watch, "layer", "operand", "parameter", "step") == [("0", "weight", "0.weight", 0)]


def test_a_gradient_that_was_bad_before_is_nobodys_fault_until_it_is_zeroed():
    model, _ = make(SQRT, "nothing")
    step(model, SQRT)
    assert any(p.grad.isnan().any() for p in model.parameters())
    model.blocks[1].part.function = lambda x: x
    with find_overflow(model) as watch:
        for _ in range(2):
            step(model, SQRT)
        assert watch.first() is None
        model.zero_grad()
        model.blocks[1].part.function = lambda x: torch.sqrt(x * 0) + x
        for _ in range(3):  # never zeroed again: found once
            step(model, SQRT)
    assert told(watch, "layer", "op", "step") == [(PART, "SqrtBackward0", 2)]


class Weighs(nn.Module):
    """x itself; the gradient of its weight is NaN."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + Times.apply(self.weight, torch.inf) * 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_zeroed_counts_each_time(set_to_none: bool):
    model, scaler = nn.Sequential(nn.Linear(4, 4), Weighs()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with find_overflow(model, scaler) as watch:
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none)
    row = next(layer for layer in watch.report().layers if layer.name == "1")
    assert row.guilty + row.scaled == 3


def test_a_layer_that_is_unfrozen_during_the_watch_is_watched(mode: str):
    """FP16: dw = x^T dy sums 64 products of 3000 and 100."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model[1].requires_grad_(True)
    with find_overflow(model, mode=mode) as watch:
        for large in (1e-3, 3e3, 3e3):
            with in_fp16():
                loss = model(torch.full((64, 4), large)).float().sum() * 100
            loss.backward()
            model.zero_grad()
            model[0].requires_grad_(True)
            model[1].requires_grad_(False)
    assert first(watch, "layer", "operand", "step") == ("0", "grad_weight", 1)


def test_pin_names_and_pins_the_guilty_and_then_the_nearest_to_the_end(caplog):
    model, net = make(EXP, "nothing")
    net.blocks[0].part = Part(lambda x: x.half() * 0 + 8000)
    with find_overflow(model) as watch:
        step(model, EXP)
        assert watch.pin(1) == [PART]
        assert watch.pin(1) == ["blocks.0.part"], "8000 is an eighth of 65504"
        assert set(watch.pin(9)) == {"blocks.0", "blocks.1.up"}, "what it feeds; the others are below a sixteenth"
    assert [r.message for r in caplog.records][:2] == [f"pinned to FP32: {PART}", "pinned to FP32: blocks.0.part"]
    assert "guilty x1, pinned" in str(watch.report())
    assert watch.report().pinned[:2] == [PART, "blocks.0.part"]
    assert watch.pin(1) == []
    assert "nothing" in caplog.text
    for pin in watch.pinned.values():
        pin.remove()
    assert type(net.blocks[1].part) is Part
    assert watch.report().pinned == []


def test_a_pinned_layer_is_not_found_again():
    case = BY_NAME["matmul"]
    model, net = make(case, "nothing")
    net.blocks[1].part.function = lambda x: ((x * 300) @ (x * 300).t() / 1e4).softmax(-1) @ x
    with find_overflow(model) as watch:
        step(model, case)
        assert watch.pin(1) == [PART]
    with find_overflow(model, mode="ops") as watch:
        step(model, case)
    assert watch.first() is None


REFUSED = [
    (UnknownName, r"unknown mode of find_overflow 'counter'; did you mean 'counters'", nn.Identity(), "counter"),
    (ConversionError, r"the nn\.Module that is called, not function", state, "ops"),
    (
        *(ConversionError, r"parameters without shapes yet \(a lazy module\): run one forward first"),
        *(nn.Sequential(nn.LazyLinear(2)), "ops"),
    ),
]


@pytest.mark.parametrize(("error", "words", "model", "mode"), REFUSED)
def test_bad_input(error: type[Exception], words: str, model: Any, mode: str):
    with pytest.raises(error, match=words):
        find_overflow(model, mode=mode)


def test_a_watch_that_runs_already_and_a_pin_that_can_reach_nothing_are_errors():
    model, _ = make(BY_NAME["loss scale"], "nothing")
    with find_overflow(model) as watch, pytest.raises(ConversionError, match="running already"):
        watch.__enter__()
    assert watch.first() is None
    with watch:
        step(model, BY_NAME["loss scale"])
    with pytest.raises(ConversionError, match=r"no layer to pin: .*look at the loss function and the loss scale"):
        watch.pin(0)


def test_a_guess_that_was_wrong_leaves_no_blame():
    embed, root, twice = nn.Linear(4, 4), Part(lambda x: torch.sqrt(x * 0)), Part(lambda x: 2 * x)

    def fork(x):
        x = embed(x)
        return root(x) + twice(x)

    model = Part(fork, embed=embed, root=root, twice=twice)
    with find_overflow(model) as watch:
        for number in range(4):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            if number == 0:
                assert first(watch, "exact") == (False,)
                assert "a guess until a backward is watched op by op" in str(watch.first())
    assert first(watch, "layer", "op", "exact", "step") == ("root", "SqrtBackward0", True, 0)
    assert {layer.name: layer.guilty for layer in watch.report().layers if layer.guilty} == {"root": 4}
    assert watch.pin(1) == ["root"]


def test_a_layer_whose_weight_gradient_overflows_is_told_from_the_layer_before_it():
    """FP16: dw of the second layer is 2 x 1000 x 100; its dx is small, and overflows only in the first layer's dx."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))).half()
    for layer, weight in zip(model, (2e4, 1e-3), strict=True):
        nn.init.constant_(layer.weight, weight)  # pyright: ignore[reportArgumentType]
    x = torch.full((2, 8), 0.00625, dtype=torch.half, requires_grad=True)
    with find_overflow(model) as watch:
        (model(x) * 100).sum().backward()
    assert first(watch, "layer", "operand", "parameter", "exact") == ("1", "grad_weight", "1.weight", False)
