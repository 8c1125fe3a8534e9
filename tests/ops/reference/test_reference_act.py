"""Activations against float64 autograd, and their FP8 results against quantize of the FP32 result.

Bounds: u = 2^-24 is FP32's largest relative rounding error.  f and f' are some ten FP32 operations of terms no larger
than |x| and 1 + |x|, so they err by at most 16 u |x| and 32 u (1 + |x|); the gated forms multiply by `up`.
"""

import itertools

import pytest
import torch
from casts import E4M3, E5M2, assert_same, bits, fp8, plain
from torch.nn import functional

from fp8engine.errors import ShapeError, UnknownName
from fp8engine.ops.reference import (
    How,
    Slot,
    Store,
    act_quantize,
    act_quantize_backward,
    cast_transpose,
    quantize,
)
from fp8engine.ops.reference.act_quantize import ACTIVATIONS
from fp8engine.ops.reference.operand import COUNTERS

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = [(1, 1), (1, 7), (13, 2), (5, 131), (130, 257)]
HOWS = [How(E4M3, -1, -1), How(E5M2, -1, -1), How(E4M3, 1, -1, True), How(E4M3, 1, 128, True)]
EXACT = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
GATED = {"swiglu", "geglu", "geglu_tanh"}


def exact(x_MK: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation in float64, by torch's own functions; a gate is the first half."""
    if kind not in GATED:
        return EXACT[kind](x_MK)
    half = x_MK.shape[1] // 2
    return EXACT[kind](x_MK[:, :half]) * x_MK[:, half:]


def sample(m: int, n: int, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, dy): x from well inside to far outside of where the functions bend."""
    x_MK = torch.randn(m, n * (1 + (kind in GATED))) * torch.exp2(torch.randint(-5, 5, (m, 1)))
    return x_MK.to(dtype), torch.randn(m, n).to(dtype)


def assert_within(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    bound = bound + ROUNDING[found.dtype] * (wanted.abs() + bound) + 2.0**-25 * (found.dtype == torch.float16)
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), f"{what}: {(error / bound).max():.2f} times the bound"


def test_all_kinds_are_here():
    assert set(ACTIVATIONS) == set(EXACT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_forward_and_backward_against_float64_autograd(kind, shape):
    for dtype in ROUNDING:
        x_MK, dy_MN = sample(shape[0], shape[1], kind, dtype)
        leaf = x_MK.double().requires_grad_()
        wanted = exact(leaf, kind)
        (dx_MK,) = torch.autograd.grad(wanted, leaf, dy_MN.double())
        u, x, dy = 2.0**-24, x_MK.double().abs(), dy_MN.double().abs()

        y_MN, y_NM = act_quantize(x_MK, kind)
        assert y_NM is None
        assert plain(y_MN).dtype == dtype
        n = shape[1]
        size = x[:, :n] * x[:, n:] if kind in GATED else x
        assert_within(plain(y_MN), wanted.detach(), 16 * u * size, "y")

        found = act_quantize_backward(dy_MN, x_MK, kind)
        assert plain(found.dx_MK).dtype == dtype
        size = dy * (1 + x[:, :n])
        if kind in GATED:
            size = torch.cat([size * x[:, n:], dy * x[:, :n]], dim=1)
        assert_within(plain(found.dx_MK), dx_MK, 32 * u * size, "dx")
        # dbias sums dx as it was before it was rounded to x's dtype.
        assert found.dbias_K.dtype == torch.float32
        sums = (shape[0] * dx_MK.abs() + 32 * size).sum(0)
        assert_within(found.dbias_K, dx_MK.sum(0), u * sums, "dbias")


@pytest.mark.parametrize("kind", sorted(GATED))
def test_the_gate_is_the_first_half(kind):
    gate_MN, up_MN = torch.tensor([[30.0, -30.0]]), torch.tensor([[2.0, 3.0]])
    x_MK = torch.cat([gate_MN, up_MN], dim=1)
    torch.testing.assert_close(act_quantize(x_MK, kind)[0], torch.tensor([[60.0, 0.0]]))
    # d/dgate = up where the gate is open, d/dup = the gate's value.
    found = act_quantize_backward(torch.ones(1, 2), x_MK, kind).dx_MK
    torch.testing.assert_close(found, torch.tensor([[2.0, 0.0, 30.0, 0.0]]))


def test_erf_and_tanh_are_told_apart():
    x_MK = torch.tensor([[-2.0]])
    assert abs(plain(act_quantize(x_MK, "gelu")[0]).item() - -0.04550026) < 1e-7
    assert abs(plain(act_quantize(x_MK, "gelu_tanh")[0]).item() - -0.04540229) < 1e-7


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_fp8_results_are_quantize_of_the_fp32_result(kind, how):
    # Straight from FP32: y is not first rounded to x's 16 bits.
    for dtype, shape in itertools.product(ROUNDING, SHAPES):
        x_MK, dy_MN = sample(*shape, kind, dtype)
        y_MN = act_quantize(x_MK.float(), kind)[0]
        wanted = act_quantize_backward(dy_MN, x_MK.float(), kind)
        for transposed in (False, True):
            to = Store(how, transposed)
            assert_quantized(y_MN, how, *act_quantize(x_MK, kind, to), transposed)
            found = act_quantize_backward(dy_MN, x_MK, kind, to)
            assert_quantized(wanted.dx_MK, how, found.dx_MK, found.dx_KM, transposed)
            assert_same(found.dbias_K, wanted.dbias_K)


def assert_quantized(wanted_MK, how: How, found, found_t, transposed: bool) -> None:
    q, q_t = cast_transpose(wanted_MK, how)
    for result, other in [(found, q)] + [(found_t, q_t)] * transposed:
        one = fp8(result)
        assert_same(bits(one.data), bits(other.data))
        assert_same(one.scale, other.scale)
        assert one[2:] == other[2:]
    assert transposed or found_t is None


def test_counters_go_through_the_slot():
    x_MK, how = torch.randn(9, 34).bfloat16(), How(E4M3, -1, -1)
    slots = [Slot(torch.tensor([[-1.0], [0.0]]), torch.zeros(len(COUNTERS), 1, dtype=torch.int64), 0) for _ in range(2)]
    act_quantize(x_MK, "swiglu", Store(how, transposed=True, slot=slots[0]))
    quantize(plain(act_quantize(x_MK.float(), "swiglu")[0]), how, slots[1])
    assert_same(slots[0].counts_CS, slots[1].counts_CS)
    assert_same(slots[0].live_2S, slots[1].live_2S)
    assert slots[0].counts_CS[0, 0] == 1


@pytest.mark.parametrize("kind", EXACT)
def test_what_is_not_finite_stays_visible(kind):
    x_MK, dy_MN = sample(5, 6, kind, torch.bfloat16)
    x_MK[1, 2], x_MK[2, 3] = float("nan"), float("inf")
    y = fp8(act_quantize(x_MK, kind, Store(How(E5M2, -1, -1)))[0]).data.float()
    assert y[1, 2].isnan()
    assert not y[2, 3].isfinite()
    assert y[[0, 3, 4]].isfinite().all()
    x_MK, _ = sample(5, 6, kind, torch.bfloat16)
    x_MK[1, 2] = dy_MN[3, 4] = float("nan")
    x_MK[3, 4] = 1.0
    found = act_quantize_backward(dy_MN, x_MK, kind, Store(How(E4M3, -1, -1)))
    assert fp8(found.dx_MK).data.float()[3, 4].isnan()
    assert found.dbias_K[4].isnan()
    if kind == "relu":  # its slope at NaN is 1, as torch has it
        assert plain(act_quantize_backward(dy_MN, x_MK, kind).dx_MK)[1, 2] == dy_MN[1, 2]
    else:
        assert fp8(found.dx_MK).data.float()[1, 2].isnan()


@pytest.mark.parametrize("shape", [(0, 6), (5, 0)])
@pytest.mark.parametrize("kind", EXACT)
def test_empty(kind, shape):
    x_MK = torch.empty(shape)
    n = shape[1] // 2 if kind in GATED else shape[1]
    for to in (Store(), Store(How(E4M3, 1, -1), transposed=True)):
        y, _ = act_quantize(x_MK, kind, to)
        found = act_quantize_backward(torch.empty(shape[0], n), x_MK, kind, to)
        assert (plain(y) if to.how is None else fp8(y).data).shape == (shape[0], n)
        assert (plain(found.dx_MK) if to.how is None else fp8(found.dx_MK).data).shape == shape
        assert_same(found.dbias_K, torch.zeros(shape[1]))


@pytest.mark.parametrize("kind", EXACT)
def test_inputs_are_not_written_and_any_strides_do(kind):
    x_KM, dy_MN = torch.randn(12, 7), torch.randn(1, 1).expand(7, 6 if kind in GATED else 12)
    before = x_KM.clone()
    y_MN, _ = act_quantize(x_KM.t(), kind)
    dx_MK = act_quantize_backward(dy_MN, x_KM.t(), kind).dx_MK
    assert torch.equal(x_KM, before)
    torch.testing.assert_close(y_MN, act_quantize(x_KM.t().contiguous(), kind)[0])
    torch.testing.assert_close(dx_MK, act_quantize_backward(dy_MN.clone(), x_KM.t().contiguous(), kind).dx_MK)


def test_errors_name_the_rule():
    with pytest.raises(UnknownName, match="did you mean 'gelu'"):
        act_quantize(torch.ones(1, 2), "gelu_")
    with pytest.raises(ShapeError, match="even number of columns"):
        act_quantize(torch.ones(1, 3), "swiglu")
    with pytest.raises(ShapeError, match="even number of columns"):
        act_quantize_backward(torch.ones(1, 1), torch.ones(1, 3), "swiglu")
