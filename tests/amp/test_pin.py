"""fe.amp.pin_fp32: a module in FP32 inside an FP16 model, and as it was once unpinned."""

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from overflow_cases import Part, in_fp16
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.amp.decorate import decorate
from fp8engine.amp.overflow import find_overflow
from fp8engine.amp.pin import is_pinned, pin_fp32
from fp8engine.errors import ConversionError, UnknownName

HALF, FULL = torch.float16, torch.float32


class Net(nn.Module):
    """Layers of several kinds: a matmul, an RNN whose weights are held twice, a norm with buffers."""

    def __init__(self):
        super().__init__()
        self.fc: Any = nn.Linear(8, 8)
        self.rnn, self.norm = nn.GRU(8, 8, batch_first=True), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.rnn(self.fc(x))[0][:, -1]))


class Seen(nn.Module):
    """Notes the dtypes it is called with and whether autocast is on; returns what it was told to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.seen: list = []

    def forward(self, x, nested=None, *, flag=None):
        inner = [t.dtype for t in nested["a"]] if nested else None
        self.seen.append((x.dtype, inner, flag, torch.is_autocast_enabled("cpu"), self.weight.dtype))
        return {"y": x * self.weight, "index": torch.arange(2), "rest": [x.double(), None, "text"]}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_forward_runs_in_fp32_with_autocast_off(low: torch.dtype):
    module, hooks = Seen().to(low), []
    module.register_forward_hook(lambda *_: hooks.append("called"))
    pin_fp32(module)
    with torch.autocast("cpu", low):
        output = module(torch.ones(2, dtype=low), {"a": (torch.ones(2, dtype=low), torch.arange(2))}, flag="kept")
        assert torch.is_autocast_enabled("cpu"), "on again afterwards"
    assert module.seen == [(torch.float32, [torch.float32, torch.int64], "kept", False, torch.float32)]
    assert hooks == ["called"], "once, though the weights are lent"
    assert module.weight.dtype is low
    assert (output["y"].dtype, output["index"].dtype) == (torch.float32, torch.int64)
    assert output["rest"][0].dtype is torch.float64
    assert output["rest"][1:] == [None, "text"]


@pytest.mark.parametrize(
    ("output", "under_autocast", "given", "expected"),
    [
        ("auto", True, HALF, FULL), ("auto", False, HALF, HALF), ("auto", False, FULL, FULL),
        ("fp32", False, HALF, FULL), ("input", True, HALF, HALF), ("input", True, FULL, FULL),
        ("input", True, torch.bfloat16, torch.bfloat16),
    ],
)  # fmt: skip
def test_dtype_of_the_output(output: str, under_autocast: bool, given: torch.dtype, expected: torch.dtype):
    module = Seen().to(given)
    pin_fp32(module, output=output)
    with torch.autocast("cpu", torch.float16, enabled=under_autocast):
        assert module(torch.ones(2, dtype=given))["y"].dtype is expected


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_values_and_gradients_are_those_of_fp32(low: torch.dtype):
    # Weights in FP16: outputs as those of the same weights in FP32, gradients the same rounded to FP16 once.
    model: Any = Net().to(low)
    wide, pinned, x = copy.deepcopy(model).float(), copy.deepcopy(model), torch.randn(16, 3, 8).to(low)
    pin_fp32(pinned, output="fp32")
    y, z = wide(x.float()), pinned(x)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    assert all(torch.equal(p.grad.to(low), q.grad) for p, q in zip(wide.parameters(), pinned.parameters(), strict=True))


def test_state_dict_parameters_hooks_and_class_are_the_very_ones():
    model, called = Net(), []
    before, keys, told = [*model.parameters(), *model.buffers()], list(model.state_dict()), repr(model.fc)
    signature = inspect.signature(model.fc.forward)
    model.fc.register_forward_hook(lambda *_: called.append("hook"))
    first, second = pin_fp32(model.fc), pin_fp32(model.fc, output="fp32")
    assert isinstance(model.fc, nn.Linear)
    assert sum(kind.__name__ == "Fp32Pinned" for kind in type(model.fc).__mro__) == 1, "twice is once"
    assert model.fc._fp32_output == "fp32"
    assert (repr(model.fc), inspect.signature(model.fc.forward)) == (told, signature)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
    model(torch.randn(2, 3, 8))
    assert called == ["hook"], "once"
    second.remove()
    first.remove()
    assert type(model.fc) is nn.Linear
    assert "_fp32_output" not in model.fc.__dict__
    with pin_fp32(model.fc):
        assert type(model.fc) is not nn.Linear
    assert type(model.fc) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_statistics_written_in_forward_stay_written(dtype: torch.dtype):
    plain, pinned, x = nn.BatchNorm1d(4), nn.BatchNorm1d(4).to(dtype), torch.randn(8, 4).to(dtype) + 5
    pin_fp32(pinned)
    plain(x.float())
    pinned(x)
    assert torch.equal(plain.running_mean.to(dtype), pinned.running_mean)  # pyright: ignore
    assert pinned.num_batches_tracked == 1


def test_a_buffer_that_forward_assigns_is_the_new_one():
    seen: Any = nn.Module()
    seen.register_buffer("mean", torch.zeros(2))
    seen.register_buffer("rows", torch.zeros(0, 2))

    def forward(x):
        seen.mean = 0.5 * seen.mean + 0.5 * x.mean(0)
        seen.rows = torch.cat([seen.rows, x])
        return x

    module = Part(forward, seen=seen).half()
    pin_fp32(module)
    for _ in range(3):
        module(torch.ones(1, 2).half())
    assert torch.equal(seen.mean, torch.full((2,), 0.875).half())
    assert torch.equal(seen.rows, torch.ones(3, 2).half())


@pytest.mark.parametrize(
    "parametrized",
    [nn.utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5), parametrizations.weight_norm],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_a_hook_has_computed_in_16_bits_is_cast(parametrized: Callable):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4).half()
    parametrized(layer)
    plain = layer.half()(x)
    pin_fp32(layer)
    y = layer(x)
    # One rounding of the weight to FP16, 2^-11, of 4 products, and those of the plain sum and of the result: 8 2^-11.
    torch.testing.assert_close(y, plain, rtol=8 * 2.0**-11, atol=8 * 2.0**-11)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert layer.weight.dtype == torch.float16


Note = make_dataclass("Note", ["kept", "y"])
Bag = type("Bag", (dict,), {})


@pytest.mark.parametrize("low", [torch.float16, torch.float32])
@pytest.mark.parametrize("wrap", [pin_fp32, decorate, functools.partial(decorate, level="O2")])
def test_what_a_module_writes_into_its_arguments_is_there_afterwards(wrap: Callable, low: torch.dtype):
    # As auxiliary losses and caches are kept: in a list, a dict and a dataclass.
    def forward(x, losses, cache, note):
        y = fc(x)
        losses.append(y.float().sum())
        cache["new"] = cache.pop("old") + y
        note.y = y
        return y

    fc, kept, empty = nn.Linear(2, 2), torch.ones(2, dtype=low), []
    module = Part(forward, fc=fc)
    wrap(module)
    losses, cache, note = [kept, (kept, 7)], Bag(old=kept), Note(kept, None)
    module(kept, empty, {"old": 1.0}, Note(None, None))
    y = module(kept, losses, cache, note)
    assert torch.equal(empty[0], losses[2])
    assert losses[0] is losses[1][0] is note.kept is kept, "what the module left alone is what it was"
    assert (len(losses), list(cache), type(cache)) == (3, ["new"], Bag)
    assert torch.equal(note.y.half(), y.half())


# Dynamo asks any tensor that is no leaf for its gradient, and hides torch's warning unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("pin_first", [True, False])
def test_compiled_before_or_after(low: bool, pin_first: bool):
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(HALF if low else FULL)
    compiled: Any = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 8).to(model[0].weight.dtype)
    with torch.autocast("cpu", torch.float16, enabled=not low):
        if not pin_first:
            compiled(x)
        pin_fp32(model[0])
        pin_fp32(model[2])
        eager = model(x)
        assert eager.dtype is (HALF if low else FULL)
        torch.testing.assert_close(compiled(x), eager, rtol=2**-9, atol=2**-9)  # two roundings of FP16, 2^-11 each


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant: bool):
    model, x = Net(), torch.randn(4, 3, 8)
    model.norm.eval()
    pin_fp32(model.rnn)
    pin_fp32(model.head)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        with in_fp16():
            y = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant) if again else model(x)
        y.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def by_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), by_file])
@pytest.mark.parametrize("first", [pin_fp32, decorate])
def test_copies_of_a_module_that_is_pinned_and_decorated(first, way):
    model: Any = nn.Linear(4, 4)
    for around in (first, decorate if first is pin_fp32 else pin_fp32):
        around(model)
    twin, x = way(model), torch.full((2, 4), 1e5)  # beyond FP16
    assert torch.equal(twin(x), model(x))
    assert twin(x).isfinite().all()
    assert type(twin) is type(model)
    rnn: Any = nn.GRU(8, 8)
    pin_fp32(rnn, output="input")
    twin = way(rnn)
    assert (type(twin), twin._fp32_output) == (type(rnn), "input")
    assert torch.equal(twin(torch.ones(2, 8))[0], rnn(torch.ones(2, 8))[0])
    pin_fp32(twin).remove()
    assert type(twin) is nn.GRU
    assert type(rnn) is not nn.GRU


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_class_that_convert_makes_stays_when_a_pin_goes(pinned_first: bool):
    model: Any = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    pin = pin_fp32(model[0], output="input") if pinned_first else None
    fe.convert(model, "current")
    x = torch.ones(16, 16)
    model(x)
    kept = type(model[0])
    pin = pin or pin_fp32(model[0], output="input")
    assert isinstance(model[0], nn.LayerNorm)
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin[0]) is type(model[0])
    assert is_pinned(twin[0])
    assert torch.equal(twin(x), model(x))
    pin.remove()
    assert type(model[0]) is kept
    assert not is_pinned(model[0])
    assert model(x).isfinite().all()


def test_a_decoration_around_a_pin_outlives_it():
    model: Any = nn.Linear(4, 4)
    pin = pin_fp32(model)
    decorate(model)
    x = torch.full((2, 4), 1e5)
    assert model(x).isfinite().all()
    pin.remove()
    assert not model(x).isfinite().all(), "FP16 again"
    pin_fp32(model)
    assert model(x).isfinite().all()


def test_bad_input():
    patched: Any = nn.Linear(2, 2)
    patched.forward = lambda x: x
    for error, words, given, output in (
        (UnknownName, "unknown output of pin_fp32 'fp23'; did you mean 'fp32'", nn.Linear(2, 2), "fp23"),
        (ConversionError, "not Tensor: pin the modules in it instead", torch.ones(2), "auto"),
        (ConversionError, "not ModuleList: pin the modules in it instead", nn.ModuleList([nn.Linear(2, 2)]), "auto"),
        (ConversionError, "forward of this Linear was replaced on the instance", patched, "auto"),
    ):
        with pytest.raises(error, match=words):
            pin_fp32(given, output=output)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("around", [False, True])
def test_a_pin_on_or_around_a_decorated_model(level: str, dtype: torch.dtype, around: bool):
    fc = nn.Linear(4, 4)
    root: Any = decorate(Part(lambda x: (fc(x) * 0 + x) @ (fc(x) * 0 + x).t(), fc=fc), level=level)
    model, x = nn.Sequential(root) if around else root, torch.full((2, 4), 150.0, dtype=dtype)
    assert model(x).isinf().all()  # 90,000 in FP16
    assert model(x).isinf().all()
    pin = pin_fp32(model, output="fp32" if around else "auto")
    assert torch.equal(model(x), torch.full((2, 2), 90000.0))
    assert torch.equal(model(x * 400), torch.full((2, 2), 1.44e10)), "no cast of 60,000 or of what it becomes"
    pin.remove()
    assert model(x).isinf().all()
    with find_overflow(model) as watch:
        model(x)
        assert watch.pin() == ["0" if around else ""]
        assert model(x).isfinite().all()
        assert watch.pin() == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_a_decorated_part_is_recomputed_in_fp32_too(reentrant: bool):
    part: Any = decorate(nn.Linear(4, 4))
    around = Part(lambda x: checkpoint(part, x, use_reentrant=reentrant), part=part)
    pin_fp32(around)
    x = torch.randn(3, 4, requires_grad=True)
    around(x).sum().backward()
    torch.testing.assert_close(part.weight.grad, x.detach().sum(0).expand(4, 4))  # FP16 would round x to 2^-11
