"""What the tests of norms and activations do not reach in `put` and `begin`, which store what they make."""

import pytest
import torch
import triton
import triton.language as tl
from casts import E4M3, FP8
from interpreted.test_interpreted_act import WAYS, assert_stored, numbers, slot_of, way

from fp8engine.kernels import produce as kernel
from fp8engine.kernels.act_quantize import act_quantize
from fp8engine.kernels.norm_quantize import norm_quantize
from fp8engine.ops.reference import How
from fp8engine.ops.reference.cast_transpose import Store
from fp8engine.ops.reference.norm_quantize import Norm

ROWS, COLUMNS = 16, 4


@triton.jit
def _put(y, q, q_t, M, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS).to(tl.int64)
    y_MN = tl.load(y + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    outputs = (q, q_t, None, None, None, None)
    kernel.put(
        y_MN, rows, 0, K, M, K, 1.0, outputs, kernel.nothing_seen(),
        "tensor", 1, tl.float8e4nv, False, True, False, False,
    )  # fmt: skip


def test_the_transposed_copy_may_be_larger_than_2_gib(far):
    # q^T [3, 2^30], of which 16 columns are written: the third row begins at 2^31.
    y, rows, columns = torch.arange(64.0).view(ROWS, COLUMNS), 1 << 30, 3
    q = torch.zeros(ROWS, columns, dtype=E4M3)
    q_t = far(1, 1 << 32, (1 << 32, 1)).view(E4M3)[0].as_strided((columns, rows), (rows, 1))
    _put[(1,)](y, q, q_t, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS)
    assert torch.equal(q.float(), y[:, :columns].to(E4M3).float())
    assert torch.equal(q_t[:, :ROWS].float(), q.t().float())


def test_a_kernel_stores_every_way_but_groups_with_a_transposed_copy():
    refused = [form for form in WAYS if kernel.cannot_store(way(*form)) is not None]
    assert refused == [form for form in WAYS if form[1] == (1, 128) and form[3]]
    assert refused


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_delayed_cast_without_a_slot_measures(dtype):
    x, to = numbers(5, 70, torch.float32, 1), Store(How(dtype, -1, -1, delayed=True))
    assert_stored(act_quantize(x, "relu", to), torch.relu(x), to, to)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_with_nothing_predicted_a_delayed_store_takes_the_amax(dtype):
    x = numbers(5, 70, torch.float32, 1)
    to, fresh = (Store(How(dtype, -1, -1, delayed=True), True, slot_of(0.0)) for _ in range(2))
    assert_stored(act_quantize(x, "relu", to), torch.relu(x), to, fresh)


def test_a_group_that_begins_where_the_row_ends_has_no_scale():
    # Rows of 384 in tiles of 512 columns: the fourth group of the last row would be stored behind the last scale.
    x, to = numbers(4, 384, torch.float32, 1), way(E4M3, (1, 128), True, False, 0.0)
    *found, _ = norm_quantize(x, None, None, Norm("rms"), to)
    y, _, _ = norm_quantize(x, None, None, Norm("rms"), Store())
    assert_stored(tuple(found), y, to, way(E4M3, (1, 128), True, False, 0.0))
