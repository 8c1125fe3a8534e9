"""Norms and activations on the triton backend: which launches make their codes, and one rounding to 16 bits.

That codes are a cast of the result beside them: test_interpreted_contracts.py.
"""

import itertools

import pytest
import torch
from activations import EXACT, OF_GATE
from casts import E4M3, E5M2, cast_of
from contracts import counted, slot_of
from interpreted.test_interpreted_act import numbers

import fp8engine as fe
from fp8engine.errors import BackendError
from fp8engine.ops import norm_act
from fp8engine.ops.reference import Norm, RowStatistics, Store

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


@pytest.mark.few(8)
@pytest.mark.parametrize("form", STORES, ids=str)
@pytest.mark.parametrize("graded", [False, True], ids=["straight", "dispatcher"])
def test_which_launches_make_the_codes(form, graded, launched):
    (how, transposed), of_norm, of_activation, of_backward = form, *STORES[form]
    x, dy = numbers(37, 130, torch.bfloat16, 1, strided=True), numbers(37, 65, torch.bfloat16, 2)
    norm = RMS if graded else LAYER

    def ran(call, *arguments, codes: bool = True) -> list[str]:
        launched.clear()
        to = [Store(how, transposed, slot_of(64.0 if how.delayed else 0.0))] if codes else []
        with fe.backend("triton"), torch.set_grad_enabled(graded):
            call(*arguments, *to)
        return [*launched]

    assert ran(norm_act.norm_quantize, x, None, None, norm) == ["norm_quantize", *of_norm]
    rows = RowStatistics(torch.ones(37), torch.zeros(37) if norm is LAYER else None)
    assert ran(norm_act.norm_quantize_backward, x, x, None, rows, norm, codes=False) == ["norm_quantize_backward"]
    for kind in ("relu", "swiglu"):
        assert ran(norm_act.act_quantize, x, kind) == ["act_quantize", *of_activation]
    assert ran(norm_act.act_quantize_backward, dy, x, "swiglu") == ["act_quantize_backward", *of_backward]


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


@pytest.mark.parametrize("form", STORES, ids=str)
def test_what_holds_nothing_launches_nothing(form, launched):
    """That it gives what the twin gives: test_interpreted_contracts.py."""
    how, transposed = form
    for shape in ((0, 6), (3, 0)):
        x, to = torch.empty(shape), Store(how, transposed, slot_of(0.0))
        with fe.backend("triton"):
            for norm in (LAYER, RMS):
                y, q, q_t, rows = norm_act.norm_quantize(x, None, None, norm, to)
                norm_act.norm_quantize_backward(y, x, torch.ones(shape[1]), rows, norm)
                assert (q.data.shape, q_t is None) == (shape, not transposed)
            norm_act.act_quantize(x, "relu", to)
            norm_act.act_quantize_backward(x, x, "relu", to)
    assert not launched


def test_a_compiled_graph_follows_the_backend_of_its_caller(launched):
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
    assert launched == 2 * ["norm_quantize", "cast_transpose"]
    assert torch.equal(found[0], wanted[0])
    assert [counted(slot)["calls"] for slot in slots] == [1, 1, 1]
