"""torch.func on converted models: functional_call works; transforms are refused by name under every recipe."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import FP8_RECIPES, converted, same, tables
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fp8engine as fe

# torch.func.jvp imports torch's decompositions, which are TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def net(recipe: str, bias: bool = True):
    torch.manual_seed(0)
    return converted(nn.Sequential(nn.Linear(32, 48, bias), nn.GELU(), nn.Linear(48, 16)), recipe)


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(step)) * (step + 1)


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "auto"])
def test_functional_call_is_the_call_bit_for_bit(recipe: str):
    model = net(recipe)
    other = copy.deepcopy(model)
    for step in range(3):  # scales of "delayed" are predicted from the second on
        x = batch(step).requires_grad_()
        model(x).square().mean().backward()
        parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        leaf = batch(step).requires_grad_()
        functional_call(other, parameters, (leaf,)).square().mean().backward()
        assert same([leaf.grad], [x.grad])
        for name, p in model.named_parameters():
            assert same([parameters[name].grad], [p.grad]), name
            with torch.no_grad():
                p -= p.grad  # an unchanged weight would not be cast again
            p.grad = None
        # Parameters from outside of the model tell `auto` of no step: new tensors may be parts of one gradient.
        fe.weights_changed(other)
        assert same(tables(other), tables(model))


def dual(model, x):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "grad": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(2, 4, 16))[0],
    "vmap": lambda model, x: vmap(model)(x),
    "jvp": lambda model, x: jvp(model, (x,), (x,)),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "hessian": lambda model, x: hessian(lambda x: model(x).sum())(x),
    "grad of grad": lambda model, x: grad(lambda x: grad(lambda x: model(x).square().sum())(x).sum())(x),
}
FORWARD_MODE = {"forward_ad": dual}


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "auto"])
@pytest.mark.parametrize("asked", TRANSFORMS)
def test_a_transform_is_refused_with_the_layer_and_the_remedy(recipe: str, asked: str):
    model = net(recipe)
    before = tables(copy.deepcopy(model))
    wanted = r"^0: an FP8 layer does not take torch\.func's transforms .*overrides=\{'0': 'bf16'\}"
    with pytest.raises(fe.errors.GradientError, match=wanted):
        TRANSFORMS[asked](model, batch(0))
    assert same(tables(model), before)
    model(batch(0)).sum().backward()  # and goes on as before


@pytest.mark.parametrize("asked", TRANSFORMS)
def test_a_transform_is_refused_in_a_graph_as_well(asked: str):
    """Of `grad` a graph gave zeros."""
    torch._dynamo.reset()
    model = net("current")
    with pytest.raises(fe.errors.GradientError, match=r"^0: an FP8 layer does not take torch\.func's transforms"):
        torch.compile(lambda x: TRANSFORMS[asked](model, x), backend="aot_eager")(batch(0))


def dual_bias(model, x):
    bias = model[0].bias.detach()
    with forward_ad.dual_level():
        return functional_call(model, {"0.bias": forward_ad.make_dual(bias, bias)}, x)


@pytest.mark.parametrize("asked", [dual, dual_bias])
def test_forward_mode_is_refused_by_its_own_name(asked):
    with pytest.raises(fe.errors.GradientError, match=r"^0: .* does not take forward-mode AD .*'bf16'"):
        asked(net("current"), batch(0))


MADE: dict[str, Callable] = {
    "converted": lambda: converted(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))),
    "norm and linear": lambda: fe.LayerNormLinear(32, 16, recipe="current", norm="rms"),
    "norm and MLP": lambda: fe.LayerNormMLP(32, 48, "swiglu", recipe="current"),
    "transformer": lambda: fe.TransformerLayer(32, 48, 4, recipe="current"),
}


@pytest.mark.parametrize("made", MADE)
def test_behind_a_norm_too_and_a_norm_alone_takes_it(made: str):
    model = MADE[made]()
    with pytest.raises(fe.errors.GradientError, match="an FP8 layer does not take forward-mode AD"):
        dual(model, batch(0))
    if made == "converted":
        for part, plain in ((model[0], nn.LayerNorm(32)), (model[2], nn.GELU())):
            assert "Producing" in type(part).__name__
            with forward_ad.dual_level():
                x = forward_ad.make_dual(batch(0), batch(1))
                found: Any = [forward_ad.unpack_dual(each(x)).tangent for each in (part, plain)]
                assert torch.equal(*found)


@pytest.mark.parametrize("asked", [*TRANSFORMS, *FORWARD_MODE])
def test_a_layer_in_16_bits_takes_them_all(asked: str):
    call = (TRANSFORMS | FORWARD_MODE)[asked]
    torch.manual_seed(0)
    ours = nn.Sequential(fe.Linear(32, 48, recipe="fp32"), nn.GELU(), fe.Linear(48, 16, recipe="fp32"))
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(call(ours, batch(0)), call(plain, batch(0)), rtol=0, atol=0)  # the same operations
