"""find_overflow names the layer, the operation and the pass that did it, and not what comes after or did no harm."""

from collections import OrderedDict, UserDict
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from overflow_cases import Part, Times, first, in_fp16, told, watched
from scaled_run import scaled_step
from torch import nn
from torch.ao.quantization import MinMaxObserver

import fp8engine as fe
from fp8engine.amp.overflow import find_overflow


def negative(kind: str) -> nn.Module:
    """A layer that makes -Inf of 100, in FP16."""
    if kind == "own":
        return Part(lambda x: (x.half() * -300) * 300)
    layer = (type("Mine", (nn.Linear,), {}) if kind == "subclass" else nn.Linear)(4, 4)
    nn.init.constant_(layer.weight, -300.0)
    return fe.convert(nn.Sequential(layer))[0] if kind == "converted" else layer


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
@pytest.mark.parametrize("kind", ["subclass", "converted", "own", "torch"])
@pytest.mark.parametrize("residual", [False, True])
def test_an_overflow_to_minus_inf_is_its_makers_and_not_the_next_layers(kind: str, residual: bool, mode: str):
    part, other = negative(kind), nn.Linear(4, 4)
    around = Part(lambda x: other(x) + part(x) if residual else part(x), other=other, part=part)
    model = nn.Sequential(around, nn.LeakyReLU(), nn.LayerNorm(4))
    with find_overflow(model, mode=mode) as watch, torch.autocast("cpu", torch.float16), torch.no_grad():
        for _ in range(3):
            model(torch.full((8, 4), 150.0) + torch.rand(8, 4))
            assert told(watch, "layer", "operand", "step") == [("0.part", "output", 0)]
        assert watch.pin(2)[0] == "0.part"


def test_a_mask_that_did_no_harm_is_not_blamed_for_what_overflows_after_it():
    mask, weigh = Part(lambda x: x.masked_fill(x > 0, -torch.inf)), Part(lambda x: x.softmax(-1))
    blocked = Part(lambda _: torch.tensor([0.0, -torch.inf]))
    large = Part(lambda x: (x[0].abs().sum() + x[1].clamp(min=0)).half() * 6e4 * 6e4)
    inside = Part(lambda x: weigh(mask(x)).half() * 6e4 * 6e4, mask=mask, weigh=weigh)
    along = Part(lambda x: large((x, blocked((x > 0).int()))), blocked=blocked, large=large)
    for model, layer in ((inside, ""), (along, "large")):
        assert told(watched(model, torch.tensor([[-1.0, 1.0]]), "counters"), "layer") == [(layer,)]


FARTHEST: dict[str, nn.Module] = {
    "pad": nn.Sequential(nn.ConstantPad1d(1, -torch.inf), nn.MaxPool1d(3, 1)),
    "threshold": nn.Sequential(nn.Threshold(0.0, -torch.inf), Part(lambda x: x.amax(-1, keepdim=True))),
    "not to itself": nn.Sequential(
        Part(lambda x: torch.cdist(x, x) + torch.diag(torch.full((len(x),), torch.inf))), Part(lambda x: x.amin(-1))
    ),
}


@pytest.mark.parametrize("name", FARTHEST)
def test_a_layer_that_puts_in_inf_on_purpose_is_not_guilty(name: str, mode: str):
    watch = watched(nn.Sequential(nn.Linear(4, 4), FARTHEST[name]), torch.eye(4), mode, 4)
    assert watch.findings == watch.pin(1) == []
    assert "no NaN and no Inf" in str(watch.report())
    assert "over" not in str(watch.report()).split()


def test_a_layer_that_overflowed_once_stays_guilty_although_it_masks_too():
    part = Part(lambda x: torch.where(x > 0, (x * 1e3).exp(), -torch.inf))
    with find_overflow(nn.Sequential(part)) as watch:
        for x in ([1.0, 1.0], [-1.0], [-1.0]):
            watch.model(torch.tensor(x))
    assert first(watch, "layer", "step", "op") == ("0", 0, None)


@pytest.mark.parametrize("least", [-20.0, 20.0])
def test_the_log_of_a_probability_of_zeros_and_ones_is_no_mask(least: float, mode: str):
    part = Part(lambda x: torch.log(torch.sigmoid(x.half())) * (-1.0 if least > 0 else 1.0))
    watch = watched(nn.Sequential(part), torch.tensor([-20.0, least]), mode, 2)
    assert told(watch, "layer", "operand", "op") == [("0", "output", "log")]


class Named(Times):
    """Stores what it likes on its ctx, which is the node of the autograd graph: names of the node's own methods."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.name, ctx.variable, ctx.register_hook, ctx._sequence_nr = "here", x.shape, True, 1
        return Times.forward(ctx, x, factor)


def test_a_function_may_store_on_its_ctx_what_nodes_call_their_methods(mode: str):
    model = nn.Sequential(nn.Linear(4, 4), Part(lambda x: Named.apply(x, torch.inf)), nn.Linear(4, 4))
    assert told(watched(model, torch.ones(2, 4), mode, 2), "layer", "op") == [("1", "NamedBackward")]


def test_two_layers_whose_gradients_overflow_one_after_the_other_are_two_findings():
    bad = 0  # the layer whose gradient overflows, if it is one of these
    grow = [Part(lambda x, n=n: Times.apply(x, torch.inf if n == bad else 1.0)) for n in (1, 5)]
    model = nn.Sequential(nn.Linear(4, 4), grow[0], *(nn.Linear(4, 4) for _ in range(3)), grow[1], nn.Linear(4, 4))
    with find_overflow(model) as watch:
        for number in (0, 0, 1, 5, 5):
            bad = number
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
    found = [("1", 2, None, None), ("5", 3, "TimesBackward", None)]
    assert told(watch, "layer", "step", "op", "op_step") == found


def test_an_op_is_not_told_of_an_overflow_long_ago():
    large = {0: lambda x: (x * 1e6).half(), 20: lambda x: x / 0, 21: lambda x: x / 0}
    part = Part(lambda x: x)
    with find_overflow(nn.Sequential(part)) as watch:
        for number in range(22):
            part.function = large.get(number, lambda x: x)
            watch.model(torch.ones(2, 2))
    assert told(watch, "layer", "step", "op") == [("0", 0, None), ("0", 21, "div")]


def test_the_numbers_of_a_finding_are_of_one_pass():
    """Of the first; the op is of the second, whose inputs are twice as large and whose scale is half of it."""
    model: Any = nn.Sequential(nn.Linear(2, 2), Part(lambda x: torch.exp(x.half())))
    nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with find_overflow(model, scaler) as watch:
        for bias in (20.0, 40.0):
            nn.init.constant_(model[0].bias, bias)
            scaled_step(scaler, optimizer, model(torch.ones(2, 2)).sum())
    assert first(watch, "step", "loss_scale", "input_amax", "op", "op_step") == (0, 8.0, 20.0, "exp", 1)
    wanted = "step 0: output of '1' is Inf in float16 from values up to 20 and made by exp (as step 1 showed)"
    assert str(watch.first()) == wanted


@pytest.mark.parametrize("roots", [[nn.Identity(), Part(lambda x: x.relu().sqrt())], [nn.ReLU(), Part(torch.sqrt)]])
@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_an_inf_that_backward_itself_masks_is_no_finding(factor: float, roots: list[nn.Module], mode: str):
    model: Any = nn.Sequential(nn.Linear(4, 4), Part(lambda x: Times.apply(x, factor)), nn.Linear(4, 4), *roots)
    nn.init.constant_(model[2].bias, -10.0)
    found = [] if factor == 1 else [("1", "TimesBackward", 0)]
    assert told(watched(model, torch.rand(8, 4), mode, 2), "layer", "op", "step") == found


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_beside_fp8_codes_no_number_is_told():
    model: Any = fe.convert(nn.Sequential(nn.Linear(16, 16)), "current")
    nn.init.constant_(model[0].weight, 300.0)
    watch = watched(model, torch.full((16, 16), 150.0), under=in_fp16)
    assert str(watch.first()) == "step 0: output of '0' is Inf in float16 made by matmul"


@pytest.mark.parametrize("together", [False, True])
def test_gradients_of_a_forward_that_overflowed_blame_nobody(together: bool, mode: str):
    model: Any = nn.Sequential(nn.Linear(4, 4), Part(lambda x: torch.exp(x.half()).float()), nn.Linear(4, 4))
    nn.init.ones_(model[0].weight)
    with find_overflow(model, mode=mode) as watch:
        for _ in range(2):
            y = model(torch.full((2, 4), 50.0))
            watch.first()
            (y + model(torch.zeros(2, 4)) if together else y).sum().backward()
            model.zero_grad()
    assert told(watch, "layer", "operand", "step") == [("1", "output", 0)]


def test_the_op_is_the_one_whose_inf_gets_out_not_an_earlier_one_that_a_clamp_takes_out():
    part = Part(lambda x: ((x.half() * -300) * 300).clamp(min=0) + torch.exp(x.half() * 12))
    assert first(watched(nn.Sequential(part), torch.ones(2, 2)), "layer", "op") == ("0", "exp")


Held: Any = make_dataclass("Held", ["x", "rest"], frozen=True)


@pytest.mark.parametrize("kind", [SimpleNamespace, UserDict])
def test_tensors_in_plain_objects_are_seen(kind: type, mode: str):
    get = lambda held: held["x"] if kind is UserDict else held.x  # noqa: E731
    exp = Part(lambda x: kind(x=torch.exp(x + 99), y=[x]))
    root = Part(lambda x: kind(x=torch.sqrt(x * 0), y=[x]))
    for part, found in ((exp, ("1", "output", "exp")), (root, ("1", "grad_input", "SqrtBackward0"))):
        model = nn.Sequential(nn.Linear(4, 4), part, Part(get), nn.Linear(4, 4))
        assert told(watched(model, torch.ones(2, 4), mode, 2), "layer", "operand", "op") == [found]


def test_tensors_in_dataclasses_are_seen():
    fc = nn.Linear(4, 4)
    nn.init.constant_(fc.bias, 4.0)
    enc, dec = (Part(lambda held, by=by: Held(fc(held.x).half() * by, held.rest)) for by in (6e4, 1.0))
    enc.fc = fc
    model = nn.Sequential(OrderedDict(enc=enc, dec=dec))
    for x, found in ((torch.ones(2, 4), ("enc", "output")), (torch.full((2, 4), torch.nan), ("", "input"))):
        assert told(watched(model, Held(x, []), "counters", under=in_fp16), "layer", "operand") == [found]


HARMLESS: dict[str, Any] = {  # it is there before anything is computed
    "mask": nn.Parameter(torch.full((4, 4), -torch.inf).triu(1), requires_grad=False),
    "observer": MinMaxObserver(),  # +Inf and -Inf until it is fed
    "data": None,  # NaN that the model replaces
}
ROOTS: dict[str, tuple[Any, list]] = {
    "healthy": (lambda x: x, []),
    "backward": (lambda x: (x * 0).abs().sqrt(), [("parts.1", "grad_input")]),
    "forward": (lambda x: x / 0, [("parts.1", "output")]),
}


@pytest.mark.parametrize("held", HARMLESS)
@pytest.mark.parametrize("root", ROOTS)
def test_inf_and_nan_that_do_no_harm_hide_nothing(root: str, held: str, mode: str):
    broken, found = ROOTS[root]
    parts: Any = nn.Sequential(nn.Linear(4, 4), Part(broken), nn.Linear(4, 4))
    model: Any = Part(lambda x: (parts(x.nan_to_num()) + getattr(model, "mask", 0)).softmax(-1), parts=parts)
    setattr(model, held, HARMLESS[held])
    x = torch.tensor([[torch.nan if held == "data" else 1.0, 2.0, 3.0, 4.0]] * 4)
    assert told(watched(model, x, mode, 2), "layer", "operand") == found


def test_the_op_is_told_after_any_number_of_overflows_that_did_no_harm():
    harmless = [Part(lambda x: x + 1 / (1 + torch.exp(x.half() * 12))) for _ in range(70)]
    guilty = nn.Sequential(*harmless, Part(lambda x: torch.exp(x.half() * 12)))
    assert first(watched(guilty, torch.ones(2, 2)), "layer", "op") == ("70", "exp")
    report = watched(nn.Sequential(*harmless), torch.ones(2, 2)).report()
    assert len(report.hidden) == 70
    assert "hidden: 62 more, which to_dict() has" in str(report)


def test_a_weight_beyond_fp16_is_one_finding_and_a_pin_cures_it(mode: str):
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, 1e5)
    watch = watched(nn.Sequential(nn.Identity(), layer), torch.ones(2, 4), mode, 3, in_fp16)
    assert told(watch, "layer", "operand", "op", "step") == [("1", "weight", "cast to float16", 0)]
    assert watch.pin(1) == ["1"]
    with in_fp16():
        assert watch.model(torch.ones(2, 4)).isfinite().all()
