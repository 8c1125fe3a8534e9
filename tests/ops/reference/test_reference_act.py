"""Activations against float64 autograd; their FP8 codes: tests/ops/test_contracts.py.

Bounds: u = 2^-24 is FP32's largest relative rounding error.  f and f' are some ten FP32 operations of terms no larger
than |x| and 1 + |x|, so they err by at most 16 u |x| and 32 u (1 + |x|); the gated forms multiply by `up`.  The sizes
of kinds that grow otherwise: helpers/activations.py.
"""

from types import SimpleNamespace

import pytest
import torch
from activations import BOUNDED, EXACT, OF_GATE, SQUARED, exact, terms
from casts import E4M3, E5M2, ROUNDING, assert_within, cast_of, fp8, plain

from fp8engine.ops.reference import Store, act_quantize, act_quantize_backward
from fp8engine.ops.reference.activations import ACTIVATIONS

SHAPES = [(1, 1), (1, 7), (13, 2), (5, 131), (130, 257)]


def sample(m: int, n: int, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, dy): x from well inside to far outside of where the functions bend."""
    top = 2 if kind in SQUARED else 5  # x^2 up stays in FP16
    x_MK = torch.randn(m, n * (1 + (kind in OF_GATE))) * torch.exp2(torch.randint(-5, top, (m, 1)))
    return x_MK.to(dtype), torch.randn(m, n).to(dtype)


def test_all_kinds_are_here_and_no_others():
    assert set(ACTIVATIONS) == set(EXACT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_forward_and_backward_against_float64_autograd(kind, shape):
    for dtype in ROUNDING:
        x_MK, dy_MN = sample(shape[0], shape[1], kind, dtype)
        leaf = x_MK.double().requires_grad_()
        wanted = exact(leaf, kind)
        (dx_MK,) = torch.autograd.grad(wanted, leaf, dy_MN.double())
        u, (of_y, of_x) = 2.0**-24, terms(x_MK, kind, dy_MN)

        y_MN, q, q_t = act_quantize(x_MK, kind)
        found = act_quantize_backward(dy_MN, x_MK, kind)
        assert (q, q_t, found.dup_MN) == (None, None, None)
        assert_within(plain(y_MN), wanted.detach(), 16 * u * of_y, "y")
        assert_within(plain(found.dx_MK), dx_MK, 32 * u * of_x, "dx")
        # Rounded once.
        assert torch.equal(y_MN, act_quantize(x_MK.float(), kind)[0].to(dtype))
        assert torch.equal(found.dx_MK, act_quantize_backward(dy_MN, x_MK.float(), kind).dx_MK.to(dtype))
        # dbias sums dx as it was rounded to x's dtype.
        assert plain(found.dbias_K).dtype == torch.float32
        rounded = found.dx_MK.double()
        assert_within(plain(found.dbias_K), rounded.sum(0), u * shape[0] * rounded.abs().sum(0), "dbias")
        if kind in OF_GATE:
            gate, up = x_MK.chunk(2, dim=1)
            assert_within(act_quantize(gate, kind, up_MN=up)[0], wanted.detach(), 16 * u * of_y, "y of two matrices")
            dgate_MN, q, q_t, dup_MN, dbias_K = act_quantize_backward(dy_MN, gate, kind, up_MN=up)
            assert (q, q_t, dbias_K) == (None, None, None)
            assert_within(torch.cat([dgate_MN, plain(dup_MN)], 1), dx_MK, 32 * u * of_x, "dx of two matrices")


@pytest.mark.parametrize("kind", EXACT)
def test_gradcheck_in_float64(kind):
    """Both sides of every edge: 0 of relu, 7 and -7 of the clamped one."""
    x_MK = torch.tensor([[-9.0, -6.5, -1.0, -0.3, 0.4, 1.0, 6.5, 9.0]]).double()
    x_MK = torch.cat([x_MK, x_MK.flip(1) - 0.2], dim=1).requires_grad_()
    activation = ACTIVATIONS[kind]
    assert torch.autograd.gradcheck(activation, (x_MK,))
    assert torch.autograd.gradgradcheck(activation, (x_MK,))
    y_MN = activation(x_MK)
    dy_MN = torch.randn_like(y_MN)
    (wanted,) = torch.autograd.grad(y_MN, x_MK, dy_MN)
    torch.testing.assert_close(activation.gradient(dy_MN, x_MK.detach()), wanted, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(y_MN, exact(x_MK, kind), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kind", EXACT)
def test_at_an_edge_the_gradient_is_torch_s(kind):
    x_MK = torch.tensor([[0.0, -0.0, 7.0, 1.0, 1.0, 7.0, -7.0, 0.0]]).requires_grad_()
    y_MN = exact(x_MK, kind)
    (wanted,) = torch.autograd.grad(y_MN, x_MK, torch.ones_like(y_MN))
    found = act_quantize_backward(torch.ones_like(y_MN), x_MK.detach(), kind).dx_MK
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_transformers_computes_the_same():
    activations = pytest.importorskip("transformers.activations")
    x_MK = torch.randn(5, 12).double() * 4
    for name, kind in (("quick_gelu", "qgelu"), ("relu2", "srelu"), ("gelu_pytorch_tanh", "gelu_tanh")):
        torch.testing.assert_close(ACTIVATIONS[kind](x_MK), activations.ACT2FN[name](x_MK))
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    experts = SimpleNamespace(limit=7.0, alpha=1.702)
    interleaved = torch.stack(x_MK.chunk(2, dim=1), dim=-1).flatten(1)
    wanted = gpt_oss.GptOssExperts._apply_gate(experts, interleaved)
    torch.testing.assert_close(ACTIVATIONS["clamped_swiglu"](x_MK), wanted)


@pytest.mark.parametrize("kind", EXACT)
def test_what_is_not_finite_stays_visible(kind):
    x_MK, dy_MN = sample(5, 6, kind, torch.bfloat16)
    x_MK[1, 2], x_MK[2, 3] = float("nan"), float("inf")
    y = fp8(act_quantize(x_MK, kind, Store(cast_of(E5M2, -1, -1)))[1]).data.float()
    assert y[1, 2].isnan()
    assert y[2, 3].isfinite() == (kind in BOUNDED)  # Inf at a bounded gate is its bound
    assert y[[0, 3, 4]].isfinite().all()
    x_MK, _ = sample(5, 6, kind, torch.bfloat16)
    x_MK[1, 2] = dy_MN[3, 4] = float("nan")
    x_MK[3, 4] = 1.0
    found = act_quantize_backward(dy_MN, x_MK, kind, Store(cast_of(E4M3, -1, -1)))
    assert fp8(found.q).data.float()[3, 4].isnan()
    assert plain(found.dbias_K)[4].isnan()
    if kind in ("relu", "reglu"):  # its slope at NaN is 1, as torch has it
        slope = x_MK[1, 8] if kind == "reglu" else 1.0
        assert plain(act_quantize_backward(dy_MN, x_MK, kind).dx_MK)[1, 2] == dy_MN[1, 2] * slope
    else:
        assert fp8(found.q).data.float()[1, 2].isnan()
