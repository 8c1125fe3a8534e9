"""RMSNorm and LayerNorm against float64 autograd, and their FP8 codes against quantize of the result.

Bounds: u = 2^-24 is FP32's largest relative rounding error.  A mean over K errs by at most K u of the mean magnitude,
r by (K / 2 + 4) u, and each product or difference by u of its largest term.  So with X = max_k |x| r, which bounds the
normalised row before its mean is taken away, forward errs by (2 K + 16) u (X |w| + |b|), backward by twice as many u of
r (|g| + X mean |g X| + mean |g|); the result is then rounded once to its dtype.
"""

import itertools

import pytest
import torch
from casts import E4M3, E5M2, ROUNDING, assert_same, assert_within, bits, fp8, plain

from fp8engine.errors import UnknownName
from fp8engine.numerics.cast import Cast
from fp8engine.ops.reference import Norm, Slot, Store, cast_transpose, norm_quantize, norm_quantize_backward, quantize
from fp8engine.ops.reference.operand import COUNTERS
from tests.helpers.casts import cast_of

SHAPES = [(1, 1), (1, 7), (13, 2), (5, 131), (130, 257)]
KINDS = ["rms", "layer"]
HOWS = [cast_of(E4M3, -1, -1), cast_of(E5M2, -1, -1), cast_of(E4M3, 1, -1, True), cast_of(E4M3, 1, 128, True)]


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


def reach(x_MK: torch.Tensor, norm: Norm) -> torch.Tensor:
    """X of the module's docstring, float64 [M, 1]."""
    centred = x_MK - x_MK.mean(1, keepdim=True) if norm.kind == "layer" else x_MK
    return x_MK.abs().amax(1, keepdim=True) / (centred.square().mean(1, keepdim=True) + norm.eps).sqrt()


CASES = list(itertools.product(KINDS, (False, True), (1e-5, 1e-2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "zero_centered", "eps"), CASES)
def test_forward_and_backward_against_float64_autograd(kind, zero_centered, eps, shape):
    norm, (m, k) = Norm(kind, eps, zero_centered), shape
    for dtype, weight_dtype, affine in itertools.product(ROUNDING, (torch.float32, torch.bfloat16), (True, False)):
        x_MK, dy_MK = sample(m, k, dtype), torch.randn(m, k).to(dtype)
        weight_K = torch.randn(k).to(weight_dtype) if affine else None
        bias_K = torch.randn(k).to(weight_dtype) if affine and kind == "layer" else None
        # Without a weight or bias: leaves that nothing depends on, whose gradients are left out below.
        x_leaf, w_leaf = x_MK.double().requires_grad_(), torch.ones(k).double().requires_grad_()
        if weight_K is not None:
            w_leaf = weight_K.double().requires_grad_()
        b = torch.zeros(k) if bias_K is None else bias_K.double()
        wanted = exact(x_leaf, w_leaf if affine else None, None if bias_K is None else b, norm)
        dx_MK, dweight_K = torch.autograd.grad(wanted, [x_leaf, w_leaf], dy_MK.double(), allow_unused=True)

        y_MK, q, q_t, rows = norm_quantize(x_MK, weight_K, bias_K, norm)
        assert (q, q_t) == (None, None)
        assert plain(y_MK).dtype == dtype
        u, x, dy = 2.0**-24, x_MK.double(), dy_MK.double()
        w = w_leaf.detach() + (zero_centered and affine)
        top_M1 = reach(x, norm)
        assert_within(plain(y_MK), wanted.detach(), (2 * k + 16) * u * (top_M1 * w.abs() + b.abs()), "y")

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
def test_row_statistics(kind):
    x_MK, norm = sample(37, 131, torch.bfloat16), Norm(kind, 1e-3)
    rows = norm_quantize(x_MK, None, None, norm)[3]
    x = x_MK.double()
    mean = x.mean(1) if kind == "layer" else torch.zeros(37)
    torch.testing.assert_close(
        rows.rstd_M.double(), ((x - mean[:, None]).square().mean(1) + 1e-3).rsqrt(), rtol=131 * 2**-24, atol=0
    )
    assert (rows.mean_M is None) == (kind == "rms")
    if rows.mean_M is not None:
        assert ((rows.mean_M.double() - mean).abs() <= 131 * 2**-24 * x.abs().mean(1)).all()


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_quantize_of_the_result(kind, how):
    # Of what is stored: y rounded to x's 16 bits, of which FP32 has more.
    norm = Norm(kind)
    for dtype, (m, k) in itertools.product(ROUNDING, SHAPES):
        x_MK = sample(m, k, dtype)
        weight_K, bias_K = torch.randn(k).to(dtype), torch.randn(k).to(dtype) if kind == "layer" else None
        wide_MK, _, _, rows = norm_quantize(x_MK.float(), weight_K, bias_K, norm)
        for transposed in (False, True):
            y_MK, q, q_t, same = norm_quantize(x_MK, weight_K, bias_K, norm, Store(how, transposed))
            assert torch.equal(y_MK, wide_MK.to(dtype))
            assert_quantized(y_MK, how, q, q_t, transposed)
            assert_same(same.rstd_M, rows.rstd_M)


def assert_quantized(wanted_MK, how: Cast, found, found_t, transposed: bool) -> None:
    q, q_t = cast_transpose(wanted_MK, how)
    for result, other in [(found, q)] + [(found_t, q_t)] * transposed:
        one = fp8(result)
        assert_same(bits(one.data), bits(other.data))
        assert_same(one.scale, other.scale)
        assert one[2:] == other[2:]
    assert transposed or found_t is None


@pytest.mark.parametrize("kind", KINDS)
def test_counters_and_a_predicted_scale_go_through_the_slot(kind):
    x_MK, how = sample(9, 33, torch.bfloat16), cast_of(E4M3, -1, -1, delayed=True)
    slots = []
    for _ in range(2):
        live_2S = torch.tensor([[-1.0], [1000.0]])  # y * 1000 saturates: a recast
        slots.append(Slot(live_2S, torch.zeros(len(COUNTERS), 1, dtype=torch.int64), 0))
    y_MK, found, *_ = norm_quantize(x_MK, None, None, Norm(kind), Store(how, slot=slots[0]))
    wanted = quantize(y_MK, how, slots[1])
    assert fp8(found).scale == wanted[1]
    assert_same(slots[0].counts_CS, slots[1].counts_CS)
    assert_same(slots[0].live_2S, slots[1].live_2S)
    assert dict(zip(COUNTERS, slots[0].counts_CS[:, 0].tolist(), strict=True))["recasts"] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_visible(kind, bad):
    x_MK = sample(5, 12, torch.bfloat16)
    x_MK[2, 3] = bad
    y = fp8(norm_quantize(x_MK, None, None, Norm(kind), Store(cast_of(E4M3, -1, -1)))[1]).data.float()
    assert y[2, 3].isnan()
    assert y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_empty(kind, shape):
    x_MK, weight_K, norm = torch.empty(shape), torch.ones(shape[1]), Norm(kind)
    for to in (Store(), Store(cast_of(E4M3, 1, -1), transposed=True)):
        y, q, q_t, rows = norm_quantize(x_MK, weight_K, None, norm, to)
        found = norm_quantize_backward(x_MK, x_MK, weight_K, rows, norm)
        assert y.shape == found.dx_MK.shape == shape
        assert to.cast is None or (fp8(q).data.shape, fp8(q_t).data.shape) == (shape, shape[::-1])
        assert_same(plain(found.dweight_K), torch.zeros(shape[1]))


def test_inputs_are_not_written_and_any_strides_do():
    x_KM, weight_K = torch.randn(11, 6), torch.randn(11)
    x_MK, norm = x_KM.t(), Norm("layer")
    before = x_MK.clone(), weight_K.clone()
    y_MK, _, _, rows = norm_quantize(x_MK, weight_K, weight_K, norm)
    dx_MK = plain(norm_quantize_backward(x_MK, x_MK, weight_K, rows, norm).dx_MK)
    assert torch.equal(x_MK, before[0])
    assert torch.equal(weight_K, before[1])
    torch.testing.assert_close(y_MK, norm_quantize(x_MK.contiguous(), weight_K, weight_K, norm)[0], rtol=0, atol=1e-6)
    expanded = x_MK[:1].expand(6, 11)
    again = norm_quantize_backward(expanded, x_MK, None, rows, norm).dx_MK
    torch.testing.assert_close(
        again, norm_quantize_backward(expanded.clone(), x_MK, None, rows, norm).dx_MK, rtol=0, atol=1e-6
    )
    assert dx_MK.shape == (6, 11)


def test_an_unknown_norm_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'layer'"):
        norm_quantize(torch.ones(1, 2), None, None, Norm("layernorm"))
