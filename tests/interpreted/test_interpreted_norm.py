"""Norms: values against float64, codes bit for bit against a cast's, through the interpreter.

With u = 2^-24, K columns, M rows, A = max_k |x| r, bounds of the error of the FP32 values:

    n      e = u (2 K + 10) (A + 1) (1 + |n|)        the mean, K additions, moves x by K u max |x|; r as much again
    y      e |w| + 2 u (|y| + |n w| + |b|)
    n, backward, where r and mu are given: e = 4 u (|n| + A)
    dx     r (2 u |g| + e |c| + |n| ((K + 4) u mean |g n| + mean |g| e) + (K + 4) u mean |g| + 4 u (|g| + |n c| + |d|))
           with c = mean(g n), d = mean(g)
    dw     (M + 6) u sum_m |dy n| + sum_m |dy| e        db  (M + 2) u sum_m |dy|

What is stored is exact: the FP32 result rounded once to x's dtype, and what the twin's `quantize` makes of that.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted.test_interpreted_act import (
    DTYPES,
    WAYS,
    U,
    assert_stored,
    numbers,
    way,
    within,
)

from fp8engine.kernels import norm_quantize as kernel
from fp8engine.kernels.norm_quantize import norm_quantize, norm_quantize_backward, unsupported
from fp8engine.ops.reference.cast_transpose import Store
from fp8engine.ops.reference.norm_quantize import Norm, RowStatistics

NORMS = [Norm("rms"), Norm("rms", 1e-6, True), Norm("layer"), Norm("layer", 1e-3, True)]
# Their codes a kernel of a norm makes: it never holds two rows, so that what is cast at once is not turned.
ROW_WAYS = [form for form in WAYS if not form[3] or (form[1] == (-1, -1) and not form[4])]
SIZES = st.sampled_from([1, 2, 7, 31, 64, 127, 130])


def within_float64(x, w, b, dy, norm):
    """Forward and backward of one norm in float64, beside the kernels'."""
    (m, k), one = x.shape, torch.ones((), dtype=torch.float64)
    wide, dy64 = x.double(), dy.double()
    mu = wide.mean(1, keepdim=True) if norm.kind == "layer" else 0 * wide[:, :1]
    r = ((wide - mu).square().mean(1, keepdim=True) + norm.eps).rsqrt()
    n = (wide - mu) * r
    gamma = one if w is None else w.double() + norm.zero_centered
    beta = 0 * one if b is None else b.double()
    y, *codes, (rstd, mean) = norm_quantize(x, w, b, norm, Store())
    assert codes == [None, None]
    large = wide.abs().amax(1, keepdim=True) * r
    e = U * (2 * k + 10) * (large + 1) * (1 + n.abs())
    wanted = n * gamma + beta
    within(y, wanted, e * gamma.abs() + 2 * U * (wanted.abs() + (n * gamma).abs() + beta.abs()))
    within(rstd, r[:, 0], (U * (2 * k + 10) * (large + 1) * r)[:, 0])
    assert (mean is None) == (norm.kind == "rms")

    given_rows = RowStatistics(r[:, 0].float(), mu[:, 0].float() if norm.kind == "layer" else None)
    dx, dw, db = norm_quantize_backward(dy, x, w, given_rows, norm)
    g = dy64 * gamma
    c, d = (g * n).mean(1, keepdim=True), g.mean(1, keepdim=True) * (norm.kind == "layer")
    e = 4 * U * (n.abs() + large)
    along = (k + 4) * U * (g * n).abs().mean(1, keepdim=True) + (g.abs() * e).mean(1, keepdim=True)
    bound = 2 * U * g.abs() + e * c.abs() + n.abs() * along + (k + 4) * U * g.abs().mean(1, keepdim=True)
    bound += 4 * U * (g.abs() + (n * c).abs() + d.abs())
    within(dx, r * (g - n * c - d), r * bound)
    assert (dw is None) == (w is None)
    assert (db is None) == (norm.kind == "rms")
    if dw is not None:
        within(dw, (dy64 * n).sum(0), (m + 6) * U * (dy64 * n).abs().sum(0) + (dy64.abs() * e).sum(0))
    if db is not None:
        assert db.dtype == (x if w is None else w).dtype
        within(db, dy64.sum(0), (m + 2) * U * dy64.abs().sum(0))


def inputs(m, k, dtype, seed, weighted=True, biased=True):
    weight = numbers(1, k, dtype, seed + 1)[0] if weighted else None
    bias = numbers(1, k, dtype, seed + 2)[0] if biased else None
    return numbers(m, k, dtype, seed, seed % 2 == 0), weight, bias, numbers(m, k, dtype, seed + 3, seed % 3 == 0)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_values_are_those_of_float64(norm):
    within_float64(*inputs(33, 130, torch.float32, 2), norm)


@settings(max_examples=5)
@given(SIZES, SIZES, st.sampled_from(NORMS), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.integers(0, 99))
def test_values_of_any_shape_are_those_of_float64(m, k, norm, dtype, weighted, biased, seed):
    within_float64(*inputs(m, k, dtype, seed, weighted, biased), norm)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_weight_and_bias_of_any_stride(norm):
    x, _, _, dy = inputs(5, 70, torch.float32, 8)
    w, b = (numbers(70, 3, torch.float32, seed)[:, 1] for seed in (9, 10))
    assert w.stride() == (3,)
    within_float64(x, w, b, dy, norm)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_several_tiles_of_rows_a_program(norm, few_programs):
    within_float64(*inputs(70, 100, torch.float32, 7), norm)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_sums_by_a_kernel_of_their_own(norm, monkeypatch):
    monkeypatch.setattr(kernel, "WIDEST_WITH_SUMS", 100)
    monkeypatch.setattr(kernel, "STRIPES", 2)  # the first has two tiles of rows
    within_float64(*inputs(70, 130, torch.bfloat16, 5), norm)


@pytest.mark.parametrize("norm", NORMS[:1], ids=str)
def test_wide_rows_that_do_not_lie_together_are_copied(norm, monkeypatch):
    monkeypatch.setattr(kernel, "WIDEST_ODD", 64)
    x, w, b, dy = inputs(5, 80, torch.float32, 11)
    x, dy = x.t().contiguous().t(), dy.t().contiguous().t()
    copied = kernel._readable(x)
    assert copied.is_contiguous()
    assert torch.equal(copied, x)
    within_float64(x, w, b, dy, norm)


@pytest.mark.parametrize("norm", [NORMS[1], NORMS[3]], ids=str)
def test_rows_that_are_read_twice(norm, few_programs, monkeypatch):
    monkeypatch.setattr(kernel, "SUM_COLUMNS", 4096)  # 3 programs, not 129
    within_float64(*inputs(5, 8200, torch.bfloat16, 6), norm)  # means, then dx


@pytest.mark.few(6)
@pytest.mark.parametrize("form", ROW_WAYS, ids=str)
@pytest.mark.parametrize("norm", [Norm("rms", 0.0), NORMS[0], NORMS[2]], ids=str)
def test_rows_beyond_the_last_count_nowhere(norm, form):
    """A program's 8 rows beyond 3 hold zeros, of which a norm makes the bias, NaN where eps is 0.

    n w = 1, so y = 0.25, and once 1 + 1e-9: beyond, the bias would be the amax (-0.75 in FP8), and flushed (1e-9).
    """
    signs = (torch.arange(140) % 2 * 2 - 1).float()
    bias = torch.full((140,), -0.75)
    bias[3], bias[4] = 1e-9, -1.5
    x = signs.expand(3, 140)
    to = way(*form)
    *found, _ = norm_quantize(x, signs, bias, norm, to)
    assert found[0].abs().max() < 1.1
    assert_stored(tuple(found), to, way(*form))


def test_what_is_left_to_others_is_said():
    assert "16385" in unsupported((4, kernel.WIDEST_ROW + 1))
    assert "no multiple of 16" in unsupported((4, kernel.WIDEST_ODD + 8))
    assert unsupported((4, kernel.WIDEST_ODD - 1)) is None
    assert unsupported((4, kernel.WIDEST_ROW)) is None
