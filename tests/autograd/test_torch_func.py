"""torch.func on converted models: grad and vjp give what backward gives; the rest is refused by the layer's name."""

import copy

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


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("bias", [True, False])
def test_grad_of_functional_call_is_backward_bit_for_bit(recipe: str, bias: bool):
    model = net(recipe, bias)
    other = copy.deepcopy(model)
    parameters = {name: p.detach() for name, p in other.named_parameters()}

    def loss(parameters, x):
        return functional_call(other, parameters, (x,)).square().mean()

    for step in range(3):  # scales of "delayed" are predicted from the second on
        x = batch(step).requires_grad_()
        model(x).square().mean().backward()
        found, dx = grad(loss, argnums=(0, 1))(parameters, x.detach())
        assert same([dx], [x.grad])
        for name, p in model.named_parameters():
            assert torch.equal(found[name], p.grad), name
            with torch.no_grad():
                p -= p.grad
            p.grad, parameters[name] = None, parameters[name] - found[name]
        assert same(tables(other), tables(model))


def test_vjp_can_be_asked_twice_and_grad_without_gradients_of_the_input():
    model, x = net("current"), batch(0)
    dy = torch.randn(2, 4, 16)
    leaf = x.clone().requires_grad_()
    model(leaf).backward(dy)
    _, back, *_ = vjp(model, x)
    for _ in range(2):
        assert same(back(dy), [leaf.grad])


def dual(model, x):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


def of_weight(model, x):
    """Forward mode through the weight of the second layer."""
    weight = model[2].weight.detach()
    return jvp(lambda w: functional_call(model, {"2.weight": w}, (x,)), (weight,), (weight,))


REFUSED = {
    "vmap": (lambda model, x: vmap(model)(x), "0: .* does not take torch.func.vmap"),
    "jvp": (lambda model, x: jvp(model, (x,), (x,)), "0: .* does not take forward-mode AD"),
    "jvp of a weight": (of_weight, "2: .* does not take forward-mode AD"),
    "forward_ad": (dual, "0: .* does not take forward-mode AD"),
    "jacfwd": (lambda model, x: jacfwd(model)(x), "0: .* does not take forward-mode AD"),
    "hessian": (lambda model, x: hessian(lambda x: model(x).sum())(x), "0: .* does not take forward-mode AD"),
    "jacrev": (lambda model, x: jacrev(model)(x), "2: .* does not take torch.func.vmap"),
    "grad of grad": (
        lambda model, x: grad(lambda x: grad(lambda x: model(x).square().sum())(x).sum())(x),
        "0: .* does not take a second derivative",
    ),
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_has_no_rule_names_the_layer_and_the_remedy(asked: str):
    call, message = REFUSED[asked]
    with pytest.raises(fe.errors.GradientError, match=rf"{message}.*overrides=\{{'\d': 'bf16'\}}"):
        call(net("current"), batch(0))


@pytest.mark.parametrize("asked", REFUSED)
def test_a_layer_in_16_bits_takes_them_all(asked: str):
    call, _ = REFUSED[asked]
    torch.manual_seed(0)
    ours = nn.Sequential(fe.Linear(32, 48, recipe="fp32"), nn.GELU(), fe.Linear(48, 16, recipe="fp32"))
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(call(ours, batch(0)), call(plain, batch(0)), rtol=0, atol=0)  # the same operations


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: fe.LayerNormLinear(32, 16, recipe="current"), "linear"),
        (lambda: fe.LayerNormMLP(32, 16, recipe="current"), "up"),
    ],
)
def test_a_fused_layer_refuses_grad_by_name(layer, name: str):
    module = layer()
    with pytest.raises(fe.errors.GradientError, match=f"^{name}: .*torch.func's transforms where it is fused"):
        grad(lambda x: module(x).sum())(batch(0))
    assert module(batch(0)).requires_grad  # and goes on as before
