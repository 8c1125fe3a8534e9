"""Norms and activations on the triton backend: every way of the table in ways.py, bit for bit.

What a kernel computes is held against float64 beside the kernel; here its FP32 result is the measure: stored in any
format, by any way, straight or through the dispatcher, it is what the twin's `store` makes of that.
"""

import pytest
import torch
from casts import E4M3, E5M2
from interpreted.test_interpreted_act import assert_stored, numbers, slot_of
from interpreted.test_interpreted_ops import launched  # noqa: F401  a fixture

import fp8engine as fe
from fp8engine.errors import BackendError
from fp8engine.ops import norm_act
from fp8engine.ops.reference import How, Norm, RowStatistics, Store

# NumPy remarks on 448 / 1e-44, Inf * 0 and the like, which a GPU computes in silence.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
U = 2.0**-24
LAYER, RMS = Norm("layer"), Norm("rms", 1e-6, True)
TENSOR, PREDICTED = How(E4M3, -1, -1), How(E5M2, -1, -1, True, True)
ROW, GROUPS, BLOCKS = How(E4M3, 1, -1, True), How(E4M3, 1, 128, True), How(E5M2, 128, 128)
# how, transposed -> the launchers of a norm after its own, and of a gated backward over 2 x 65 columns
STORES = {
    (TENSOR, False): ([], []),
    (TENSOR, True): (["transpose_codes"], []),
    (PREDICTED, False): ([], []),
    (PREDICTED, True): (["transpose_codes"], []),
    (ROW, False): ([], []),
    (ROW, True): (["cast_transpose"], []),
    (GROUPS, False): ([], ["quantize"]),
    (GROUPS, True): (["cast_transpose"], ["cast_transpose"]),
    (BLOCKS, False): (["quantize"], ["quantize"]),
    (BLOCKS, True): (["cast_transpose"], ["cast_transpose"]),
}


def to_of(how: How, transposed: bool) -> Store:
    return Store(how, transposed, slot_of(64.0 if how.delayed else 0.0))


def same(found, wanted) -> bool:
    return (found is None and wanted is None) or (found.dtype == wanted.dtype and torch.equal(found, wanted))


@pytest.mark.parametrize("form", STORES, ids=str)
@pytest.mark.parametrize("norm", [LAYER, RMS], ids=str)
def test_a_norm_is_stored_as_its_fp32_values_are(norm, form, launched):  # noqa: F811
    x, dy = numbers(21, 140, torch.bfloat16, 1), numbers(21, 140, torch.bfloat16, 2)
    weight = numbers(1, 140, torch.bfloat16, 3)[0] if norm is RMS else None
    with fe.backend("triton"), torch.set_grad_enabled(norm is RMS):  # straight, and through the dispatcher
        y, _, rows = norm_act.norm_quantize(x.float(), weight, weight, norm)
        dx, *sums = norm_act.norm_quantize_backward(dy, x.float(), weight, rows, norm)
        to, again = to_of(*form), to_of(*form)
        launched.clear()
        *found, found_rows = norm_act.norm_quantize(x, weight, weight, norm, to)
        assert launched.pop(0) == "unsupported"
        assert [name for name in launched if name != "unsupported"] == ["norm_quantize", *STORES[form][0]]
        back = norm_act.norm_quantize_backward(dy, x, weight, rows, norm, again)
    assert_stored(tuple(found), y, to, to_of(*form))
    assert_stored(back[:2], dx, again, to_of(*form))
    assert same(found_rows.rstd_M, rows.rstd_M)
    assert same(found_rows.mean_M, rows.mean_M)
    assert same(back.dweight_K, sums[1])
    # Without a weight the sums come in x's dtype: FP32 rounded once.
    assert same(back.dbias_K, None if sums[2] is None else sums[2].to(x.dtype))


@pytest.mark.parametrize("form", STORES, ids=str)
@pytest.mark.parametrize("kind", ["relu", "swiglu"])
def test_an_activation_is_stored_as_its_fp32_values_are(kind, form, launched):  # noqa: F811
    x = numbers(37, 130, torch.bfloat16, 1, strided=True)
    dy = numbers(37, 65 if kind == "swiglu" else 130, torch.bfloat16, 2)
    with fe.backend("triton"), torch.set_grad_enabled(kind == "relu"):  # through the dispatcher, and straight
        y, _ = norm_act.act_quantize(x.float(), kind)
        dx, _, dbias = norm_act.act_quantize_backward(dy, x.float(), kind)
        to, again = to_of(*form), to_of(*form)
        found = norm_act.act_quantize(x, kind, to)
        launched.clear()
        back = norm_act.act_quantize_backward(dy, x, kind, again)
    if kind == "swiglu":
        assert [name for name in launched if name != "unsupported"] == ["act_quantize_backward", *STORES[form][1]]
    assert_stored(found, y, to, to_of(*form))
    assert_stored(back[:2], dx, again, to_of(*form))
    # Tiles of another height add in another order: 37 additions on both sides.
    assert ((back.dbias_K - dbias).abs() <= 2 * 39 * U * dx.abs().sum(0)).all()


def test_16_bits_are_rounded_once_and_relu_is_its_twin():
    x, dy = numbers(5, 70, torch.float16, 1), numbers(5, 70, torch.float16, 2)
    with fe.backend("triton"):
        y, y_t, rows = norm_act.norm_quantize(x, None, None, LAYER)
        assert y_t is None
        assert same(y, norm_act.norm_quantize(x.float(), None, None, LAYER)[0].half())
        dx = norm_act.norm_quantize_backward(dy, x, None, rows, LAYER).dx_MK
        assert same(dx, norm_act.norm_quantize_backward(dy, x.float(), None, rows, LAYER).dx_MK.half())
        assert same(norm_act.act_quantize(x, "relu")[0], torch.relu(x))
        assert same(norm_act.act_quantize_backward(dy, x, "relu").dx_MK, dy * (x > 0))


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
            card.setattr("fp8engine.ops.ways.choose", lambda where: "triton")
            assert call()[0] is not None
    with fe.backend("triton"):  # the widest that there is
        assert norm_act.norm_quantize(x[:, 1:], None, None, RMS)[0].shape == (1, 16384)


@pytest.mark.parametrize("form", STORES, ids=str)
@pytest.mark.parametrize("shape", [(0, 6), (3, 0)], ids=str)
def test_nothing_gives_nothing_by_every_way(shape, form):
    x, to = torch.empty(shape), to_of(*form)
    with fe.backend("triton"):
        y, y_t, rows = norm_act.norm_quantize(x, None, None, LAYER, to)
        found = norm_act.norm_quantize_backward(x, x, x.new_ones(shape[1]), rows, LAYER, to)
        q, q_t = norm_act.act_quantize(x, "swiglu", to)
        back = norm_act.act_quantize_backward(torch.empty(q.data.shape), x, "swiglu", to)
    for one, turned in ((y, y_t), (q, q_t), found[:2], back[:2]):
        assert one.data.numel() == 0
        assert (one.scale == 1).all()
        assert (turned is None) == (not form[1])
        assert turned is None or (turned.data.shape == one.data.shape[::-1] and (turned.scale == 1).all())
    assert found.dweight_K.tolist() == found.dbias_K.tolist() == back.dbias_K.tolist() == [0.0] * shape[1]
    assert not to.slot.counts_CS.any()


def test_a_compiled_graph_follows_the_backend_of_its_caller(launched):  # noqa: F811
    x = numbers(9, 32, torch.bfloat16, 1)

    def both(x, slot):
        y, _, rows = norm_act.norm_quantize(x, None, None, RMS, Store(TENSOR, True, slot))
        return y.data.float() * y.scale, rows.rstd_M

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    slots = [slot_of(0.0) for _ in range(3)]
    with torch.no_grad():
        compiled(x, slots[0])
        assert not launched
        with fe.backend("triton"):
            found, wanted = compiled(x, slots[1]), both(x, slots[2])
    launchers = ["norm_quantize", "transpose_codes"]
    assert [name for name in launched if name != "unsupported"] == 2 * launchers
    assert torch.equal(found[0], wanted[0])
    assert all(slot.counts_CS[0].tolist() == [0, 1, 0] for slot in slots)
