"""Statistics of a tensor against NumPy, and against the bit layouts, whose counts are known without counting."""

import numpy as np
import pytest
import torch
from casts import assert_same, every_value

from fp8engine.ops.reference import stats

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def counted(x: torch.Tensor) -> np.ndarray:
    """The histogram by frexp: |x| = f * 2^e with f in [1/2, 1), so the FP32 exponent field is e + 126."""
    values = x.double().numpy().ravel()
    finite = values[np.isfinite(values)]
    field = np.where(np.abs(finite) < 2.0**-126, 0, np.frexp(finite)[1] + 126)
    histogram = np.bincount(field, minlength=256)
    histogram[255] += values.size - finite.size
    return histogram


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (300, 5), (3, 5, 7), (11,), ()], ids=str)
def test_against_numpy(shape, dtype):
    x = (torch.randn(shape) * torch.exp2(torch.randint(-14, 10, shape))).to(dtype)
    found = stats(x)
    assert found.amax == x.abs().max().float()
    assert_same(found.histogram, counted(x))
    # Squares and sums in FP32: each square and each of at most n sums errs by 2^-24 of a sum of positive terms.
    wanted = x.double().square().sum()
    assert abs(found.sum_sq.double() - wanted) <= (x.numel() + 1) * 2**-24 * wanted
    assert (found.amax.dtype, found.sum_sq.dtype, found.histogram.dtype) == (torch.float32, torch.float32, torch.int64)


def test_every_bf16_value_fills_every_bin_alike():
    # BF16 has FP32's exponent field: two signs and 128 mantissas for each.
    found = stats(every_value(torch.bfloat16).view(256, 256))
    assert_same(found.histogram, np.full(256, 256))
    assert found.amax == torch.finfo(torch.bfloat16).max


def test_every_fp16_value_lands_where_fp32_puts_it():
    # Normals: 2 x 1024 in each of 30 bins from 2^-14 up.  Subnormals are FP32 normals: 2 x 2^j in the bin of 2^(j-24).
    wanted = np.zeros(256, np.int64)
    wanted[127 - 14 : 127 + 16] = 2048
    wanted[127 - 24 : 127 - 14] = 2 * 2 ** np.arange(10)
    wanted[[0, 255]] = 2, 2048
    assert_same(stats(every_value(torch.float16).view(256, 256)).histogram, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_counted_and_left_out(dtype):
    x = torch.tensor([[1.0, -3.0], [float("inf"), float("nan")], [float("-inf"), 0.0]], dtype=dtype)
    found = stats(x)
    assert (found.amax.item(), found.sum_sq.item()) == (3.0, 10.0)
    assert found.histogram[[0, 127, 128, 255]].tolist() == [1, 1, 1, 3]
    nothing = stats(torch.full((2, 2), float("nan"), dtype=dtype))
    assert (nothing.amax.item(), nothing.sum_sq.item(), nothing.histogram[255].item()) == (0.0, 0.0, 4)


def test_subnormals_count_as_zero_exponent_but_have_an_amax():
    found = stats(torch.tensor([[2.0**-127, -(2.0**-149)]]))
    assert found.histogram[0] == 2
    assert found.amax == 2.0**-127


@pytest.mark.parametrize("every", [2, 3, 100])
def test_sampled_rows(every):
    x = torch.randn(7, 5)
    found, wanted = stats(x, every), stats(x[::every].clone())
    assert found.histogram.sum() == len(range(0, 7, every)) * 5
    for name in ("amax", "sum_sq", "histogram"):
        assert_same(getattr(found, name), getattr(wanted, name), name)


def test_any_strides():
    x = torch.randn(30, 40)
    for view in (x.t(), x[::2, ::3], x[1:, 1:], x[:1].expand(9, 40), x[:, :1].expand(30, 6)):
        found, wanted = stats(view), stats(view.contiguous())
        assert_same(found.histogram, wanted.histogram)
        assert found.amax == wanted.amax
        torch.testing.assert_close(found.sum_sq, wanted.sum_sq, rtol=view.numel() * 2**-23, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_empty(shape):
    found = stats(torch.empty(shape))
    assert (found.amax.item(), found.sum_sq.item(), found.histogram.sum().item()) == (0.0, 0.0, 0)
    assert found.histogram.shape == (256,)


def test_the_input_is_not_written():
    x = torch.tensor([[1.0, float("nan"), -2.0]])
    before = x.clone()
    stats(x)
    assert_same(x, before)
