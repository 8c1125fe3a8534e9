"""fe.matmul against float64 products of the operands' dequantised values; ordinary tensors beside them keep autograd.

Two FP8 operands: sums in FP32 (K 2^-24 sum |a b|), scales in FP32 (2^-22 |y|), one rounding to `out` (u |y|).
"""

import numpy as np
import pytest
import torch
from support import UNIT, assert_within
from torch import nn

import fp8engine as fe

GRANULARITIES = [fe.PerTensor(), fe.PerRow(), fe.PerBlock(1, 16), fe.PerBlock(16, 16)]
OUTS = [fe.BF16, fe.FP16, fe.FP32]
SHAPES = [(1, 1, 1), (3, 50, 33), (16, 32, 16), (130, 200, 140), (4, 0, 3), (0, 5, 3), (3, 5, 0)]  # M, K, N


def operand(x: torch.Tensor, granularity, format=fe.E4M3, power_of_2: bool = True) -> fe.Float8Tensor:
    return fe.quantize(x, fe.Cast(format, granularity, power_of_2=power_of_2))


def check(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: fe.Format) -> None:
    """y within the bound above of a @ b.T + bias in float64."""
    a64, b64 = (t.detach().double().numpy() for t in (a, b))
    offset = 0.0 if bias is None else bias.detach().double().numpy()
    want = a64 @ b64.T + offset
    u = UNIT[out.dtype]
    bound = 1.01 * (
        (a64.shape[1] + 1) * 2.0**-24 * (np.abs(a64) @ np.abs(b64.T) + np.abs(offset))
        + (u + 2.0**-22) * np.abs(want)
        + out.smallest_normal * u
    )
    assert y.dtype == out.dtype
    assert_within(y, want, bound, f"{tuple(a.shape)} {out}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", OUTS, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_two_fp8_tensors(granularity, out: fe.Format, shape):
    m, k, n = shape
    bias = torch.randn(n)
    for power_of_2 in (True, False):
        a = operand(torch.randn(m, k), granularity, power_of_2=power_of_2)
        b = operand(torch.randn(n, k), granularity, power_of_2=power_of_2)
        for bias_N in (None, bias):
            y = fe.matmul(a, b, bias_N=bias_N, out=out)
            assert type(y) is torch.Tensor
            check(y, a.dequantize(), b.dequantize(), bias_N, out)


@pytest.mark.parametrize("right", GRANULARITIES, ids=str)
@pytest.mark.parametrize("left", GRANULARITIES, ids=str)
def test_granularities_mix(left, right):
    a, b = operand(torch.randn(20, 48), left), operand(torch.randn(24, 48), right)
    check(fe.matmul(a, b, out=fe.FP32), a.dequantize(), b.dequantize(), None, fe.FP32)


@pytest.mark.parametrize("formats", [(fe.E4M3, fe.E5M2), (fe.E5M2, fe.E4M3)], ids=str)
def test_formats_mix(formats):
    a, b = (operand(torch.randn(20, 48), fe.PerTensor(), f) for f in formats)
    check(fe.matmul(a, b, out=fe.FP32), a.dequantize(), b.dequantize(), None, fe.FP32)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_leading_dimensions(granularity):
    x, w = torch.randn(2, 3, 5, 48), operand(torch.randn(24, 48), granularity)
    y = fe.matmul(operand(x, granularity), w, out=fe.FP32)
    assert y.shape == (2, 3, 5, 24)
    assert torch.equal(y.view(30, 24), fe.matmul(operand(x.view(30, 48), granularity), w, out=fe.FP32))
    assert fe.matmul(operand(x[0, 0, 0], fe.PerTensor()), w, out=fe.FP32).shape == (24,)


@pytest.mark.parametrize("granularity", [fe.PerTensor(), fe.PerRow()], ids=str)
def test_transposed_operands(granularity):
    # A scale per row becomes one per column, along K: folded into the values before the sum.
    a, b = operand(torch.randn(48, 20), granularity), operand(torch.randn(48, 24), granularity)
    check(fe.matmul(a.t(), b.t(), out=fe.FP32), a.dequantize().t(), b.dequantize().t(), None, fe.FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_tensors_keep_autograd(dtype):
    a = torch.randn(6, 48).to(dtype).requires_grad_()
    b = torch.randn(24, 48).to(dtype).requires_grad_()
    bias = torch.randn(24).to(dtype).requires_grad_()
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
    w = operand(torch.randn(24, 48), granularity)
    x = torch.randn(6, 48, requires_grad=True)
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


@pytest.mark.parametrize("backend", ["cublas", "reference"])
def test_e5m2_by_e5m2_is_refused_by_every_backend(backend: str):
    a = operand(torch.randn(16, 16), fe.PerTensor(), fe.E5M2)
    with fe.backend(backend), pytest.raises(fe.errors.BackendError, match="do not multiply E5M2 by E5M2"):
        fe.matmul(a, a)


def test_one_bad_element_reaches_its_row():
    x = torch.randn(8, 48)
    x[3, 7] = float("inf")
    w = operand(torch.randn(24, 48), fe.PerRow())
    for granularity in GRANULARITIES:
        y = fe.matmul(operand(x, granularity), w)
        assert [row for row in range(8) if not torch.isfinite(y[row]).all()] == [3]
