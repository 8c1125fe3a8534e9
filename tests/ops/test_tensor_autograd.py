"""A Float8Tensor in ordinary code: values of the dequantised one, and gradients of one that a layer returned."""

import pytest
import torch
from casts import assert_same
from chains import chain
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.ops.tensor import Float8Tensor

# name -> (function of y [6, 4, 50], whether the result is still in FP8)
OPS = {
    "relu": (lambda y: y.relu(), False),
    "gelu": (F.gelu, False),
    "add": (lambda y: y + 1, False),
    "radd": (lambda y: 1 - y, False),
    "square": (lambda y: y * y, False),
    "float": (lambda y: y.bfloat16().float(), False),
    "double": (lambda y: y.double(), False),
    "to": (lambda y: y.to(torch.bfloat16), False),
    "dequantize": (lambda y: y.dequantize(), False),
    "cat": (lambda y: torch.cat([y, y * 2], dim=-1), False),
    "stack": (lambda y: torch.stack([y, y]), False),
    "index": (lambda y: y[torch.tensor([0, 2, 2])], False),
    "norm": (lambda y: F.layer_norm(y, (50,)), False),
    "softmax": (lambda y: y.softmax(-1), False),
    "matmul": (lambda y: y @ torch.ones(50, 3), False),
    "linear": (lambda y: F.linear(y, torch.ones(3, 50)), False),
    "dropout": (lambda y: F.dropout(y, 0.5, training=True), False),
    "evaluated dropout": (lambda y: F.dropout(y, 0.5, training=False), True),
    "slice": (lambda y: y[..., :4], True),
    "select": (lambda y: y[1], True),
    "view": (lambda y: y.view(24, 50), True),
    "reshape": (lambda y: y.reshape(6, 4, 5, 10), True),
    "flatten": (lambda y: y.flatten(), True),
    "transpose": (lambda y: y.transpose(0, 1), True),
    "permute": (lambda y: y.permute(2, 0, 1), True),
    "contiguous": (lambda y: y.transpose(0, 1).contiguous(), True),
    "unsqueeze": (lambda y: y.unsqueeze(1).squeeze(1), True),
    "chunk": (lambda y: y.chunk(2, dim=-1)[1], True),
    "split": (lambda y: y.split([10, 40], dim=-1)[0], True),
    "unbind": (lambda y: y.unbind(1)[2], True),
    "expand": (lambda y: y.unsqueeze(0).expand(3, -1, -1, -1), True),
    "clone": (lambda y: y.clone(), True),
    "same dtype": (lambda y: y.to(y.dtype), True),
}


# Those without a gradient.
OTHERS = {
    "equal": lambda y: y == y,
    "item": lambda y: torch.tensor(y[0, 0, 0].item()),
    "where": lambda y: torch.where(y > 0, y, 0),
    "zeros_like": torch.zeros_like,
    **{name: function for name, (function, _) in OPS.items()},
}


@pytest.mark.parametrize("name", OTHERS)
def test_values_are_those_of_the_dequantised_tensor(name: str):
    for granularity in (fe.PerTensor(), fe.PerRow(), fe.PerBlock(16, 16)):
        q = fe.quantize(torch.randn(6, 4, 50), fe.Cast(fe.E4M3, granularity))
        results = []
        for x in (q, q.dequantize()):
            torch.manual_seed(3)
            results.append(OTHERS[name](x))
        found, want = results
        plain = found.dequantize() if isinstance(found, Float8Tensor) else found
        assert plain.dtype == want.dtype
        assert torch.equal(plain, want)


@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_are_those_of_the_dequantised_tensor(name: str):
    function, keeps = OPS[name]
    y = chain(sizes=(20, 50, 30)).up(torch.randn(6, 4, 20))
    assert isinstance(y, Float8Tensor)
    plain = y.dequantize().detach().requires_grad_()
    torch.manual_seed(3)
    found = function(y)
    torch.manual_seed(3)
    want = function(plain)
    assert isinstance(found, Float8Tensor) == keeps
    assert found.shape == want.shape
    assert found.dtype == want.dtype
    values = found.dequantize() if isinstance(found, Float8Tensor) else found
    assert_same(values.detach().double(), want.detach().double(), name)
    dy = torch.randn_like(want)
    (grad,) = torch.autograd.grad(found, y, dy)
    (wanted,) = torch.autograd.grad(want, plain, dy)
    assert type(grad) is torch.Tensor
    assert_same(grad, wanted, name)


def test_the_gradient_reaches_the_layer_through_any_of_them():
    model = chain(sizes=(20, 50, 30), bias=False)
    x = torch.randn(6, 20, requires_grad=True)
    y = model.up(x)
    (y.relu().sum() + y[:, :4].dequantize().sum()).backward()
    dy = (y.dequantize() > 0).double()
    dy[:, :4] += 1
    want = dy.detach() @ model.up.weight.double()
    assert x.grad is not None
    noise = (x.grad.double() - want).square().sum() / want.square().sum()
    assert noise < 10**-2.2  # E5M2 by E4M3 leaves 24.5 dB


def test_adding_a_float8tensor_into_a_plain_one_is_not():
    y = chain(sizes=(20, 50, 30)).up(torch.randn(6, 20)).detach()
    total = torch.ones(6, 50)
    total += y
    assert torch.equal(total, 1 + y.dequantize())


def test_a_view_is_read_by_the_next_layer_as_it_is():
    model = chain(sizes=(20, 50, 30))
    x = torch.randn(6, 4, 20)
    y = model.down(model.up(x).transpose(0, 1))
    assert torch.equal(y, model.down(model.up(x.transpose(0, 1))))
    assert fe.inspect(model).layers[1]["input"]["ready"] == 3
