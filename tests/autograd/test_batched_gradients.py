"""Several gradients in one backward pass: layers in FP8, norms and activations refuse them by name, 16 bits take them.

torch.autograd.grad(..., is_grads_batched=True), jacobian(vectorize=True)   autograd's own, older vmap
torch.func.vmap of a backward pass                                          the forward ran outside of it
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import EVERY_FP8_RECIPE, converted, same, tables
from torch import nn
from torch.autograd.functional import jacobian

import fp8engine as fe
from fp8engine.numerics.recipe import resolve

# torch says of its older vmap that some operations run one after another.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

ROWS, WIDTH = 4, 32


def is_grads_batched(model, x):
    y = model(x).square().sum(-1)
    return torch.autograd.grad(y, x, torch.eye(ROWS), is_grads_batched=True)[0]


def vectorized(model, x):
    return jacobian(lambda x: model(x).square().sum(-1), x, vectorize=True)


def vmap_of_backward(model, x):
    y = model(x).square().sum(-1)
    return torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(ROWS))


WAYS = [is_grads_batched, vectorized, vmap_of_backward]


def net(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, 16)), recipe)


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("recipe", [*EVERY_FP8_RECIPE, "auto"])
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_fp8_refuses_a_batch_of_gradients(way: Callable, recipe: str):
    model, twin = net(recipe), net(recipe)
    wanted = r"^2: an FP8 layer does not take several gradients at once .*overrides=\{'2': 'bf16'\}"
    with pytest.raises(fe.errors.GradientError, match=wanted):
        way(model, batch())
    twin(batch())
    assert same(tables(model), tables(twin)), "only the forward was counted"
    model(batch()).sum().backward()  # and goes on as before


def one_expert() -> Callable:
    experts = fe.GroupedLinear(1, WIDTH, 16, recipe="current")
    return lambda x: experts(x, [len(x)])


def of_rows(layer: nn.Module) -> Callable:
    return lambda x: layer(x[None])[0]


LAYERS: dict[str, Callable[[], Callable]] = {
    "linear": lambda: fe.Linear(WIDTH, 16, recipe="current"),
    "norm and linear": lambda: fe.LayerNormLinear(WIDTH, 16, recipe="current"),
    "smoothed": lambda: fe.smooth(fe.LayerNormMLP(WIDTH, 48, "swiglu", recipe="current")),
    "experts": one_expert,
    "block": lambda: of_rows(fe.TransformerLayer(WIDTH, 48, fe.Heads(2), recipe="current")),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_so_does_every_layer(way: Callable, kind: str):
    layer = LAYERS[kind]()
    with pytest.raises(fe.errors.GradientError, match="does not take several gradients at once"):
        way(layer, batch())
    with pytest.raises(fe.errors.GradientError, match=r"^[\w.]+: .*torch\.func's transforms"):
        torch.func.grad(lambda x: layer(x).sum())(batch())


@pytest.mark.parametrize("way", WAYS)
def test_so_do_a_norm_and_an_activation_that_can_write_codes(way: Callable):
    for last in (nn.LayerNorm(WIDTH), nn.GELU()):
        model = converted(nn.Sequential(nn.Linear(WIDTH, WIDTH), last, nn.Linear(WIDTH, WIDTH)), "current")
        model(batch()).sum().backward()
        wanted = "^the gradient of a.* that can write FP8 codes does not take several gradients at once .*fuse=False"
        with pytest.raises(fe.errors.GradientError, match=wanted):
            way(model[:2], batch())


@pytest.mark.parametrize("way", WAYS)
def test_so_does_attention_in_fp8_between_layers_in_16_bits(way: Callable):
    layer = of_rows(fe.Attention(WIDTH, fe.Heads(1, width=64, causal=True, softmax="fp8"), recipe="fp32"))
    with pytest.raises(fe.errors.GradientError, match=r"^attention in FP8 does not take several .*softmax='16 bits'"):
        way(layer, batch())


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_layers_in_16_bits_take_them(way: Callable, recipe: str):
    model, x = nn.Sequential(fe.Linear(WIDTH, 16, recipe=recipe)), batch()
    y = model(x).square().sum(-1)
    rows = torch.stack([torch.autograd.grad(one, x, retain_graph=True)[0] for one in y])
    tolerance = 1e-5 if recipe == "fp32" else 2.0**-7  # one rounding to BF16, of 16 products in another order
    torch.testing.assert_close(way(model, batch()), rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", [is_grads_batched, vmap_of_backward])
def test_auto_describes_none_of_them(way: Callable):
    """Of a layer that it keeps in 16 bits, in a step that it samples: a Jacobian's columns are no training step."""
    model = converted(nn.Sequential(nn.Linear(WIDTH, 16)), fe.auto(interval=1))
    model(batch())
    layer: Any = model[0]
    layer.numerics.recipe = resolve("bf16")
    assert layer.numerics.state.samples is not None
    assert way(layer, batch()).isfinite().all()
    assert not layer.numerics.state.backward_seen
