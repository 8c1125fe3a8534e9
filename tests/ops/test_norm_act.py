"""Norms, activations and statistics as operations: against float64, against their twins, and as torch sees them.

On a CPU an operation is its twin, so the bounds of error are those that the twins' own tests derive; here they show
that arguments arrive where they belong.  Kernels: tests/interpreted/test_interpreted_norm_act.py.
"""

import itertools

import pytest
import torch
from activations import EXACT, OF_GATE, SQUARED, terms
from activations import exact as exact_act
from casts import E4M3, E5M2, plain
from ops.reference.test_reference_act import assert_within as assert_act_within
from ops.reference.test_reference_norm import assert_within, exact, reach
from support import same
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fp8engine.errors import GradientError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts, norm_act, reference
from fp8engine.ops.reference import Norm, Operand, Slot, Store
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.ops.reference.operand import COUNTERS
from tests.helpers.casts import cast_of

OPERATORS = torch.ops.fp8engine
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = [Norm("rms"), Norm("rms", 1e-3, True), Norm("layer", 1e-6), Norm("layer", 1e-3, True)]
HOWS = [
    cast_of(E4M3, -1, -1),
    cast_of(E5M2, -1, -1, power_of_2=True, delayed=True),
    cast_of(E4M3, 1, -1, True),
    cast_of(E5M2, 1, 128),
    cast_of(E4M3, 128, 128),
]
CALLS = {
    "norm_quantize": lambda f, x, dy, norm, to: f.norm_quantize(x, vector(x), vector(x, 1), norm, to),
    "norm_quantize_bare": lambda f, x, dy, norm, to: f.norm_quantize(x, None, None, norm, to),
    "norm_quantize_backward": lambda f, x, dy, norm, to: f.norm_quantize_backward(
        dy, x, vector(x).float(), reference.norm_quantize(x, None, None, norm)[3], norm
    ),
    "norm_quantize_backward_bare": lambda f, x, dy, norm, to: f.norm_quantize_backward(
        dy, x, None, reference.norm_quantize(x, None, None, norm)[3], norm
    ),
    "act_quantize": lambda f, x, dy, kind, to: f.act_quantize(x, kind, to),
    "act_quantize_bare": lambda f, x, dy, kind, to: f.act_quantize(x, kind, to, dy if kind in OF_GATE else None),
    "act_quantize_backward": lambda f, x, dy, kind, to: f.act_quantize_backward(
        dy[:, : x.shape[1] // 2] if kind in OF_GATE else dy, x, kind, to
    ),
    "act_quantize_backward_bare": lambda f, x, dy, kind, to: f.act_quantize_backward(
        *((dy, x, kind, IN_16_BITS, dy + x) if kind in OF_GATE else (dy, x, kind, to))
    ),
}  # each takes norm_act or reference, whose signatures are the same; bare: no weight, or gate and up apart
CASES = [(name, which) for name in CALLS for which in (NORMS if "norm" in name else EXACT)]


def vector(x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A weight or a bias that goes with x."""
    return (torch.arange(x.shape[1], dtype=torch.float32, device=x.device) % 7 / 4 - offset).to(x.dtype)


def inputs(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, dy), rows of very different size."""
    x_MK = (torch.randn(m, k) + 0.5) * torch.exp2(torch.randint(-8, 6, (m, 1)))
    return x_MK.to(dtype), torch.randn(m, k).to(dtype)


def stores(how: Cast | None, predicted: float = 0.0) -> list[Store]:
    """Every way to store under a cast: each with a slot of its own, and without."""
    if how is None:
        return [IN_16_BITS]
    return [Store(how, *rest) for rest in itertools.product((False, True), (None, slot(predicted)))]


def slot(predicted: float = 0.0) -> Slot:
    """Column 1 of 3."""
    live = torch.tensor([[-1.0] * 3, [predicted] * 3])
    return Slot(live, torch.zeros(len(COUNTERS), 3, dtype=torch.int64), 1)


def fresh(to: Store) -> Store:
    """The same, with tables of its own."""
    if to.slot is None:
        return to
    return to._replace(slot=to.slot._replace(live_2S=to.slot.live_2S.clone(), counts_CS=to.slot.counts_CS.clone()))


def tensors(found) -> list[torch.Tensor]:
    """The tensors of a result, FP8 codes as bytes so that they compare bit for bit."""
    leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    return [leaf.view(torch.uint8) if leaf.dtype in (E4M3, E5M2) else leaf for leaf in leaves]


def ways(name: str) -> list:
    """The kinds of a call."""
    return [which for key, which in CASES if key == name]


def layout(found) -> list[tuple]:
    """What a fake promises; the stride of a dimension of 1 has no meaning."""
    return [(x.shape, x.dtype, x.is_contiguous()) if isinstance(x, torch.Tensor) else (x,) for x in tree_leaves(found)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_norms_and_their_gradients_are_torchs_in_float64(norm: Norm, dtype: torch.dtype):
    """Bounds: tests/ops/reference/test_reference_norm.py, with u = 2^-24 and K columns."""
    (x_MK, dy_MK), k, u = inputs(13, 131, dtype), 131, 2.0**-24
    weight_K, bias_K = vector(x_MK), vector(x_MK, 1)
    x, w, b = (t.double().requires_grad_() for t in (x_MK, weight_K, bias_K))
    wanted = exact(x, w, b, norm)
    dx, dw, db = torch.autograd.grad(wanted, [x, w, b], dy_MK.double())
    y, q, q_t, rows = norm_act.norm_quantize(x_MK, weight_K, bias_K, norm)
    assert (q, q_t) == (None, None)
    top_M1, gain = reach(x.detach(), norm), (w.detach() + norm.zero_centered).abs()
    assert_within(plain(y), wanted.detach(), (2 * k + 16) * u * (top_M1 * gain + b.detach().abs()), "y")
    found = norm_act.norm_quantize_backward(dy_MK, x_MK, weight_K, rows, norm)
    g = dy_MK.double().abs() * gain
    size = g + top_M1 * (g * top_M1).mean(1, keepdim=True) + g.mean(1, keepdim=True)
    assert_within(plain(found.dx_MK), dx, 2 * (2 * k + 16) * u * rows.rstd_M.double()[:, None] * size, "dx")
    sums = (2 * k + 13 + 16) * u
    assert_within(plain(found.dweight_K), dw, sums * (dy_MK.double().abs() * top_M1).sum(0), "dw")
    assert (found.dbias_K is None) == (norm.kind == "rms")
    if found.dbias_K is not None:
        assert_within(found.dbias_K, db, sums * dy_MK.double().abs().sum(0), "db")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_activations_and_their_gradients_are_torchs_in_float64(kind: str, dtype: torch.dtype):
    """Bounds: reference/test_reference_act.py, 16 u |x| and 32 u |dy| (1 + |x|), times what a gate multiplies."""
    (x_MK, dy), n, u = inputs(13, 62, dtype), 31 if kind in OF_GATE else 62, 2.0**-24
    x_MK = x_MK / 16 if kind in SQUARED else x_MK  # squares stay in FP16
    dy_MN, leaf = dy[:, :n], x_MK.double().requires_grad_()
    wanted, (of_y, of_x) = exact_act(leaf, kind), terms(x_MK, kind, dy_MN)
    (dx,) = torch.autograd.grad(wanted, leaf, dy_MN.double())
    y, q, q_t = norm_act.act_quantize(x_MK, kind)
    assert (q, q_t) == (None, None)
    assert_act_within(plain(y), wanted.detach(), 16 * u * of_y, "y")
    found = norm_act.act_quantize_backward(dy_MN, x_MK, kind)
    assert_act_within(plain(found.dx_MK), dx, 32 * u * of_x, "dx")
    assert found.dbias_K is not None
    assert found.dbias_K.dtype == torch.float32
    of_sums = found.dx_MK.double()  # as it was rounded
    assert_act_within(found.dbias_K, of_sums.sum(0), u * 13 * of_sums.abs().sum(0), "dbias")


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", HOWS[:-1], ids=str)
@pytest.mark.parametrize("name", [name for name in CALLS if "norm_quantize_backward" not in name])
def test_codes_are_a_cache(name: str, how: Cast, dtype: torch.dtype, bad: bool):
    """Codes and the slot's tables are those of a cast of the result, whatever the prediction."""
    for which, predicted in itertools.product(ways(name), (0.0, 2.0**-20, 2.0**20) if how.delayed else (0.0,)):
        x, dy = inputs(9, 62, dtype)
        if bad:
            x[0, 3], x[0, 4], dy[0, 5] = float("nan"), float("inf"), float("-inf")
        for to in stores(how, predicted):
            own, casts_own = fresh(to), fresh(to)
            y, q, q_t, *_ = CALLS[name](norm_act, x, dy, which, own)
            if q is None and which in OF_GATE:
                continue  # the gradients of two matrices have none
            wanted = (casts.cast_transpose if to.transposed else casts.quantize)(y, how, casts_own.slot)
            assert same(tensors((q, q_t)), tensors(wanted))
            if own.slot is not None and casts_own.slot is not None:
                assert same(own.slot[:2], casts_own.slot[:2])


@pytest.mark.parametrize("group", [(-1, -1), (1, -1), (1, 128)], ids=str)
def test_fp8_codes_are_within_half_a_step_of_float64(group):
    """E4M3: half a step is 2^-4 of a normal value and 2^-10 of the scale below; BF16 moves a value by 2^-9 before."""
    x_MK, _ = inputs(9, 120)
    to = Store(cast_of(E4M3, *group), True)
    for wanted, (_, q, q_t, *_) in (
        (exact(x_MK.double(), None, None, NORMS[0]), norm_act.norm_quantize(x_MK, None, None, NORMS[0], to)),
        (exact_act(x_MK.double(), "geglu"), norm_act.act_quantize(x_MK, "geglu", to)),
    ):
        for operand, y in ((q, wanted), (q_t, wanted.t())):
            assert isinstance(operand, Operand)
            error = (operand.data.double() * operand.scale.double() - y).abs()
            assert (error <= (2.0**-4 + 1.1 * 2.0**-8) * y.abs() + 1.001 * 2.0**-10 * operand.scale.double()).all()


@pytest.mark.parametrize("how", [None, *HOWS], ids=str)
@pytest.mark.parametrize(("name", "which"), CASES, ids=str)
def test_it_is_the_twin_bit_for_bit_straight_and_through_the_dispatcher(name: str, which, how: Cast | None):
    x, dy = inputs(7, 130)
    for to, mode in itertools.product(stores(how, 2.0**20), (torch.no_grad(), torch.enable_grad())):
        own, twins = fresh(to), fresh(to)
        with mode:
            found = CALLS[name](norm_act, x, dy, which, own)
        wanted = CALLS[name](reference, x, dy, which, twins)
        assert same(tensors(found), tensors(wanted))
        assert layout(found) == layout(wanted)
        if own.slot is not None and twins.slot is not None:
            assert same(own.slot[:2], twins.slot[:2])
            if found[1] is not None and "norm_quantize_backward" not in name:
                assert own.slot.counts_CS[:2].tolist() == [[0, 1, 0], [0, found[0].numel(), 0]]
            else:
                assert not own.slot.counts_CS.any()


@pytest.mark.parametrize("shape", [(6, 10), (1, 10), (6, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_row_major_and_their_own_whatever_xs_strides(name: str, shape: tuple[int, int]):
    """A kernel writes rows and a fake promises them; the twin follows x, so that a graph would read it wrongly."""
    for which, how, transposed in itertools.product(ways(name), [None, *HOWS], (False, True)):
        x, dy = (t.t().contiguous().t() for t in inputs(*shape, torch.float32))
        to = Store(how, transposed and how is not None)
        found = CALLS[name](norm_act, x, dy, which, to)
        assert same(tensors(found), tensors(CALLS[name](reference, x, dy, which, to)))
        assert all(t.is_contiguous() for t in tensors(found))
        results = [t for t in tensors(found) if t.dim()]  # one scale serves both orientations
        memory = [t.untyped_storage().data_ptr() for t in (x, dy, *results)]
        assert len(memory) == len(set(memory))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_fakes_have_the_shapes_of_real_results(name: str, dtype: torch.dtype):
    kinds = {which[0] if isinstance(which, Norm) else which: which for which in ways(name)}.values()
    for which, how in itertools.product(kinds, [None, *HOWS]):
        for to in stores(how):
            wanted = layout(CALLS[name](norm_act, *inputs(130, 260, dtype), which, fresh(to)))
            with FakeTensorMode() as mode:
                x, dy = (mode.from_tensor(torch.empty(130, 260, dtype=dtype)) for _ in "xd")
                if to.slot is not None:
                    live, counts = map(mode.from_tensor, to.slot[:2])
                    to = to._replace(slot=Slot(live, counts, 1))
                assert layout(CALLS[name](norm_act, x, dy, which, to)) == wanted
            if to.slot is None:
                x, dy = (torch.empty(130, 260, dtype=dtype, device="meta") for _ in "xd")
                assert layout(CALLS[name](norm_act, x, dy, which, to)) == wanted


def operator(name: str, how: Cast | None, slotted: bool, m: int = 5) -> tuple:
    """(operator, arguments)."""
    x, dy = inputs(m, 8, torch.float32)
    rows = reference.norm_quantize(x, None, None, NORMS[2])[3]
    before = {
        "norm_quantize": (x, vector(x), vector(x, 1), *NORMS[2]),
        "norm_quantize_backward": (dy, x, vector(x), *rows, *NORMS[2]),
        "act_quantize": (x, None, "swiglu"),
        "act_quantize_backward": (dy[:, :4], x, None, "swiglu"),
    }[name]
    given = (*before, "" if how is None else how.text, how is not None, *(slot()[:5] if slotted else ()))
    given = before if name == "norm_quantize_backward" else given
    return getattr(OPERATORS, f"{name}_slot" if slotted else name).default, given


@pytest.mark.parametrize("name", [name for name in CALLS if "bare" not in name])
def test_torchs_own_check_of_pure_operators(name: str):
    """Schema (nothing written, nothing aliased), fake against real, autograd registration, AOT with dynamic shapes."""
    for m in (5, 1):  # a row's transpose is a view of it
        torch.library.opcheck(*operator(name, None, slotted=False, m=m))
    x, dy = inputs(5, 8, torch.float32)
    torch.library.opcheck(OPERATORS.act_quantize.default, (x, dy, "swiglu", "", False))
    torch.library.opcheck(OPERATORS.act_quantize_backward.default, (dy, x, dy, "swiglu", "", False))


@pytest.mark.parametrize("slotted", [False, True])
@pytest.mark.parametrize("name", ["norm_quantize", "act_quantize", "act_quantize_backward"])
def test_torchs_own_check_of_codes_and_slots(name: str, slotted: bool):
    """Without test_schema: torch cannot compare FP8; and writing tables is not declared (library.py)."""
    utils = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(*operator(name, HOWS[0], slotted), test_utils=utils)


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_is_refused_and_not_lost(name: str):
    x, dy = inputs(4, 6, torch.float32)
    which = "swiglu" if "act" in name else NORMS[0]
    y = tree_leaves(CALLS[name](norm_act, x.requires_grad_(), dy, which, IN_16_BITS))[0]
    with pytest.raises(GradientError, match=f"fp8engine::{name.removesuffix('_bare')} has no gradient of its own"):
        y.sum().backward()
