"""fp8engine/scaling/histogram.py: what `measure` writes for any tensor, and that the host never waits."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fp8engine.errors import ShapeError, UnsupportedDtype
from fp8engine.numerics.recipe import E4M3, Cast
from fp8engine.scaling.histogram import LENGTH, measure, read
from fp8engine.scaling.prediction import TENSOR_BINS
from fp8engine.scaling.sample import Sampled, observe

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0,), (), (7,), (1, 1), (1, 300), (300, 1), (129, 257), (3, 5, 33), (2, 0, 4), (700, 301)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_of_any_shape_are_those_of_float64(shape: tuple, dtype: torch.dtype):
    x = torch.randn(shape).to(dtype).requires_grad_()
    before, flat = x.detach().clone(), measure(x * 1, sample=1 << 20)
    assert not flat.requires_grad
    assert torch.equal(x, before)
    found, x = read(flat), before
    exact = x.double().numpy().reshape(-1)
    assert (found.elements, found.sampled) == (exact.size, exact.size)
    assert (found.nonzero, found.nonfinite) == (np.count_nonzero(exact), 0)
    square = exact**2
    assert found.amax == (abs(exact).max() if exact.size else 0)
    if square.any():
        assert found.rms == pytest.approx(math.sqrt(square.mean()), rel=1e-5)  # FP32 sums by parts
        assert found.crest == pytest.approx(abs(exact).max() / math.sqrt(square.mean()), rel=1e-5)
        assert found.kurtosis == pytest.approx((square**2).mean() / square.mean() ** 2, rel=1e-5)


def test_strides_and_order_change_nothing():
    x = torch.randn(96, 160)
    for other in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0]):
        torch.testing.assert_close(measure(other), measure(x), rtol=1e-5, atol=0)  # sums in another order


def test_every_bin_is_where_the_definition_puts_it():
    """Against NumPy's frexp, element by element: eighths of the octaves below amax; rows where their energy lies."""
    x = torch.randn(64, 200) * torch.logspace(-3, 3, 64)[:, None]
    x[3, 5], x[9] = 0, 0
    found = read(measure(x))
    v = x.abs().numpy()
    mantissa, exponent = np.frexp((v / v.max()).astype(np.float32))  # mantissa: 0.5 to 1
    bins = np.where(v > 0, TENSOR_BINS - 1 + 8 * (exponent - 1) + np.floor(8 * (2 * mantissa - 1)), 0).astype(int)
    assert found.tensor[0].tolist() == np.bincount(bins.ravel(), minlength=TENSOR_BINS).tolist()
    energy = v.astype(np.float64) ** 2
    some = energy.sum(1) > 0
    place = np.rint((energy * bins).sum(1)[some] / energy.sum(1)[some]).astype(int)
    assert found.tensor[1].tolist() == np.bincount(place, minlength=TENSOR_BINS).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_are_counted_and_left_out(dtype: torch.dtype):
    x = torch.randn(64, 130).to(dtype)
    clean = x.clone()
    places = torch.tensor([[0, 0], [3, 129], [63, 5], [20, 77]])
    for (row, column), value in zip(places.tolist(), [math.nan, math.inf, -math.inf, math.nan], strict=True):
        x[row, column], clean[row, column] = value, 0
    bad, good = (read(measure(one)) for one in (x, clean))
    assert (bad.nonfinite, good.nonfinite) == (4, 0)
    assert bad.tensor[0].tolist() == good.tensor[0].tolist()
    assert {**bad.header, "nonfinite": 0.0} == good.header
    assert bad.predict(Cast(E4M3)) == good.predict(Cast(E4M3))
    wrong = read(measure(clean, amax=torch.tensor(math.inf)))
    assert wrong.amax == good.amax
    nothing = read(measure(torch.full((4, 4), math.nan), amax=torch.tensor(math.nan)))
    assert (nothing.amax, nothing.nonfinite, nothing.rms, nothing.predict(Cast(E4M3)).sqnr_db) == (0, 16, 0, math.inf)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30, 3e38])
def test_sums_neither_overflow_nor_vanish(scale: float):
    x = torch.rand(32, 64).clamp_(min=0.1) * scale
    found = read(measure(x))
    exact = x.double()
    assert found.rms == pytest.approx(float(exact.square().mean().sqrt()), rel=1e-5)
    assert np.isfinite(found.kurtosis)
    assert found.nonzero == 2048


def test_a_sample_is_about_as_large_as_asked_and_meets_no_period():
    x = torch.ones(4096, 64)
    x[::64] = 1000.0  # as the first token of every sequence
    found = read(measure(x, sample=16384))
    assert found.sampled == 16384
    exact = (x.double().square().mean()).sqrt()
    # 256 of 4096 rows, 1 in 64 large: 4 expected; sampled by a stride of 16 it would be none or 16, factors 0 and 2.
    assert found.rms == pytest.approx(float(exact), rel=0.3)
    wide = read(measure(torch.ones(64, 50_000), sample=65536))
    assert wide.sampled == 5 * 50_000  # at most WIDEST samples, whole rows


def test_an_outlier_that_the_sample_missed_is_known_from_amax():
    x = torch.randn(2048, 256)
    x[5, 5] = 1e7
    flat = measure(x, sample=4096, amax=x.abs().max())
    found = read(flat)
    assert found.tensor[0, TENSOR_BINS - 1] == 0  # the test's premise
    assert found.rms**2 * found.elements == pytest.approx(float(x.double().square().sum()), rel=0.02)
    assert found.predict(Cast(E4M3)).flushed > 0.9


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1024), (16, 50_257)], ids=str)
def test_no_size_and_no_branch_depends_on_values(shape: tuple, dtype: torch.dtype):
    """Fake tensors have no values: whatever waits for one (item, nonzero, bincount, a mask as an index) raises."""
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype)
        flat = measure(x, amax=torch.empty(()))
        assert (flat.shape, flat.dtype) == ((LENGTH,), torch.float32)
        with pytest.raises(DataDependentOutputException):
            flat.sum().item()  # that it does raise


def test_errors():
    with pytest.raises(UnsupportedDtype, match=r"float64.*float32, bfloat16 or float16"):
        measure(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ShapeError, match="sample=0"):
        measure(torch.zeros(2), sample=0)
    with pytest.raises(ShapeError, match=rf"\[{LENGTH - 1}\].*writes {LENGTH} numbers"):
        read(measure(torch.zeros(2))[1:])


def test_what_is_observed_on_the_host_knows_amax_and_trouble_that_the_sample_missed():
    table, nothing = torch.zeros(2, LENGTH), torch.empty(0)
    x = torch.randn(4096, 64)
    x[1, 3] = 50.0
    observe(x, Sampled(table[:1], nothing, 0))
    found = read(table[0])
    assert (found.amax, found.nonfinite, found.elements) == (50.0, 0, x.numel())
    x[2, 7] = math.inf
    observe(x, Sampled(table[1:], nothing, 0))
    assert read(table[1]).nonfinite == 1
