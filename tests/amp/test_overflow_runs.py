"""find_overflow where models run in unusual ways: threads, parts called alone, compiled, scripted, nested, copied."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from overflow_cases import BY_NAME, HEALTHY, PART, Net, Part, first, in_fp16, make, step, told, watched
from torch import nn

from fp8engine.amp.overflow import find_overflow
from fp8engine.amp.overflow.opwise import creates
from fp8engine.amp.overflow.reading import Reading
from fp8engine.amp.overflow.recorder import named_layers
from fp8engine.errors import ConversionError

EXP = BY_NAME["exp"]
# Dynamo asks any tensor that is no leaf for its gradient, and hides torch's warning unless warnings are errors.
NO_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def test_modules_called_in_threads(mode: str):
    exp = Part(lambda x: torch.exp(x.half() + 12))
    parts = nn.ModuleList([nn.Linear(4, 4), exp, nn.Linear(4, 4)])

    def forward(x):
        with ThreadPoolExecutor(3) as pool:
            return sum(pool.map(lambda part: part(x), parts))

    assert first(watched(Part(forward, parts=parts), torch.ones(2, 4), mode, 3), "layer") == ("parts.1",)
    watch = watched(nn.DataParallel(nn.Sequential(exp)), torch.ones(2, 4), "counters")
    assert first(watch, "layer") == ("0",), "a name as before the wrapper"


@NO_LEAF
@pytest.mark.usefixtures("fresh")
def test_a_module_compiled_in_place_counts_as_one_until_a_pass_is_watched_op_by_op():
    _, net = make(EXP, "nothing")
    net.blocks[1].compile(backend="aot_eager")
    compiled = net.blocks[1]._compiled_call_impl
    with find_overflow(net) as watch:
        for found in (("blocks.1", None, 0), (PART, "exp", 0)):
            step(net, EXP)
            assert first(watch, "layer", "op", "step") == found
    assert net.blocks[1]._compiled_call_impl is compiled


def test_the_model_inside_torch_compile_given_instead_of_what_is_called_is_said():
    called, net = make(EXP, "compile")
    said = pytest.warns(UserWarning, match="give it the object that is called, torch.compile's result")
    with said, find_overflow(net):
        step(called, EXP)


def test_a_watch_compiles_nothing_again():
    called, _ = make(HEALTHY, "compile")
    step(called, HEALTHY)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with find_overflow(called) as watch:
            step(called, HEALTHY)
        step(called, HEALTHY)
    assert watch.first() is None


def test_parts_called_by_themselves(mode: str):
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Sequential(Part(lambda x: x.half() / 0))})
    with find_overflow(model, mode=mode) as watch:
        for _ in range(3):
            model["decoder"](model["encoder"](torch.ones(2, 4))).sum().backward()
    assert first(watch, "layer", "op", "step") == ("decoder.0", "div", 1), "the second pass, counted from 0"


def test_a_gradient_found_where_several_passes_share_a_backward():
    model = nn.Sequential(nn.Linear(4, 4), Part(lambda x: torch.sqrt(x * 0)), nn.Linear(4, 4))
    with find_overflow(model) as watch:
        for _ in range(3):
            (model(torch.ones(2, 4)) + model(torch.ones(2, 4))).sum().backward()
            model.zero_grad()
    assert first(watch, "layer", "operand", "op") == ("1", "grad_input", "SqrtBackward0")


def test_watches_nest(mode: str):
    model, _ = make(EXP, "nothing")
    with find_overflow(model, mode=mode) as outer, find_overflow(model.blocks[1], mode="ops") as inner:
        step(model, EXP)
        step(model, EXP)
    for watch, layer in ((outer, PART), (inner, "part")):
        assert first(watch, "layer", "op") == (layer, "exp")


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: str, without):
    model, _ = make(EXP, "nothing")
    with find_overflow(model, mode=mode) as watch, without(), in_fp16():
        for _ in range(2):
            model(torch.randn(4, 8))
    assert first(watch, "layer", "op", "step") == (PART, "exp", 0)


def test_a_layer_that_overflows_in_place_in_inference_mode(mode: str):
    model = nn.Sequential(nn.Linear(4, 4), Part(lambda x: x.mul_(2.0**100).mul_(2.0**100)), nn.Linear(4, 4))
    watch = watched(model, torch.ones(2, 4), mode, 2, torch.inference_mode)
    assert told(watch, "layer", "op", "step") == [("1", "mul_", 0)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch's own jvp
def test_functional_transforms_pass(mode: str):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    loss = lambda weights, x: torch.func.functional_call(model, weights, (x,)).sum()  # noqa: E731
    x = torch.randn(5, 4)
    with find_overflow(model, mode=mode) as watch:
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        found = per_sample(dict(model.named_parameters()), x)
        tangent = torch.func.jvp(model, (x,), (x,))[1]
    assert found["0.weight"].shape == (5, 4, 4)
    assert tangent.shape == (5, 1)
    assert watch.first() is None


def test_a_watch_can_run_again_and_a_buffer_gone_bad_is_named_as_a_weight():
    model, net = make(HEALTHY, "compile")
    net.register_buffer("mean", torch.ones(2))
    net.register_buffer("mask", torch.full((2,), -torch.inf))
    watch = find_overflow(model, mode="ops")
    for _ in range(2):
        with watch:
            step(model, HEALTHY)
        assert watch.first() is None
    net.mean = torch.full((2,), torch.inf)
    with watch:
        step(model, HEALTHY)
    assert first(watch, "layer", "operand", "parameter", "step") == ("", "weight", "mean", 2)
    assert watch.report().passes == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_read(layout: torch.layout, mode: str):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    with find_overflow(encoder, mode=mode) as watch, torch.no_grad():
        encoder(torch.randn(2, 3, 16), src_key_padding_mask=torch.tensor([[False, False, True], [False] * 3]))
    assert watch.first() is None
    model = nn.Sequential(nn.Linear(4, 4), Part(lambda x: x * 1e38 * 1e38), nn.Linear(4, 4))
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout)
    assert first(watched(model, x, mode, under=torch.no_grad), "layer", "operand") == ("1", "output")


def test_names_are_those_of_the_model_before_it_was_wrapped():
    inner = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2))})
    part: Any = torch.compile(inner)
    model: Any = torch.compile(nn.DataParallel(nn.Sequential(part)))
    names = [name for name, _ in named_layers(model)]
    assert names == ["", "", "", "0", "0", "0.module", "0.module.0"], "a part that is called `module` keeps its name"
    assert [name for name, _ in named_layers(inner)] == ["", "module", "module.0"]


def test_a_compiled_model_stays_compiled_after_a_pass_watched_op_by_op():
    graphs = []
    called: Any = torch.compile(Net(), backend=lambda graph, _: (graphs.append(graph), graph)[1], fullgraph=True)
    with find_overflow(called, mode="ops") as watch:
        step(called, HEALTHY)
    assert not graphs, "eager in the block"
    step(called, HEALTHY)
    assert len(graphs) == 1
    assert watch.first() is None


NAN, INF, FINITE, LESS = (
    Reading(*ends, torch.float16) for ends in ((math.nan, math.nan), (0, math.inf), (-1, 1), (-math.inf, 1))
)


@pytest.mark.parametrize(
    ("given", "asked", "after", "made"),  # asked: the Inf is among its arguments, as in masked_fill
    [
        ([FINITE], False, FINITE, None), ([FINITE], False, NAN, "NaN"), ([FINITE], False, INF, "Inf"),
        ([FINITE], False, LESS, "-Inf"), ([FINITE, INF], False, NAN, "NaN"), ([FINITE, LESS], False, NAN, "NaN"),
        ([FINITE, NAN], False, NAN, None), ([INF], False, INF, None), ([LESS], False, LESS, None),
        ([NAN], False, INF, None), ([], False, INF, "Inf"), ([FINITE], True, INF, None), ([FINITE], True, NAN, "NaN"),
    ],
)  # fmt: skip
def test_what_an_op_creates(given: list[Reading], asked: bool, after: Reading, made: str | None):
    assert creates(given, asked, after) == made


def test_what_memory_held_before_it_was_written_does_not_matter():
    model = nn.Sequential(Part(lambda x: torch.empty_like(x, dtype=torch.float16).copy_(x * 1e6)))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert first(watched(model, torch.ones(2, 2)), "layer", "op") == ("0", "copy_")
    finally:
        torch.use_deterministic_algorithms(before)


class Handing:
    """What a trainer may put around a scaler: it hands every call on."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("around", [lambda scaler: scaler, Handing], ids=["plain", "around"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))], ids=["copy", "file"])
def test_a_model_and_a_scaler_may_be_copied_and_saved_while_they_are_watched(way, around):
    model, scaler = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), around(torch.amp.GradScaler("cpu", init_scale=8.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with find_overflow(model, scaler) as watch:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        twin, twin_scaler = way((model, scaler))
        scaler.step(optimizer)
        scaler.update()
        twin(torch.full((2, 4), torch.nan))
        twin_scaler.scale(torch.ones(()))
        twin_scaler.update(1.0)
    assert watch.report().passes == 1
    assert watch.first() is None
    assert (scaler.get_scale(), twin_scaler.get_scale()) == (8.0, 1.0)
    assert watch.scales == [(0, 8.0)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_part_counts_as_part_of_the_forward_around_it(mode: str):
    model: Any = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    nn.init.ones_(model[0].weight)
    watch = watched(model, torch.full((2, 4), 3e38), mode, 2)
    assert first(watch, "layer", "operand", "op") == ("", "output", "addmm")
    nn.init.constant_(model[0].weight, torch.inf)
    watch = watched(model, torch.ones(2, 4), mode)
    assert first(watch, "layer", "operand", "parameter") == ("", "weight", "0.weight")
    with pytest.raises(ConversionError, match=r"give the model as it was before torch\.jit"):
        find_overflow(model[0])
