"""Two precisions layer by layer: the planted layer is named, numbers agree with float64, the model is left alone."""

import copy
import json
import math
import random
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from overflow_cases import Part
from torch import nn

from fp8engine.amp.compare import compare
from fp8engine.amp.decorate import decorate
from fp8engine.amp.difference import Difference
from fp8engine.amp.lists import OpLists
from fp8engine.errors import ConversionError, StateError, UnsupportedDtype


def test_errors_are_those_of_float64():
    model, x = nn.Sequential(nn.Linear(16, 8), nn.Tanh()), torch.randn(4, 16)
    found = compare(model, x, low=torch.bfloat16, high=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        low = [model[0](x), model(x)]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()
        high = [exact[0](x.double()), exact(x.double())]
    assert [layer.name for layer in found.layers] == ["0", "1", ""]
    for layer, ours, theirs in zip(found.layers, (*low, low[1]), (*high, high[1]), strict=True):
        want = ((ours.double() - theirs).norm() / theirs.norm()).item()
        # two sums of at most 32 squares in FP64, in another order
        assert layer.error == pytest.approx(want, rel=64 * 2.0**-53)
        assert (layer.sqnr_db, layer.dtypes) == (pytest.approx(-20 * math.log10(want)), ("BF16", "float64"))
    assert found.first() is None
    assert found.threshold == 16 * 2.0**-7


def scale(by: float) -> nn.Module:
    return Part(lambda x: x * by)


@pytest.mark.parametrize("at", range(4))
def test_the_layer_that_overflows_is_named(at: int):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), scale(1e6 if i == at else 1.0)) for i in range(4)))
    found = compare(model, torch.ones(2, 4))
    first: Any = found.first()
    assert (first.name, first.kind, first.nonfinite_high) == (f"{at}.1", "Part", 0)
    assert first.nonfinite_low > 0
    text, values = str(found), found.to_dict()
    assert f"first divergence: {at}.1 (Part)" in text
    assert "first to diverge" in text
    assert "(model)" in text
    assert values["first"] == f"{at}.1"
    assert [layer["diverges"] for layer in values["layers"]] == [i > 3 * at for i in range(13)]
    assert json.loads(json.dumps(values)) == values


def test_the_layer_that_loses_its_digits_is_named():
    model = nn.Sequential(nn.Linear(4, 4), Part(lambda x: (x + 2048) - 2048), scale(2.0))  # a step of FP16 there is 2
    first: Any = compare(model, torch.rand(8, 4)).first()
    assert first.name == "1"
    assert compare(model, torch.rand(8, 4), threshold=10.0).first() is None
    assert compare(model, torch.rand(8, 4), lists=OpLists(black=["linear"])).first() is None


def test_one_element_that_overflows_is_counted_and_left_out_of_the_error():
    model = nn.Sequential(nn.Identity(), scale(2.0))
    x = torch.tensor([[1.0, 2.0, 3.0, 4e4]], dtype=torch.float16)  # 8e4 is over 65504
    layer: Any = compare(model, x).first()
    assert (layer.name, layer.nonfinite_low, layer.nonfinite_high, layer.error) == ("1", 1, 0, 0.0)
    assert layer.sqnr_db == math.inf


def test_a_layer_without_a_finite_element_has_no_error():
    found = compare(nn.Sequential(scale(1e6), nn.ReLU()), torch.ones(2, 4, dtype=torch.float16))
    assert [(layer.error, layer.sqnr_db, layer.nonfinite_low) for layer in found.layers] == [(None, None, 8)] * 3
    assert found.first() is found.layers[0]
    assert "inf" not in str(found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_compared_as_their_values(layout: torch.layout):
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    given = torch.nested.nested_tensor(rows, layout=layout), torch.cat(rows)
    nested, flat = (compare(model, x).layers for x in given)
    assert [layer.error for layer in nested] == [layer.error for layer in flat]


def test_a_function_in_place_afterwards_does_not_reach_back():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    found: Any = {layer.name: layer.error for layer in compare(model, torch.randn(4, 8)).layers}
    assert found["0"] < 8 * 2.0**-11  # inputs, weights, bias and output rounded once each, sums in FP32


class Awkward(nn.Module):
    """A batch norm, dropouts of every kind, a counter, a buffer bound anew, a lazy buffer, Python's random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.rnn = nn.RNN(8, 8)  # not an LSTM, which oneDNN has in BF16 on some CPUs alone, in FP16 on fewer
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.float().mean(0)
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8), persistent=False)
        h = self.linear(self.drop(self.linear(self.norm(x)))) * self.mask * scale
        x.mul_(0)  # an input worked on in place
        noise = torch.rand(8) + random.random()
        return {"out": (self.rnn(F.dropout(h, 0.3))[0] + noise, [h.argmax()]), "extra": None}


@pytest.mark.parametrize("high", [torch.float32, torch.float64])
def test_the_model_the_inputs_and_the_random_numbers_are_left_alone(high: torch.dtype):
    model, x = Awkward().train(), torch.randn(4, 8)
    model.linear.eval()
    model.linear.weight.grad = torch.ones(8, 8)
    keys, versions = list(vars(model)), [buffer._version for buffer in model.buffers()]
    objects = [*model.parameters(), *model.buffers()]
    values, addresses = [value.clone() for value in objects], [value.data_ptr() for value in objects]
    given, state, python_state = x.clone(), torch.get_rng_state(), random.getstate()
    found = compare(model, {"x": x, "scale": 0.5}, low=torch.bfloat16, high=high)
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert all(map(torch.equal, values, objects))
    assert [value.data_ptr() for value in objects] == addresses
    assert [buffer._version for buffer in model.buffers()] == versions
    assert list(vars(model)) == keys
    assert "mask" not in dict(model.named_buffers())
    assert model._non_persistent_buffers_set == set()
    assert (model.calls, model.training, model.linear.training) == (0, True, False)
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 8))
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    # the same masks and noise in both: others would make errors of about 1, where some ten roundings make 10 * 2^-8
    assert [layer.call for layer in found.layers if layer.name == "linear"] == [0, 1]
    assert all(layer.error is not None and layer.error < 0.2 for layer in found.layers)


def test_an_error_in_the_model_leaves_it_alone_too():
    model: Any = nn.Sequential(nn.BatchNorm1d(4), Part(lambda x: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        compare(model, torch.randn(4, 4), high=torch.float64)
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert model[0].weight.dtype == torch.float32
    assert not any(module._forward_hooks for module in model.modules())


def test_a_half_model_is_compared_with_itself_in_fp32():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).half()
    found = compare(model, (torch.randn(4, 8, dtype=torch.float16),))
    assert [layer.dtypes for layer in found.layers] == [("FP16", "FP32")] * 3
    assert model[0].weight.dtype == torch.float16
    assert found.first() is None


def test_a_layer_that_only_one_precision_runs_diverges():
    model: Any = Part(lambda x: (model.high if x.dtype == torch.float32 else model.low)(x))
    model.low, model.high = nn.Identity(), nn.Identity()
    around = nn.Sequential(nn.Linear(4, 4), model)
    notes = {layer.name: layer.note for layer in compare(around, torch.eye(4)).layers}
    assert notes == {"0": "", "1.low": "ran in low only", "1": "", "": "", "1.high": "ran in high only"}


@pytest.mark.parametrize(
    ("error", "words", "device", "more"),
    [
        (UnsupportedDtype, r"low=torch.int8\): give torch.float16", "cpu", {"low": torch.int8}),
        (StateError, "cpu and meta; move them to one", "meta", {}),
    ],
)
def test_bad_arguments_are_errors(error: type[Exception], words: str, device: str, more: dict):
    with pytest.raises(error, match=words):
        compare(nn.Linear(4, 4, device=device), torch.ones(1, 4), **more)
    with pytest.raises(ConversionError, match=r"compare takes an nn\.Module, not builtin_function_or_method"):
        compare(cast("nn.Module", torch.relu), torch.ones(1, 4))


@pytest.mark.parametrize("part", [False, True])
def test_a_decorated_model_is_compared_with_fp32(level: str, part: bool):
    model = nn.Sequential(nn.Linear(8, 8), Part(lambda x: (x + 1000) - 1000), nn.Linear(8, 4))
    decorate(model, level=level)
    first: Any = compare(nn.Sequential(model) if part else model, torch.randn(16, 8)).first()
    assert (first.name, first.dtypes) == ("0.1" if part else "1", ("FP16", "FP32"))


def test_differences_add_up_over_tensors():
    high = [torch.randn(3, 4), torch.randn(7)]
    low = [tensor + 1e-3 * torch.randn_like(tensor) for tensor in high]
    found = Difference()
    for rows, pair in zip((None, 2), zip(low, high, strict=True), strict=True):
        found.add(*pair, rows=rows)
    want, got = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (high, low))
    error = ((got - want).norm() / want.norm()).item()
    assert found.error == pytest.approx(error, rel=64 * 2.0**-53)  # two sums of 19 squares, in another order
    assert found.sqnr_db_or_none == found.sqnr_db == pytest.approx(-20 * math.log10(error))
    assert Difference().sqnr_db_or_none is None
    for missing in (None, torch.ones(3)):  # one without its counterpart compares nothing
        found.comparable = True
        found.add(torch.ones(2), missing)
        assert found.sqnr_db_or_none is None


@pytest.mark.parametrize(
    ("low", "high", "error", "sqnr"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0, math.inf),
        ([1.0, 0.0], [0.0, 0.0], math.inf, -math.inf),
        ([0.0, math.nan], [3.0, 1.0], 1.0, math.nan),
        ([4.0, 2.0, math.nan], [math.inf, 1.0, 5.0], 1.0, math.nan),  # of the second elements alone
    ],
)
def test_limits(low: list[float], high: list[float], error: float, sqnr: float):
    found = Difference()
    found.add(torch.tensor(low), torch.tensor(high))
    assert (found.error, found.sqnr_db) == pytest.approx((error, sqnr), rel=0, abs=0, nan_ok=True)
    assert (found.nonfinite_low, found.nonfinite_high) == (sum(map(math.isnan, low)), sum(map(math.isinf, high)))
