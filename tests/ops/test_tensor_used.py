"""A Float8Tensor in ordinary code and in fe.matmul: values of the dequantised one, and gradients.

fe.matmul is held against float64 products.  Of two FP8 operands: sums in FP32 (K 2^-24 sum |a b|), scales in FP32
(2^-22 |y|), one rounding to `out` (u |y|).  Ordinary tensors beside them keep autograd.
"""

from typing import Any, cast

import numpy as np
import pytest
import torch
from casts import assert_same
from chains import chain
from support import UNIT, assert_within
from torch import nn
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


GRANULARITIES = [fe.PerTensor(), fe.PerRow(), fe.PerBlock(1, 16), fe.PerBlock(16, 16)]
SHAPES = [(1, 1, 1), (3, 50, 33), (130, 200, 140), (4, 0, 3), (0, 5, 3), (3, 5, 0)]  # M, K, N


def operand(x: torch.Tensor, granularity, format=fe.E4M3, power_of_2: bool = True) -> fe.Float8Tensor:
    return fe.quantize(x, fe.Cast(format, granularity, power_of_2=power_of_2))


def check(a: Any, b: Any, bias: torch.Tensor | None = None, out: fe.Format = fe.FP32) -> None:
    """fe.matmul within the bound above of a @ b.T + bias in float64."""
    y = fe.matmul(a, b, bias_N=bias, out=out)
    a64, b64 = (t.dequantize().double().numpy() for t in (a, b))
    offset = 0.0 if bias is None else bias.double().numpy()
    want, u = a64 @ b64.T + offset, UNIT[out.dtype]
    bound = 1.01 * (
        (a64.shape[1] + 1) * 2.0**-24 * (np.abs(a64) @ np.abs(b64.T) + np.abs(offset))
        + (u + 2.0**-22) * np.abs(want)
        + out.smallest_normal * u
    )
    assert (type(y), y.dtype) == (torch.Tensor, out.dtype)
    assert_within(y, want, bound, f"{tuple(a.shape)} {out}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("right", GRANULARITIES, ids=str)
@pytest.mark.parametrize("left", GRANULARITIES, ids=str)
def test_two_fp8_tensors(left, right, shape):
    m, k, n = shape
    for power_of_2, out in ((True, fe.BF16), (False, fe.FP16), (False, fe.FP32)):
        a = operand(torch.randn(m, k), left, power_of_2=power_of_2)
        b = operand(torch.randn(n, k), right, power_of_2=power_of_2)
        check(a, b, None, out)
        check(a, b, torch.randn(n), out)
    check(operand(torch.randn(m, k), left, fe.E5M2), b)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_leading_dimensions_and_transposes(granularity):
    """A scale per row becomes one per column, along K: folded into the values before the sum."""
    x, w = torch.randn(2, 3, 5, 48), operand(torch.randn(24, 48), granularity)
    y = fe.matmul(operand(x, granularity), w, out=fe.FP32)
    assert y.shape == (2, 3, 5, 24)
    assert torch.equal(y.view(30, 24), fe.matmul(operand(x.view(30, 48), granularity), w, out=fe.FP32))
    assert fe.matmul(operand(x[0, 0, 0], fe.PerTensor()), w, out=fe.FP32).shape == (24,)
    check(operand(torch.randn(48, 20), granularity).t(), operand(torch.randn(48, 24), granularity).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_tensors_keep_autograd(dtype):
    a, b, bias = (torch.randn(size).to(dtype).requires_grad_() for size in ((6, 48), (24, 48), (24,)))
    y = fe.matmul(a, b, bias_N=bias, out=fe.FP32)
    assert y.dtype == torch.float32
    assert torch.allclose(y, nn.functional.linear(a.float(), b.float(), bias.float()))
    y.sum().backward()
    for t, want in ((a, b.sum(0).expand(6, 48)), (b, a.sum(0).expand(24, 48)), (bias, torch.full((24,), 6.0))):
        assert t.grad is not None
        assert t.grad.dtype == dtype
        assert (t.grad.float() - want.float()).abs().max() <= 4 * UNIT[dtype] * want.abs().max()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_beside_a_plain_tensor_an_fp8_one_is_dequantised_and_the_plain_one_gets_its_gradient(granularity):
    w, x = operand(torch.randn(24, 48), granularity), torch.randn(6, 48, requires_grad=True)
    y = fe.matmul(x, w, out=fe.FP32)
    assert torch.equal(y, nn.functional.linear(x, w.dequantize()))
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, w.dequantize().sum(0).expand(6, 48), atol=1e-5)
    assert torch.equal(fe.matmul(w, x, out=fe.FP32), nn.functional.linear(w.dequantize(), x))


def test_the_default_output_is_bf16_and_dtypes_of_plain_tensors_may_differ():
    a, b = torch.randn(6, 48), torch.randn(24, 48).bfloat16()
    assert fe.matmul(a, b).dtype == torch.bfloat16
    assert torch.equal(fe.matmul(a, b, out=fe.FP32), nn.functional.linear(a, b.float()))


def test_a_bias_beside_codes_has_a_gradient():
    a, bias_N, dy_MN = operand(torch.randn(6, 8), fe.PerTensor()), torch.randn(6, requires_grad=True), torch.randn(6, 6)
    fe.matmul(a, a, bias_N=bias_N, out=fe.FP32).backward(dy_MN)
    assert bias_N.grad is not None
    assert torch.allclose(bias_N.grad, dy_MN.sum(0), rtol=0, atol=6 * 2**-23)


@pytest.mark.parametrize(
    ("a", "b", "out", "error", "why"),
    [
        ((4, 8), (3, 9), fe.BF16, fe.errors.ShapeError, r"got \[4, 8\] and \[3, 9\]"),
        ((4, 8), (8,), fe.BF16, fe.errors.ShapeError, r"got \[4, 8\] and \[8\]"),
        ((4, 8), (2, 3, 8), fe.BF16, fe.errors.ShapeError, r"b \[N, K\]"),
        ((4, 8), (3, 8), fe.E4M3, fe.errors.UnsupportedDtype, "out=E4M3 needs a scale"),
        ((4, 8), (3, 8), torch.bfloat16, fe.errors.UnsupportedDtype, r"a Format as out \(fe.BF16\), not dtype"),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_what_matmul_refuses(plain: bool, a, b, out, error, why: str):
    x, w = torch.randn(a), torch.randn(b)
    if not plain:
        x, w = operand(x, fe.PerTensor()), operand(w, fe.PerTensor())
    with pytest.raises(error, match=why):
        fe.matmul(x, w, out=out)
    with pytest.raises(fe.errors.UnsupportedDtype, match="matmul takes tensors, not NoneType"):
        fe.matmul(x, None)


@pytest.mark.parametrize("plain", [True, False])
def test_a_bias_that_matmul_refuses(plain: bool):
    x = torch.randn(4, 8) if plain else operand(torch.randn(4, 8), fe.PerTensor())
    for shape in ((3,), (1,), (), (4, 4)):  # torch would broadcast all but the first
        with pytest.raises(fe.errors.ShapeError, match=r"b \[4, 8\] wants \[4\]"):
            fe.matmul(x, x, bias_N=torch.zeros(shape))
    with pytest.raises(fe.errors.UnsupportedDtype, match="matmul takes a tensor as bias_N, not float"):
        fe.matmul(x, x, bias_N=cast("torch.Tensor", 1.0))
