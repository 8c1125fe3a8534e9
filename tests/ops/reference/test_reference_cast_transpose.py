"""Both orientations of a quantised matrix, and the way a producer stores its result."""

import importlib

import pytest
import torch
from casts import E4M3, FP8, assert_same, bits, cast_of
from contracts import counted, in_bytes, slot_of

from fp8engine.ops.reference import Store, cast_transpose, quantize
from fp8engine.ops.reference.cast_transpose import store
from fp8engine.ops.reference.matmul import column_sums
from fp8engine.ops.reference.operand import Operand

GROUPS = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
SHAPES = [(1, 1), (5, 3), (131, 127), (256, 130), (1, 300), (300, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")


def sample(m: int, k: int) -> torch.Tensor:
    return (torch.randn(m, k) * torch.exp2(torch.randint(-6, 7, (m, 1)))).bfloat16()


def assert_operand(found: Operand, q_MK: torch.Tensor, scale: torch.Tensor) -> None:
    assert found.data.is_contiguous()
    assert_same(bits(found.data), bits(q_MK))
    assert_same(found.scale, scale)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_each_orientation_is_quantised_along_its_own_reduction(group, power_of_2, shape):
    """q is x cast with `how`; q^T is x^T cast with `how`: in both the scale runs along the last dimension."""
    for dtype in FP8:
        how = cast_of(dtype, *GROUPS[group], power_of_2)
        x_MK = sample(*shape)
        q, q_t = cast_transpose(x_MK, how)
        assert_operand(q, *quantize(x_MK, how))
        assert_operand(q_t, *quantize(x_MK.t().contiguous(), how))
        assert (q.rows, q.cols, q.power_of_2) == (q_t.rows, q_t.cols, q_t.power_of_2) == (*GROUPS[group], power_of_2)
        assert q.scaled_along_k == q_t.scaled_along_k == (group not in ("tensor", "row"))


@pytest.mark.parametrize("group", GROUPS)
def test_a_tensor_is_counted_once_nan_reaches_both_and_sums_change_nothing(group):
    how, x_MK, with_sums, without = cast_of(E4M3, *GROUPS[group]), sample(37, 140), slot_of(), slot_of()
    both = cast_transpose(x_MK, how, without)
    assert counted(without)["elements"] == x_MK.numel()
    assert without.live_2S[0, 1] == x_MK.abs().max().float()
    *found, sums_K = cast_transpose(x_MK, how, with_sums, sums=True)
    assert in_bytes((found, with_sums)) == in_bytes((both, without))
    assert_same(sums_K, column_sums(x_MK))
    x_MK[3, 130] = float("nan")
    q, q_t = cast_transpose(x_MK, how)
    assert torch.isnan(q.data.float()).nonzero().tolist() == [[3, 130]]
    assert torch.isnan(q_t.data.float()).nonzero().tolist() == [[130, 3]]


def test_a_prediction_serves_both():
    q, q_t = cast_transpose(torch.ones(2, 3), cast_of(E4M3, -1, -1, delayed=True), slot_of(8.0))
    assert q.scale == q_t.scale == 0.125
    assert (q_t.data.float() == 8).all()


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
    x_MK = torch.ones(9, 4, dtype=dtype)
    x_MK[2, 0], x_MK[3, 1], x_MK[4, 2], x_MK[8, 2] = INF, float("nan"), INF, -INF
    assert_same(column_sums(x_MK), torch.tensor([INF, float("nan"), float("nan"), 9.0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_is_rounded_once_and_lies_in_rows(dtype):
    y_MK = torch.randn(7, 5).t()
    y, q, q_t = store(y_MK, dtype, Store())
    assert (q, q_t) == (None, None)
    assert (y.dtype, y.is_contiguous()) == (dtype, True)
    assert_same(y.float(), y_MK.to(dtype).float())
