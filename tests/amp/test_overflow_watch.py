"""What a watch leaves behind, counts, says and survives: hooks, steps, scales, pins, threads, exceptions, syncs."""

import copy
import json
from typing import Any

import pytest
import torch
from overflow_cases import CASES, PART, Case, Net, Part, make, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8engine.amp.overflow import find_overflow
from fp8engine.errors import ConversionError, UnknownName

BY_NAME = {case.name: case for case in CASES}
EXP, SQRT = BY_NAME["exp"], BY_NAME["sqrt'(0)"]
HEALTHY = Case("healthy", Net, None, "")


def state(model: nn.Module) -> list:
    """Everything of a model that a watch could leave changed."""
    parts = [(type(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    grads = [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]
    return [parts, hooks, grads]


@pytest.mark.parametrize("mode", ["counters", "ops"])
def test_losses_and_gradients_are_bit_for_bit_what_they_are_without(mode: str):
    model, _ = make(HEALTHY, "nothing")
    alone = copy.deepcopy(model)
    step(alone, HEALTHY)
    with find_overflow(model, mode=mode):
        step(model, HEALTHY)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("mode", ["counters", "ops"])
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
    part, net.blocks[1].part = net.blocks[1].part, Part(lambda x: 1 / 0)
    with find_overflow(model) as watch:
        for broken in (True, False, False):
            net.blocks[1].part.function = (lambda x: 1 / 0) if broken else part.function
            try:
                step(model, EXP)
            except ZeroDivisionError:
                assert broken
    found = watch.first()
    assert found is not None
    assert (found.layer, found.op, found.step) == (PART, "exp", 1)


class Syncs(TorchDispatchMode):
    """Ops that make the host wait for a device."""

    seen: list[str]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_counters_wait_for_nothing_and_ops_do():
    for mode in ("counters", "ops"):
        model, _ = make(HEALTHY, "nothing")
        syncs = Syncs()
        syncs.seen = []
        with syncs, find_overflow(model, mode=mode):
            for _ in range(3):
                step(model, HEALTHY)
        assert bool(syncs.seen) == (mode == "ops")


class Aminmaxes(TorchDispatchMode):
    """How many reductions the watch asks for."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func._schema.name == "aten::aminmax"
        return func(*args, **(kwargs or {}))


def test_one_reduction_per_module_output():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    count = Aminmaxes()
    with find_overflow(model), torch.no_grad(), count:
        model(torch.randn(2, 4))
    # The batch, 4 outputs (a container hands on its last part's tensor), and the 6 parameters.
    assert count.seen == 1 + 4 + 6


@pytest.mark.parametrize("mode", ["counters", "ops"])
def test_a_backward_after_the_block_is_not_watched(mode: str):
    model, count = nn.Sequential(nn.Linear(4, 4), Part(lambda x: torch.sqrt(x * 0))), Aminmaxes()
    with find_overflow(model, mode=mode) as watch:
        loss = model(torch.ones(2, 4)).sum()
    with count:
        loss.backward()
    assert count.seen == 0
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
    found, by_pass = watch.first(), other.first()
    assert found is not None
    assert by_pass is not None
    assert (found.layer, found.step, found.loss_scale) == ("1", 4, 16.0)
    assert by_pass.step == 9
    assert watch.scales == [(0, 4.0), (2, 8.0), (4, 16.0), (5, 8.0), (6, 4.0)]
    assert "loss scale: 4 (step 0) -> 8 (step 2) -> 16 (step 4)" in str(watch.report())
    assert "update" not in scaler.__dict__
    assert watch.report().passes == 12


def test_a_loss_scale_too_large_for_one_layer_is_found_with_its_scale():
    case = BY_NAME["weight gradient"]
    model, _ = make(case, "nothing")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale)
    unscaled = Case("unscaled", Net, None, "")
    with find_overflow(model, scaler, mode="ops") as watch:
        for _ in range(3):
            x = unscaled.data(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = watch.first()
    assert found is not None
    assert (found.layer, found.operand, found.parameter) == (case.layer, "grad_weight", f"{case.layer}.weight")
    assert found.loss_scale == case.scale
    assert f"at loss scale {case.scale:g}" in str(found)


def test_victims_are_not_named_and_the_report_says_who_is_who():
    model, _ = make(EXP, "nothing")
    with find_overflow(model) as watch:
        step(model, EXP)
        step(model, EXP)
    report = watch.report()
    assert len(report.findings) == 1, "neither what follows nor its gradients"
    rows = {layer.name: layer for layer in report.layers}
    assert [layer.name for layer in report.layers if layer.guilty] == [PART]
    assert rows["blocks.1.down"].nonfinite == rows["head"].nonfinite == 2
    assert rows["blocks.0.norm"].nonfinite == 0
    text = str(report)
    assert "victim" in text
    assert "guilty x2" in text
    assert f"first: step 0: output of '{PART}' is Inf in float16 from values up to " in text
    assert " and made by exp (as step 1 showed)" in text
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert told["findings"][0]["layer"] == PART
    assert told["findings"][0]["output_amax"] == "inf"


def test_two_culprits_in_one_pass_are_both_named_the_first_first():
    parts: Any = nn.ModuleDict({"a": Part(lambda x: x / 0), "b": Part(lambda x: (x * 1e6).half())})
    both = Part(lambda x: parts["a"](x).clamp(0, 1).nan_to_num() + parts["b"](x))
    both.parts = parts
    with find_overflow(both, mode="ops") as watch:
        both(torch.ones(2, 2))
    watch.first()
    assert [(f.layer, f.op) for f in watch.findings] == [("parts.a", "div"), ("parts.b", "cast to float16")]


def test_a_module_called_twice_is_named_once():
    part = Part(lambda x: torch.exp(x))
    model = nn.Sequential(part, Part(lambda x: x.clamp(max=12).half()), part)
    with find_overflow(model, mode="ops") as watch:
        model(torch.full((2, 2), 3.0))
    found = watch.first()
    assert found is not None
    assert (found.layer, found.op, found.dtype) == ("0", "exp", torch.float16)
    assert len(watch.findings) == 1


def test_what_an_op_made_and_no_output_shows_is_told_as_hidden():
    model = nn.Sequential(Part(lambda x: 1 / (1 + torch.exp(x.half() * 12))))
    with find_overflow(model, mode="ops") as watch:
        model(torch.ones(2, 2))
    assert watch.first() is None
    assert watch.report().hidden == [("0", "exp", "Inf", 1)]
    assert "hidden: exp in '0' made Inf 1 times; no output shows it" in str(watch.report())


def test_an_op_after_a_mask_does_not_make_the_mask_an_overflow():
    """The part is given a mask; only later the forward around it makes an Inf, which 1 / Inf hides again."""
    part = Part(lambda x: x.softmax(-1))
    model = Part(lambda x: part(x.masked_fill(x > 0, -torch.inf)) + 1 / (1 + torch.exp(x.half() * 12)))
    model.part = part
    with find_overflow(model, mode="ops") as watch:
        model(torch.tensor([[-1.0, 1.0]]))
    assert watch.first() is None
    assert watch.report().hidden == [("", "exp", "Inf", 1)]


def test_an_overflow_that_does_not_come_again_keeps_its_layer_and_has_no_op():
    model, net = make(EXP, "nothing")
    with find_overflow(model) as watch:
        step(model, EXP)
        net.blocks[1].part.function = lambda x: x
        step(model, HEALTHY)
    found = watch.first()
    assert found is not None
    assert (found.layer, found.op, found.step) == (PART, None, 0)
    assert 'or by mode="ops"' in str(found)


def test_weights_made_bad_by_the_step_are_named_once_after_the_cause():
    model, _ = make(EXP, "nothing")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with find_overflow(model) as watch:
        for _ in range(4):  # no scaler: NaN gradients reach the weights
            step(model, EXP)
            optimizer.step()
    found = watch.first()
    assert found is not None
    assert (found.layer, found.operand, found.step) == (PART, "output", 0)
    assert [f.operand for f in watch.findings].count("weight") == 1


def test_a_gradient_that_was_bad_before_is_nobodys_fault_until_it_is_zeroed():
    model, _ = make(SQRT, "nothing")
    step(model, SQRT)
    assert any(p.grad.isnan().any() for p in model.parameters())
    model.blocks[1].part.function = lambda x: x
    with find_overflow(model) as watch:
        step(model, SQRT)
        step(model, SQRT)
        assert watch.first() is None
        model.zero_grad()
        model.blocks[1].part.function = lambda x: torch.sqrt(x * 0) + x
        for _ in range(3):  # never zeroed again: found once
            step(model, SQRT)
    found = watch.first()
    assert found is not None
    assert (found.layer, found.op, found.step) == (PART, "SqrtBackward0", 2)
    assert len(watch.findings) == 1


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


def test_a_report_stays_as_it_was_when_it_was_made():
    model, _ = make(EXP, "nothing")
    with find_overflow(model) as watch:
        step(model, EXP)
        before = watch.report()
        text, plain = str(before), before.to_dict()
        step(model, EXP)
    assert watch.report().to_dict() != plain
    assert (str(before), before.to_dict()) == (text, plain)


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


def test_a_pin_that_can_reach_nothing_is_an_error():
    case = BY_NAME["loss scale"]
    model, _ = make(case, "nothing")
    with find_overflow(model) as watch:
        step(model, case)
    with pytest.raises(ConversionError, match=r"no layer to pin: .*look at the loss function and the loss scale"):
        watch.pin(0)


def test_bad_input():
    with pytest.raises(UnknownName, match=r"unknown mode of find_overflow 'counter'; did you mean 'counters'"):
        find_overflow(nn.Linear(2, 2), mode="counter")
    with pytest.raises(ConversionError, match=r"the nn\.Module that is called, not function"):
        find_overflow(test_bad_input)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ConversionError, match=r"parameters without shapes yet \(a lazy module\): run one forward first"
    ):
        find_overflow(nn.Sequential(nn.LazyLinear(2)))
    watch = find_overflow(nn.Identity())
    with watch, pytest.raises(ConversionError, match="running already"):
        watch.__enter__()
    assert watch.first() is None


def test_a_guess_that_was_wrong_leaves_no_blame():
    """Two layers read one tensor, and both gradients flow into it: the guess may be either, the next pass tells."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.root, self.twice = (
                nn.Linear(4, 4),
                Part(lambda x: torch.sqrt(x * 0)),
                Part(lambda x: 2 * x),
            )

        def forward(self, x):
            x = self.embed(x)
            return self.root(x) + self.twice(x)

    model = Fork()
    with find_overflow(model) as watch:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
            if watch.report().passes == 1:
                guess = watch.first()
                assert guess is not None
                assert not guess.exact
                assert "a guess until a backward is watched op by op" in str(guess)
    found = watch.first()
    assert found is not None
    assert (found.layer, found.op, found.exact, found.step) == ("root", "SqrtBackward0", True, 0)
    assert {layer.name: layer.guilty for layer in watch.report().layers if layer.guilty} == {"root": 4}
    assert watch.pin(1) == ["root"]


def test_a_layer_whose_weight_gradient_overflows_is_told_from_the_layer_before_it():
    """FP16: dw of the second layer is 2 x 1000 x 100; its dx is small, and overflows only in the first layer's dx."""
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    nn.init.constant_(first.weight, 2e4)
    nn.init.constant_(second.weight, 1e-3)
    model = nn.Sequential(first, second).half()
    x = torch.full((2, 8), 0.00625, dtype=torch.half, requires_grad=True)
    with find_overflow(model) as watch:
        (model(x) * 100).sum().backward()
    found = watch.first()
    assert found is not None
    assert (found.layer, found.operand, found.parameter, found.exact) == ("1", "grad_weight", "1.weight", False)
