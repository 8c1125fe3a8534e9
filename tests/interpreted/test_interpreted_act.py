"""Activations: values against float64 formulas, codes bit for bit against a cast's, through the interpreter.

Two things are held apart.  What is computed cannot agree with torch to the last bit, so the FP32 result is compared in
float64, u = 2^-24:

    f       |error| <= 8 u |x|: f(x) = x g(x), g in [0, 1].  g = 1 / (1 + exp -z) is off by u for the exp (4 u of it,
            times g (1 - g) <= 1 / 4), u each for sum and quotient, and 5 roundings of z, of which at most 0.23 u each
            is left (|z| g (1 - g)); the product adds u.  erf has 4 u, halved; found are at most 3 u
    f'      |error| <= 8 u (1 + |x| v): 1 - g has the absolute error of g, and is multiplied by x and by v, the slope
            of the sigmoid's argument: 1, or of gelu_tanh 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2).  gelu: x phi(x) has
            x^2 u and 4 u of exp, of what is below 1 / 4
            So 2^-20 of a term shows: a factor forgotten, and 0.0447 for 0.044715
    dbias   (M + 2) u sum_m |dx|, for each addition rounds; dx as it was rounded

What is stored is exact: the FP32 result rounded once to x's dtype, and codes, scales and slots that the twin's
`quantize` makes of that.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from activations import exact, factor, size, steepness
from casts import E4M3, E5M2, FP8, MAX, assert_same, cast_of
from casts import factor as scale_factor
from contracts import counted, slot_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support import UNIT
from triton.runtime.errors import InterpreterError

from fp8engine.kernels import act_quantize as kernel
from fp8engine.kernels.act_quantize import act_quantize, act_quantize_backward
from fp8engine.ops.reference.activations import Activation
from fp8engine.ops.reference.cast_transpose import Store, store

U = 2.0**-24
KINDS = [*kernel.FUNCTIONS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = st.sampled_from([1, 2, 7, 31, 64, 65, 129])
# dtype, group, power of two, transposed, slot's predicted factor (None: no slot)
WAYS = [
    (E4M3, (-1, -1), False, False, None),
    (E5M2, (-1, -1), True, True, 0.0),
    (E4M3, (-1, -1), False, True, 64.0),
    (E5M2, (-1, -1), False, False, 1e6),
    (E4M3, (-1, -1), False, False, 3e-3),
    (E4M3, (1, -1), True, False, 0.0),
    (E5M2, (1, -1), True, True, None),
    (E4M3, (1, -1), False, True, 0.0),
    (E4M3, (1, 128), True, False, 0.0),
    (E5M2, (1, 128), False, True, None),
]


def way(dtype, group, power_of_2, transposed, predicted) -> Store:
    """One of WAYS, with a slot of its own."""
    slot = None if predicted is None else slot_of(predicted)
    return Store(cast_of(dtype, *group, power_of_2, bool(predicted)), transposed, slot)


def made_by_kernel(form: tuple, backward: bool = False, uneven: bool = False) -> bool:
    """Whether an activation's kernel makes the codes: scales of whole rows, groups across two halves, pairs of
    groups are a cast's."""
    _, group, _, transposed, _ = form
    if group == (1, 128):
        return not transposed and not uneven
    return group == (-1, -1) or not (transposed or backward)


def assert_stored(found: tuple, to: Store, fresh: Store, made: bool = True) -> None:
    """found: (y, codes, codes of the transpose) of a kernel; `to`'s slot as it left it; `fresh`: its equal before."""
    y, *codes = found
    assert y.is_contiguous()
    if not made:
        assert codes == [None, None]
        assert to.slot is None or not any(counted(to.slot).values())
        return
    _, *wanted = store(y, y.dtype, fresh)
    assert (codes[1] is None) == (wanted[1] is None)
    for mine, twin, name in zip(codes, wanted, ("q", "q^T"), strict=True):
        if twin is not None:
            data, scale = mine[:2]
            assert data.dtype == twin.data.dtype
            assert data.is_contiguous()
            assert scale.is_contiguous()
            assert_same(scale, twin.scale, f"scale of {name}")
            assert_same(data.float(), twin.data.float(), name)
            signs = [np.signbit(each.float().numpy()) for each in (data, twin.data)]
            assert (signs[0] == signs[1])[~data.float().isnan().numpy()].all()
    if to.slot is not None:
        assert_same(to.slot.counts_CS, fresh.slot.counts_CS, "counters")
        assert_same(to.slot.live_2S, fresh.slot.live_2S, "live")


def numbers(m: int, k: int, dtype: torch.dtype, seed: int, strided: bool = False) -> torch.Tensor:
    """x [m, k], some of it zero, the rest over 12 binades; every second column of a transposed matrix where strided."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-10, 3, (m, k), generator=generator))
    x = (x * (torch.rand(m, k, generator=generator) > 0.1)).to(dtype)
    if not strided:
        return x
    wide = torch.full((2 * k, m + 3), float("nan"), dtype=dtype)
    wide[::2, :m] = x.t()
    return wide[::2, :m].t()


def slope(x: torch.Tensor, kind: str) -> torch.Tensor | float:
    """Of the sigmoid's argument; of gelu's, what is given away."""
    if kind.endswith("tanh"):
        return 1.6 * (1 + 3 * 0.044715 * x * x)
    return 1.702 if kind in ("qgelu", "qgeglu", "clamped_swiglu") else 1.0


def in_float64(x_MK: torch.Tensor, kind: str, dy_MN: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(y or dx, bound of its error in FP32) by torch in float64."""
    x = x_MK.double().requires_grad_()
    y = exact(x, kind)
    gate, up = x.detach().chunk(2, 1) if kind in kernel.GATED else (x.detach(), torch.ones((), dtype=torch.float64))
    if dy_MN is None:
        return y.detach(), 8 * U * size(gate, kind) * factor(up, kind)
    dy = dy_MN.double()
    (dx,) = torch.autograd.grad(y, x, dy)
    steep = 8 * U * dy.abs() * steepness(gate, kind, slope(gate, kind)) * factor(up, kind)
    bounds = [steep, 8 * U * dy.abs() * size(gate, kind)] if kind in kernel.GATED else [steep]
    return dx, torch.cat(bounds, 1)


def within(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> None:
    """found: in its own dtype, which rounds once more."""
    assert found.shape == wanted.shape
    if found.dtype != torch.float32:
        bound = bound + UNIT[found.dtype] * (wanted.abs() + bound) + (2.0**-25 if found.dtype == torch.float16 else 0)
    error = (found.double() - wanted).abs()
    assert (error <= bound + 2.0**-149).all(), (error - bound).max()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_float64(kind):
    """Each term of each formula in FP32; in 16 bits dbias, which sums what was rounded."""
    values_are_those_of_float64(70, 65, kind, torch.float32, True, 3)
    values_are_those_of_float64(33, 70, kind, torch.bfloat16, False, 4)


@settings(max_examples=4)
@given(SIZES, SIZES, st.sampled_from(KINDS), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_values_of_any_shape_are_those_of_float64(m, n, kind, dtype, strided, seed):
    values_are_those_of_float64(m, n, kind, dtype, strided, seed)


def values_are_those_of_float64(m, n, kind, dtype, strided, seed):
    k = 2 * n if kind in kernel.GATED else n
    x, dy = numbers(m, k, dtype, seed, strided), numbers(m, n, dtype, seed + 1, not strided)
    y, *codes = act_quantize(x, kind, Store())
    assert y.dtype == dtype
    assert codes == [None, None]
    within(y, *in_float64(x, kind))
    dx, *nothing, dbias = act_quantize_backward(dy, x, kind, Store())
    assert dx.dtype == dtype
    assert nothing == [None, None, None]
    assert dbias.dtype == torch.float32
    wanted, bound = in_float64(x, kind, dy)
    within(dx, wanted, bound)
    within(dbias, dx.double().sum(0), (m + 2) * U * dx.double().abs().sum(0))


@settings(max_examples=8)
@given(SIZES, SIZES, st.sampled_from([*kernel.GATED]), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_a_gate_and_an_up_may_be_two_matrices_in_any_strides(m, n, kind, dtype, strided, seed):
    gate, up = numbers(m, n, dtype, seed, strided), numbers(m, n, dtype, seed + 1, not strided)
    dy, x = numbers(m, n, dtype, seed + 2), torch.cat([gate, up], 1)
    assert_same(act_quantize(gate, kind, Store(), up)[0].float(), act_quantize(x, kind, Store())[0].float())
    dgate, *codes, dup, dbias = act_quantize_backward(dy, gate, kind, Store(), up)
    assert codes == [None, None]
    assert dbias is None
    assert dgate.is_contiguous()
    assert dup.is_contiguous()
    wanted = act_quantize_backward(dy, x, kind, Store())[0]
    assert_same(torch.cat([dgate, dup], 1).float(), wanted.float())


@pytest.mark.parametrize("form", WAYS, ids=str)
def test_groups_of_128_and_several_tiles_a_program(form, few_programs):
    n = 256 if form[1] == (1, 128) else 128
    x, dy = numbers(66, 2 * n, torch.bfloat16, 3), numbers(66, n, torch.bfloat16, 4)
    to, again = way(*form), way(*form)
    assert_stored(act_quantize(x, "swiglu", to), to, way(*form), made_by_kernel(form))
    assert_stored(act_quantize_backward(dy, x, "swiglu", again)[:3], again, way(*form), made_by_kernel(form, True))


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("form", WAYS, ids=str)
def test_what_is_not_finite_stays_and_is_counted(dtype, form):
    x = torch.tensor([[1.0, float("nan"), -3.0], [float("inf"), 2.0, 0.5], [0.0, 0.0, -0.0]])
    form = (dtype, *form[1:])
    to, fresh = way(*form), way(*form)
    found = act_quantize(x, "relu", to)
    assert_same(found[0], torch.where(x < 0, 0, x))
    assert_stored(found, to, fresh, made_by_kernel(form))
    if made_by_kernel(form):
        q = found[1][0].float()
        assert q[0, 1].isnan()
        assert q[1, 0].isnan() if dtype == E4M3 else q[1, 0] == math.inf


@pytest.mark.few(14)
@pytest.mark.parametrize("form", WAYS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-38, 3e38, 448.0, 57344.0])
def test_extreme_amaxes(form, value):
    x = torch.full((3, 5), value)
    to = way(*form)
    assert_stored(act_quantize(x, "relu", to), to, way(*form), made_by_kernel(form))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_what_fp16_cannot_hold_is_infinite_in_the_codes_too(dtype):
    """300^2 is 90,000: Inf in FP16, and so of what a cast reads; an amax of the FP32 values would be finite."""
    x, to, fresh = torch.tensor([[300.0, 2.0, -1.0]]).half(), *(way(dtype, (-1, -1), False, False, 0.0) for _ in "ab")
    found = act_quantize(x, "srelu", to)
    assert found[0].tolist() == [[math.inf, 4.0, 0.0]]
    assert_stored(found, to, fresh)
    assert to.slot.live_2S[0, 1] == -1  # one Inf freezes no window
    assert counted(to.slot)["nonfinite"] == 1


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize(
    ("amax", "of", "over", "recast"),
    [
        (7.0, 7.0, False, False),
        (1.745873, 1.745873, True, False),
        (7.0 * (1 + 2.0**-22), 7.0, True, False),
        (7.01, 7.0, True, True),
    ],
)
def test_a_prediction_holds_up_to_its_own_rounding(dtype, amax, of, over, recast):
    """s = MAX / of, rounded, may take an amax over MAX, as that of 1.745873 does; by 2^-22 of it is not saturation."""
    s = scale_factor(np.float32(of), MAX[dtype])
    assert (np.float32(amax) * s > MAX[dtype]) == over
    x = torch.tensor([[amax, 1.0, 0.0], [amax, -2.0, 1e-9]])
    to, fresh = (way(dtype, (-1, -1), False, False, float(s)) for _ in range(2))
    assert_stored(act_quantize(x, "relu", to), to, fresh)
    assert (counted(to.slot)["saturated"], counted(to.slot)["recasts"]) == (2 * recast, recast)


def test_an_activation_without_a_gradient_is_an_error_and_not_another_ones_gradient(monkeypatch):
    """Its twin cannot be written: a row of ACTIVATIONS has a field without a default for the gradient."""
    monkeypatch.setitem(kernel.FUNCTIONS, "leaky", "leaky")
    x, to = numbers(4, 16, torch.bfloat16, 1), way(E4M3, (-1, -1), False, False, 0.0)
    with pytest.raises(InterpreterError, match="no branch for this function"):
        act_quantize(x, "leaky", to)
    with pytest.raises(InterpreterError, match="dx"):
        act_quantize_backward(x, x, "leaky", to)
    with pytest.raises(TypeError, match="backward"):
        Activation(torch.relu)  # pyright: ignore[reportCallIssue]


def test_relu_passes_the_gradient_of_nan_and_none_at_zero():
    x, dy = torch.tensor([[math.nan, 0.0, -0.0, -1.0, 2.0, math.inf]]).requires_grad_(), torch.full((1, 6), 3.0)
    (wanted,) = torch.autograd.grad(torch.relu(x), x, dy)
    assert wanted.tolist() == [[3, 0, 0, 0, 3, 3]]
    assert torch.equal(act_quantize_backward(dy, x.detach(), "relu", Store())[0], wanted)


def test_the_limit_itself_passes_the_gradient():
    x = torch.tensor([[1.0, 1.0, 1.0, 7.0, 7.5, 7.0, -7.0, 7.5, 1.0, 1.0]])
    found = act_quantize_backward(torch.full((1, 5), 3.0), x, "clamped_swiglu", Store())[0]
    within(found, *in_float64(x, "clamped_swiglu", torch.full((1, 5), 3.0)))
    assert (found != 0).tolist() == [[True, True, True, True, False, True, True, False, True, True]]


def test_no_group_lies_across_the_gradients_of_a_gate_and_of_what_it_gates():
    form = (E4M3, (1, 128), True, False, None)
    for n, codes in ((128, True), (70, False)):
        x, dy = numbers(3, 2 * n, torch.bfloat16, 1), numbers(3, n, torch.bfloat16, 2)
        assert (act_quantize_backward(dy, x, "swiglu", way(*form))[1] is not None) == codes


def test_a_slot_may_only_count_or_only_record():
    x = numbers(5, 70, torch.float32, 1)
    for count, record in itertools.product((False, True), repeat=2):
        for form in WAYS:
            to, fresh = way(*form), way(*form)
            if form[-1] is not None:
                to, fresh = (s._replace(slot=s.slot._replace(count=count, record=record)) for s in (to, fresh))
                assert_stored(act_quantize(x, "silu", to), to, fresh, made_by_kernel(form))


@pytest.mark.parametrize("n", [kernel.WIDEST_ROW, kernel.WIDEST_ROW + 1])
def test_a_rows_scale_is_found_where_a_program_holds_the_row(n):
    x, (to, fresh) = numbers(2, n, torch.bfloat16, 1), (way(E4M3, (1, -1), True, False, 0.0) for _ in "ab")
    assert_stored(act_quantize(x, "relu", to), to, fresh, n <= kernel.WIDEST_ROW)
