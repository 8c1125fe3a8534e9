"""fe.matmul against float64 products of the operands' dequantised values; ordinary tensors beside them keep autograd.

Two FP8 operands: sums in FP32 (K 2^-24 sum |a b|), scales in FP32 (2^-22 |y|), one rounding to `out` (u |y|).
"""

from typing import Any

import numpy as np
import pytest
import torch
from support import UNIT, assert_within
from torch import nn

import fp8engine as fe

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
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_what_matmul_refuses(plain: bool, a, b, out, error, why: str):
    x, w = torch.randn(a), torch.randn(b)
    if not plain:
        x, w = operand(x, fe.PerTensor()), operand(w, fe.PerTensor())
    with pytest.raises(error, match=why):
        fe.matmul(x, w, out=out)
