"""RMSNorm and LayerNorm against float64 autograd; their FP8 codes: tests/ops/test_contracts.py.

Bounds: u = 2^-24 is FP32's largest relative rounding error.  A mean over K errs by at most K u of the mean magnitude,
r by (K / 2 + 4) u, and each product or difference by u of its largest term.  So with X = max_k |x| r, which bounds the
normalised row before its mean is taken away, forward errs by (2 K + 16) u (X |w| + |b|), backward by twice as many u of
r (|g| + X mean |g X| + mean |g|); the result is then rounded once to its dtype.
"""

import itertools

import pytest
import torch
from casts import E4M3, ROUNDING, assert_same, assert_within, cast_of, fp8, plain

from fp8engine.ops.reference import Norm, Store, norm_quantize, norm_quantize_backward

SHAPES = [(1, 1), (1, 7), (13, 2), (5, 131), (130, 257)]
KINDS = ["rms", "layer"]


def exact(x_MK, weight_K, bias_K, norm: Norm) -> torch.Tensor:
    """The norm in float64, by torch's own functions."""
    weight = None if weight_K is None else weight_K + 1 if norm.zero_centered else weight_K
    if norm.kind == "layer":
        return torch.nn.functional.layer_norm(x_MK, x_MK.shape[1:], weight, bias_K, norm.eps)
    y_MK = torch.nn.functional.rms_norm(x_MK, x_MK.shape[1:], weight, norm.eps)
    return y_MK if bias_K is None else y_MK + bias_K


def sample(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size, so that eps decides the small ones, with a mean that LayerNorm must take away."""
    return ((torch.randn(m, k) + 0.5) * torch.exp2(torch.randint(-12, 8, (m, 1)))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "zero_centered", "eps"), list(itertools.product(KINDS, (False, True), (1e-5, 1e-2))))
def test_forward_and_backward_against_float64_autograd(kind, zero_centered, eps, shape):
    norm, (m, k), u = Norm(kind, eps, zero_centered), shape, 2.0**-24
    for dtype, weight_dtype, affine in itertools.product(ROUNDING, (torch.float32, torch.bfloat16), (True, False)):
        x_MK, dy_MK = sample(m, k, dtype), torch.randn(m, k).to(dtype)
        weight_K, bias_K = (torch.randn(k).to(weight_dtype) if affine else None for _ in "wb")
        # Without a weight: a leaf that nothing depends on, whose gradient is left out below.
        x_leaf, w_leaf = (
            each.double().requires_grad_() for each in (x_MK, torch.ones(k) if weight_K is None else weight_K)
        )
        b = torch.zeros(k).double() if bias_K is None else bias_K.double()
        wanted = exact(x_leaf, w_leaf if affine else None, b if affine else None, norm)
        dx_MK, dweight_K = torch.autograd.grad(wanted, [x_leaf, w_leaf], dy_MK.double(), allow_unused=True)

        y_MK, q, q_t, rows = norm_quantize(x_MK, weight_K, bias_K, norm)
        assert (q, q_t, plain(y_MK).dtype) == (None, None, dtype)
        x, dy = x_MK.double(), dy_MK.double()
        w = w_leaf.detach() + (zero_centered and affine)
        mean_M1 = x.mean(1, keepdim=True) if kind == "layer" else torch.zeros(m, 1)
        r = ((x - mean_M1).square().mean(1, keepdim=True) + eps).rsqrt()
        top_M1 = x.abs().amax(1, keepdim=True) * r
        assert_within(plain(y_MK), wanted.detach(), (2 * k + 16) * u * (top_M1 * w.abs() + b.abs()), "y")
        assert_within(rows.rstd_M, r[:, 0], (k + 4) * u * r[:, 0] * (1 + top_M1[:, 0]), "r")
        assert (rows.mean_M is None) == (kind == "rms")

        found = norm_quantize_backward(dy_MK, x_MK, weight_K, rows, norm)
        assert plain(found.dx_MK).dtype == dtype
        g, r = (dy * w).abs(), rows.rstd_M.double()[:, None]
        size = g + top_M1 * (g * top_M1).mean(1, keepdim=True) + g.mean(1, keepdim=True)
        assert_within(plain(found.dx_MK), dx_MK, 2 * (2 * k + 16) * u * r * size, "dx")
        sums = (2 * k + m + 16) * u
        assert (found.dweight_K is None, found.dbias_K is None) == (not affine, kind == "rms")
        if affine:
            assert plain(found.dweight_K).dtype == weight_dtype
            assert_within(plain(found.dweight_K), dweight_K, sums * (dy.abs() * top_M1).sum(0), "dweight")
        if found.dbias_K is not None:
            assert_within(found.dbias_K, dy.sum(0), sums * dy.abs().sum(0), "dbias")


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_rounded_once_and_what_is_not_finite_stays_visible(kind):
    for dtype, (m, k) in itertools.product(ROUNDING, SHAPES):
        x_MK, weight_K, bias_K = sample(m, k, dtype), torch.randn(k).to(dtype), torch.randn(k).to(dtype)
        wide_MK, _, _, rows = norm_quantize(x_MK.float(), weight_K, bias_K, Norm(kind))
        y_MK, _, _, same = norm_quantize(x_MK, weight_K, bias_K, Norm(kind))
        assert torch.equal(y_MK, wide_MK.to(dtype))
        assert_same(same.rstd_M, rows.rstd_M)
    for bad in (float("nan"), float("inf")):
        x_MK = sample(5, 12, torch.bfloat16)
        x_MK[2, 3] = bad
        y = fp8(norm_quantize(x_MK, None, None, Norm(kind), Store(cast_of(E4M3, -1, -1)))[1]).data.float()
        assert y[2, 3].isnan()
        assert y[[0, 1, 3, 4]].isfinite().all()
