"""In-place operations on the results of converted and fused layers: the bits of operations that are not in place.

Autograd refuses to write into a view that a Function returns, and into a result that a Function has saved.
"""

import copy

import pytest
import torch
from support import FP8_RECIPES, converted, same
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.autograd import Memory, NormOf
from fp8engine.autograd.produce import norm
from fp8engine.nn.serving import ServedLinear
from fp8engine.ops.reference import Norm
from fp8engine.scaling.operands import Producer

WIDTH = 32


class StoredNorm(nn.Module):
    """The norm that keeps its input in FP8."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return norm(x, NormOf(Norm("rms", 1e-5), self.weight), Producer(), Memory(store="fp8"))


class Experts(nn.Module):
    """A grouped layer with the signature of the others."""

    def __init__(self, recipe):
        super().__init__()
        self.experts = fe.GroupedLinear(2, WIDTH, WIDTH, recipe=recipe)

    def forward(self, x):
        rows = x.flatten(0, -2)
        return self.experts(rows, [2, len(rows) - 2])


LAYERS = {
    "linear": lambda recipe: fe.Linear(WIDTH, WIDTH, recipe=recipe),
    "conv1d": lambda recipe: converted(nn.Sequential(Conv1D(WIDTH, WIDTH)), recipe),
    "norm_linear": lambda recipe: fe.LayerNormLinear(WIDTH, WIDTH, recipe=recipe),
    "norm_mlp": lambda recipe: fe.LayerNormMLP(WIDTH, 2 * WIDTH, "swiglu", recipe=recipe),
    "experts": Experts,
    "norm": lambda recipe: StoredNorm(),
}
SHAPES = {"2d": (6, WIDTH), "3d": (2, 3, WIDTH), "1d": (WIDTH,)}


def by_relu(h, in_place: bool):
    return torch.nn.functional.relu(h, inplace=in_place)


def by_dropout(h, in_place: bool):
    torch.manual_seed(1)
    return torch.nn.functional.dropout(h, 0.5, inplace=in_place)


def by_adding(h, in_place: bool):
    if not in_place:
        return h + 1
    h += 1
    return h


def by_writing_a_part(h, in_place: bool):
    if not in_place:
        return torch.cat([h[..., :1] * 0, h[..., 1:]], -1)
    h[..., 0] = 0
    return h


CONSUMERS = [by_relu, by_dropout, by_adding, by_writing_a_part]


def results(layer: nn.Module, x: torch.Tensor, consume, in_place: bool) -> list[torch.Tensor]:
    """Output and gradients of consume(layer(x)) in two steps, the second reading what the first has kept."""
    found = []
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        layer.zero_grad()
        y = consume(layer(x), in_place)
        (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
        found += [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return found


@pytest.mark.parametrize("consume", CONSUMERS, ids=lambda consume: consume.__name__)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_place_is_what_out_of_place_is(recipe: str, kind: str, consume):
    for name, shape in SHAPES.items():
        if name == "1d" and kind == "experts":
            continue
        layer, x = LAYERS[kind](recipe), torch.randn(shape)
        twin = copy.deepcopy(layer)
        assert same(results(layer, x, consume, True), results(twin, x, consume, False)), name


@pytest.mark.parametrize("kind", LAYERS)
def test_a_forward_hook_may_write_into_the_result(kind: str):
    layer, x = LAYERS[kind]("current"), torch.randn(6, WIDTH)
    twin = copy.deepcopy(layer)
    layer.register_forward_hook(lambda module, args, y: y.mul_(2))
    assert same(results(layer, x, lambda h, _: h, True), results(twin, x, lambda h, _: h * 2, False))


@pytest.mark.parametrize("backend", ["cublas", "reference"])
@pytest.mark.parametrize("out_features", [16, 17])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_no_backend_hands_out_a_view(recipe: str, out_features: int, backend: str):
    layer = fe.Linear(WIDTH, out_features, recipe=recipe)
    with fe.backend(backend):
        y = layer(torch.randn(16, WIDTH))
        assert not y._is_view()
        y.relu_().sum().backward()


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "norm_mlp"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_place_in_a_compiled_graph(recipe: str, kind: str):
    torch.compiler.reset()
    layer, x = LAYERS[kind](recipe), torch.randn(2, 3, WIDTH)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(nn.Sequential(layer, nn.ReLU(inplace=True)), backend="aot_eager", fullgraph=True)
    plain = nn.Sequential(twin, nn.ReLU())
    x1, x2 = (x.clone().requires_grad_() for _ in range(2))
    y1, y2 = compiled(x1), plain(x2)
    y1.sum().backward()
    y2.sum().backward()
    assert same([y1, x1.grad], [y2, x2.grad])
    assert same([p.grad for p in layer.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("grad", [False, True])
def test_the_result_of_a_served_layer_may_be_written(grad: bool, shape):
    layer = ServedLinear.of(nn.Linear(WIDTH, WIDTH), fe.rowwise())
    x = torch.randn(shape, requires_grad=grad)
    wanted = layer(x).detach() + 1
    y = layer(x)
    y += 1
    assert torch.equal(y.detach(), wanted)


@pytest.mark.parametrize("granularity", [fe.PerTensor(), fe.PerRow(), fe.PerBlock(1, 16)], ids=str)
def test_what_a_float8_tensor_dequantises_to_may_be_written(granularity):
    q = fe.quantize(torch.randn(2, 3, WIDTH), fe.Cast(fe.E4M3, granularity)).requires_grad_()
    values = q.dequantize()
    values *= 2
    values.sum().backward()
    assert q.grad is not None
    assert torch.equal(q.grad, torch.full((2, 3, WIDTH), 2.0))
