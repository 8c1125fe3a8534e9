"""Norms and activations on the triton backend: codes are a cache, and which launches make them.

What a kernel computes is held against float64 beside the kernel.  Here every operation, straight or through the
dispatcher, is held against a cast of its own result: codes, scales, and the slot's tables, bit for bit.
"""

import itertools

import pytest
import torch
from activations import EXACT, OF_GATE
from casts import E4M3, E5M2, assert_same, bits
from interpreted.test_interpreted_act import numbers, slot_of
from interpreted.test_interpreted_ops import launched  # noqa: F401  a fixture

import fp8engine as fe
from fp8engine.errors import BackendError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts, norm_act
from fp8engine.ops.reference import Norm, RowStatistics, Store
from tests.helpers.casts import cast_of

# NumPy remarks on 448 / 1e-44, Inf * 0 and the like, which a GPU computes in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
U = 2.0**-24
LAYER, RMS = Norm("layer"), Norm("rms", 1e-6, True)
TENSOR, PREDICTED = cast_of(E4M3, -1, -1), cast_of(E5M2, -1, -1, True, True)
ROW, GROUPS, BLOCKS = cast_of(E4M3, 1, -1, True), cast_of(E4M3, 1, 128, True), cast_of(E5M2, 128, 128)
# how, transposed -> the launchers after their own: of a norm, an activation, a gated backward over 2 x 65 columns
STORES = {
    (TENSOR, False): ([], [], []),
    (TENSOR, True): ([], [], []),
    (PREDICTED, False): ([], [], []),
    (PREDICTED, True): (["cast_transpose"], [], []),
    (ROW, False): ([], [], ["quantize"]),
    (ROW, True): (["cast_transpose"], ["cast_transpose"], ["cast_transpose"]),
    (GROUPS, False): ([], [], ["quantize"]),
    (GROUPS, True): (["cast_transpose"], ["cast_transpose"], ["cast_transpose"]),
    (BLOCKS, False): (["quantize"], ["quantize"], ["quantize"]),
    (BLOCKS, True): (["cast_transpose"], ["cast_transpose"], ["cast_transpose"]),
}
ASKS = ("unsupported", "casts_groups")


def to_of(how: Cast, transposed: bool, predicted: float = 64.0) -> Store:
    return Store(how, transposed, slot_of(predicted if how.delayed else 0.0))


def assert_cached(found: tuple, to: Store, fresh: Store) -> None:
    """found: (y, codes, codes of the transpose); `to`'s slot as it was left; `fresh`: its equal before."""
    y, *codes = found
    assert fresh.cast is not None
    if fresh.transposed:
        wanted = casts.cast_transpose(y, fresh.cast, fresh.slot)
    else:
        wanted = casts.quantize(y, fresh.cast, fresh.slot), None
    for mine, cast in zip(codes, wanted, strict=True):
        assert (mine is None) == (cast is None)
        if mine is not None and cast is not None:
            assert mine[2:] == cast[2:]
            assert mine.data.dtype == cast.data.dtype
            assert_same(bits(mine.data), bits(cast.data))
            assert_same(mine.scale, cast.scale)
    if to.slot is not None and fresh.slot is not None:
        assert_same(to.slot.live_2S, fresh.slot.live_2S)
        assert_same(to.slot.counts_CS, fresh.slot.counts_CS)


def names(launched: list[str]) -> list[str]:  # noqa: F811
    return [name for name in launched if name not in ASKS]


@pytest.mark.few(8)
@pytest.mark.parametrize("form", STORES, ids=str)
@pytest.mark.parametrize("norm", [LAYER, RMS], ids=str)
def test_a_norms_launches(norm, form, launched):  # noqa: F811
    x, dy = numbers(21, 140, torch.bfloat16, 1), numbers(21, 140, torch.bfloat16, 2)
    weight = numbers(1, 140, torch.bfloat16, 3)[0] if norm is RMS else None
    with fe.backend("triton"), torch.set_grad_enabled(norm is RMS):  # straight, and through the dispatcher
        to = to_of(*form)
        *found, rows = norm_act.norm_quantize(x, weight, weight, norm, to)
        assert names(launched) == ["norm_quantize", *STORES[form][0]]
        assert_cached(tuple(found), to, to_of(*form))
        launched.clear()
        norm_act.norm_quantize_backward(dy, x, weight, rows, norm)
        assert names(launched) == ["norm_quantize_backward"]


@pytest.mark.few(8)
@pytest.mark.parametrize("form", STORES, ids=str)
@pytest.mark.parametrize("kind", ["relu", "swiglu"])
def test_an_activations_launches(kind, form, launched):  # noqa: F811
    x = numbers(37, 130, torch.bfloat16, 1, strided=True)
    dy = numbers(37, 65 if kind == "swiglu" else 130, torch.bfloat16, 2)
    with fe.backend("triton"), torch.set_grad_enabled(kind == "relu"):  # through the dispatcher, and straight
        to, again = to_of(*form), to_of(*form)
        found = norm_act.act_quantize(x, kind, to)
        assert names(launched) == ["act_quantize", *STORES[form][1]]
        assert_cached(found, to, to_of(*form))
        launched.clear()
        back = norm_act.act_quantize_backward(dy, x, kind, again)
        if kind == "swiglu":
            assert names(launched) == ["act_quantize_backward", *STORES[form][2]]
        assert_cached(back[:3], again, to_of(*form))
    assert back.dbias_K is not None
    assert ((back.dbias_K - back.dx_MK.double().sum(0)).abs() <= 39 * U * back.dx_MK.double().abs().sum(0)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_once(dtype):
    """From the FP32 result, which does not depend on the codes beside it."""
    x, dy = numbers(33, 130, dtype, 1), numbers(33, 130, dtype, 2)
    with fe.backend("triton"):
        for norm, to in itertools.product((LAYER, RMS), (Store(), Store(TENSOR, True), Store(ROW))):
            wide, *_, rows = norm_act.norm_quantize(x.float(), None, None, norm)
            y, *_, same = norm_act.norm_quantize(x, None, None, norm, to)
            assert torch.equal(y, wide.to(dtype))
            assert torch.equal(same.rstd_M, rows.rstd_M)
            given = x[:1].float()[0], rows, norm
            dx, dweight, _ = norm_act.norm_quantize_backward(dy, x, *given)
            wide = norm_act.norm_quantize_backward(dy.float(), x.float(), *given)
            assert torch.equal(dx, wide.dx_MK.to(dtype))
            assert torch.equal(dweight, wide.dweight_K)
        for kind in EXACT:
            y, dy_MN = norm_act.act_quantize(x, kind, Store(TENSOR))[0], dy[:, : 65 if kind in OF_GATE else 130]
            assert torch.equal(y, norm_act.act_quantize(x.float(), kind)[0].to(dtype))
            dx = norm_act.act_quantize_backward(dy_MN, x, kind, Store(TENSOR)).dx_MK
            assert torch.equal(dx, norm_act.act_quantize_backward(dy_MN.float(), x.float(), kind).dx_MK.to(dtype))


def test_relu_is_its_twin():
    x, dy = numbers(5, 70, torch.float16, 1), numbers(5, 70, torch.float16, 2)
    with fe.backend("triton"):
        assert torch.equal(norm_act.act_quantize(x, "relu")[0], torch.relu(x))
        assert torch.equal(norm_act.act_quantize_backward(dy, x, "relu").dx_MK, dy * (x > 0))


def test_a_row_beyond_the_widest_is_the_twins_unless_triton_is_asked_for(monkeypatch):
    x = torch.ones(1, 16385)
    rows = RowStatistics(torch.ones(1), None)
    for call in (
        lambda: norm_act.norm_quantize(x, None, None, RMS, Store(TENSOR, True)),
        lambda: norm_act.norm_quantize_backward(x, x, None, rows, RMS),
    ):
        words = r"\[1, 16385\]: rows of 16385 columns; a program holds 16384; use fe.backend\('reference'\)"
        for graded in (False, True):
            with fe.backend("triton"), torch.set_grad_enabled(graded), pytest.raises(BackendError, match=words):
                call()
        assert call()[0] is not None
        with monkeypatch.context() as card:
            card.setattr("fp8engine.ops.casts.choose", lambda where: "triton")
            assert call()[0] is not None
    with fe.backend("triton"):  # the widest that there is
        assert norm_act.norm_quantize(x[:, 1:], None, None, RMS)[0].shape == (1, 16384)


def test_a_compiled_graph_follows_the_backend_of_its_caller(launched):  # noqa: F811
    x = numbers(9, 32, torch.bfloat16, 1)

    def both(x, slot):
        y, q, _, rows = norm_act.norm_quantize(x, None, None, RMS, Store(PREDICTED, True, slot))
        return q.data.float() * q.scale + y, rows.rstd_M

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    slots = [slot_of(0.0) for _ in range(3)]
    with torch.no_grad():
        compiled(x, slots[0])
        assert not launched
        with fe.backend("triton"):
            found, wanted = compiled(x, slots[1]), both(x, slots[2])
    assert names(launched) == 2 * ["norm_quantize", "cast_transpose"]
    assert torch.equal(found[0], wanted[0])
    assert all(slot.counts_CS[0].tolist() == [0, 1, 0] for slot in slots)
