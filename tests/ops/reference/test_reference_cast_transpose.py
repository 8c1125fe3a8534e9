"""Both orientations of a quantised matrix, and the way a producer stores its result."""

import importlib

import pytest
import torch
from casts import E4M3, E5M2, assert_same, bits

from fp8engine.ops.reference import Slot, Store, cast_transpose, quantize
from fp8engine.ops.reference.cast_transpose import store
from fp8engine.ops.reference.matmul import column_sums
from fp8engine.ops.reference.operand import COUNTERS, Operand
from tests.helpers.casts import cast_of

GROUPS = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
SHAPES = [(1, 1), (5, 3), (131, 127), (256, 130), (1, 300), (300, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")


def sample(m: int, k: int) -> torch.Tensor:
    return (torch.randn(m, k) * torch.exp2(torch.randint(-6, 7, (m, 1)))).bfloat16()


def new_slot() -> Slot:
    return Slot(torch.tensor([[-1.0], [0.0]]), torch.zeros(len(COUNTERS), 1, dtype=torch.int64), 0)


def assert_operand(found: Operand, q_MK: torch.Tensor, scale: torch.Tensor) -> None:
    assert found.data.is_contiguous()
    assert_same(bits(found.data), bits(q_MK))
    assert_same(found.scale, scale)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_each_orientation_is_quantised_along_its_own_reduction(group, power_of_2, shape):
    # q is x cast with `how`; q^T is x^T cast with `how`: in both the scale runs along the last dimension.
    for dtype in (E4M3, E5M2):
        how = cast_of(dtype, *GROUPS[group], power_of_2)
        x_MK = sample(*shape)
        q, q_t = cast_transpose(x_MK, how)
        assert_operand(q, *quantize(x_MK, how))
        assert_operand(q_t, *quantize(x_MK.t().contiguous(), how))
        assert (q.rows, q.cols, q.power_of_2) == (q_t.rows, q_t.cols, q_t.power_of_2) == (*GROUPS[group], power_of_2)
        assert q.scaled_along_k == q_t.scaled_along_k == (group not in ("tensor", "row"))


def test_per_tensor_the_transpose_holds_the_same_codes():
    q, q_t = cast_transpose(sample(37, 61), cast_of(E4M3, -1, -1))
    assert_same(bits(q_t.data), bits(q.data).T)
    assert q_t.scale.shape == ()
    assert q_t.scale == q.scale


@pytest.mark.parametrize("group", GROUPS)
def test_a_tensor_is_counted_once(group):
    slot = new_slot()
    x_MK = sample(7, 9)
    cast_transpose(x_MK, cast_of(E4M3, *GROUPS[group]), slot)
    assert dict(zip(COUNTERS, slot.counts_CS[:, 0].tolist(), strict=True))["elements"] == 63
    assert slot.live_2S[0, 0] == x_MK.abs().max().float()


@pytest.mark.parametrize("group", GROUPS)
def test_nan_reaches_both(group):
    x_MK = sample(9, 140)
    x_MK[3, 130] = float("nan")
    q, q_t = cast_transpose(x_MK, cast_of(E4M3, *GROUPS[group]))
    assert torch.isnan(q.data.float()).nonzero().tolist() == [[3, 130]]
    assert torch.isnan(q_t.data.float()).nonzero().tolist() == [[130, 3]]


def test_a_prediction_serves_both():
    slot = new_slot()
    slot.live_2S[1] = 8.0
    q, q_t = cast_transpose(torch.ones(2, 3), cast_of(E4M3, -1, -1, delayed=True), slot)
    assert q.scale == q_t.scale == 0.125
    assert (q_t.data.float() == 8).all()


@pytest.mark.parametrize("group", GROUPS)
def test_sums_come_third_and_change_nothing_else(group):
    x_MK, how, with_sums, without = sample(37, 140), cast_of(E4M3, *GROUPS[group]), new_slot(), new_slot()
    *both, sums_K = cast_transpose(x_MK, how, with_sums, sums=True)
    for found, wanted in zip(both, cast_transpose(x_MK, how, without), strict=True):
        assert_operand(found, wanted.data, wanted.scale)
    assert torch.equal(with_sums.counts_CS, without.counts_CS)
    assert torch.equal(with_sums.live_2S, without.live_2S)
    assert_same(sums_K, column_sums(x_MK))


@pytest.mark.parametrize("piece", [1 << 19, 1, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_columns(dtype, piece, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fp8engine.ops.reference.matmul"), "PIECE", piece)
    for m, k in [*SHAPES, (0, 5), (5, 0)]:
        x_MK = sample(m, k).to(dtype)
        for view in (x_MK, x_MK.t(), x_MK[::2, 1:]):
            sums_K = column_sums(view)
            assert (sums_K.dtype, sums_K.shape) == (torch.float32, view.shape[1:])
            # n numbers in any order: (n - 1) u / (1 - (n - 1) u) of the sum of magnitudes, u = 2^-24 (Higham, 4.2).
            wide, terms = view.double(), max(len(view) - 1, 0) * 2.0**-24
            assert ((sums_K - wide.sum(0)).abs() <= terms / (1 - terms) * wide.abs().sum(0)).all()
        whole = torch.randint(-8, 9, (m, k)).to(dtype)
        assert column_sums(whole).tolist() == whole.double().sum(0).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_keep_what_is_not_finite(dtype, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fp8engine.ops.reference.matmul"), "PIECE", 8)
    x_MK = torch.ones(9, 4, dtype=dtype)
    x_MK[2, 0], x_MK[3, 1], x_MK[4, 2], x_MK[8, 2] = INF, float("nan"), INF, -INF
    *_, sums_K = cast_transpose(x_MK, cast_of(E4M3, 1, -1), sums=True)
    assert_same(sums_K, torch.tensor([INF, float("nan"), float("nan"), 9.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_is_rounded_once_and_lies_in_rows(dtype):
    y_MK = torch.randn(7, 5).t()
    y, q, q_t = store(y_MK, dtype, Store())
    assert (q, q_t) == (None, None)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_same(y.float(), y_MK.to(dtype).float())
