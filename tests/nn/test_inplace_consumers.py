"""In-place operations on the results of converted and fused layers: the bits of operations that are not in place.

Autograd refuses to write into a view that a Function returns, and into a result that a Function has saved.
"""

import copy
from typing import Any

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
        rows = x.view(-1, WIDTH)
        return self.experts(rows, [1, len(rows) - 1])


LAYERS: dict[str, Any] = {
    "linear": lambda recipe: fe.Linear(WIDTH, WIDTH, recipe=recipe),
    "conv1d": lambda recipe: converted(nn.Sequential(Conv1D(WIDTH, WIDTH)), recipe),
    "norm_linear": lambda recipe: fe.LayerNormLinear(WIDTH, WIDTH, recipe=recipe),
    "norm_mlp": lambda recipe: fe.LayerNormMLP(WIDTH, 2 * WIDTH, "swiglu", recipe=recipe),
    "experts": Experts,
    "norm": lambda recipe: StoredNorm(),
}
SHAPES = [(6, WIDTH), (2, 3, WIDTH), (WIDTH,)]
every_layer = pytest.mark.parametrize("kind", LAYERS)


def dropout(h: torch.Tensor, in_place: bool) -> torch.Tensor:
    torch.manual_seed(1)
    return nn.functional.dropout(h, 0.5, inplace=in_place)


def part(h: torch.Tensor) -> torch.Tensor:
    h[..., 0] = 0
    return h


# What writes, and the same out of place.
CONSUMERS: dict[str, tuple[Any, Any]] = {
    "relu": (nn.ReLU(inplace=True), nn.ReLU()),
    "dropout": (lambda h: dropout(h, True), lambda h: dropout(h, False)),
    "adding": (lambda h: h.add_(1), lambda h: h + 1),
    "a part": (part, lambda h: torch.cat([h[..., :1] * 0, h[..., 1:]], -1)),
}


def results(layer: nn.Module, x: torch.Tensor, consume: Any) -> list[torch.Tensor]:
    """Output and gradients of consume(layer(x)) in two steps, the second reading what the first has kept."""
    found = []
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        y = consume(layer(x))
        dy = torch.arange(y.numel()).view(y.shape).cos()
        found += [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]
    return found


@pytest.mark.parametrize("consumer", CONSUMERS)
@every_layer
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_place_is_what_out_of_place_is(recipe: str, kind: str, consumer: str):
    for shape in SHAPES:
        layer, x = LAYERS[kind](recipe), torch.randn(shape)
        apart = [results(each, x, consume) for each, consume in zip(twins(layer), CONSUMERS[consumer], strict=True)]
        assert same(*apart), shape


def twins(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    return layer, copy.deepcopy(layer)


@pytest.mark.parametrize("backend", ["cublas", "reference"])
@pytest.mark.parametrize("out_features", [16, 17])
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_no_backend_hands_out_a_view(recipe: str, out_features: int, backend: str):
    with fe.backend(backend):
        y = fe.Linear(WIDTH, out_features, recipe=recipe)(torch.randn(16, WIDTH))
        assert not y._is_view()
        y.relu_().sum().backward()


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["linear", "norm_linear", "norm_mlp"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_in_place_in_a_compiled_graph(recipe: str, kind: str, fresh):
    layer, twin = twins(LAYERS[kind](recipe))
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    compiled = torch.compile(nn.Sequential(layer, nn.ReLU(inplace=True)), backend="aot_eager", fullgraph=True)
    found = []
    for each, call in ((layer, compiled), (twin, nn.Sequential(twin, nn.ReLU()))):
        y = call(x)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), [x, *each.parameters()])])
    assert same(*found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_the_result_of_a_served_layer_may_be_written(grad: bool, shape):
    layer = ServedLinear.of(nn.Linear(WIDTH, WIDTH), fe.rowwise())
    x = torch.randn(shape, requires_grad=grad)
    wanted = layer(x).detach() + 1
    assert torch.equal(layer(x).add_(1).detach(), wanted)


@pytest.mark.parametrize("granularity", [fe.PerTensor(), fe.PerRow(), fe.PerBlock(1, 16)], ids=str)
def test_what_a_float8_tensor_dequantises_to_may_be_written(granularity):
    q = fe.quantize(torch.randn(2, 3, WIDTH), fe.Cast(fe.E4M3, granularity)).requires_grad_()
    (grad,) = torch.autograd.grad(q.dequantize().mul_(2).sum(), q)
    assert torch.equal(grad, torch.full((2, 3, WIDTH), 2.0))
