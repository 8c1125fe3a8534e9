"""What the tests of norms and activations do not reach in `put` and `Target`, which store what they make."""

import pytest
import torch
import triton
import triton.language as tl
from casts import E4M3, FP8, cast_of
from contracts import slot_of
from interpreted.test_interpreted_act import assert_stored, numbers, way

from fp8engine.kernels import produce as kernel
from fp8engine.kernels import quantize
from fp8engine.kernels.act_quantize import act_quantize
from fp8engine.kernels.norm_quantize import norm_quantize
from fp8engine.ops.reference.cast_transpose import Store
from fp8engine.ops.reference.norm_quantize import Norm

ROWS, COLUMNS = 16, 4


@triton.jit
def _put(x, y, q, q_t, M, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS).to(tl.int64)
    x_MN = tl.load(x + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    none = tl.zeros((), tl.int32)
    seen = tl.zeros((), tl.float32), none, none, none, tl.full((), float("inf"), tl.float32)
    outputs = (y, q, q_t, None, None, 0)
    kernel.put(x_MN, rows, 0, K, M, K, 1.0, outputs, seen, "tensor", 1, tl.float8e4nv, False, False)


def test_the_transposed_copy_may_be_larger_than_2_gib(far):
    # q^T [3, 2^30], of which 16 columns are written: the third row begins at 2^31.
    x, rows, columns = torch.arange(64.0).view(ROWS, COLUMNS), 1 << 30, 3
    y, q = torch.zeros(ROWS, columns), torch.zeros(ROWS, columns, dtype=E4M3)
    q_t = far(1, 1 << 32, (1 << 32, 1)).view(E4M3)[0].as_strided((columns, rows), (rows, 1))
    _put[(1,)](x, y, q, q_t, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS)
    assert torch.equal(y, x[:, :columns])
    assert torch.equal(q.float(), x[:, :columns].to(E4M3).float())
    assert torch.equal(q_t[:, :ROWS].float(), q.t().float())


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_delayed_cast_without_a_slot_measures(dtype):
    x, to = numbers(5, 70, torch.float32, 1), Store(cast_of(dtype, -1, -1, delayed=True))
    assert_stored(act_quantize(x, "relu", to), to, to)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_with_nothing_predicted_a_delayed_store_takes_the_amax(dtype):
    x = numbers(5, 70, torch.float32, 1)
    to, fresh = (Store(cast_of(dtype, -1, -1, delayed=True), True, slot_of(0.0)) for _ in range(2))
    assert_stored(act_quantize(x, "relu", to), to, fresh)


def test_a_group_that_begins_where_the_row_ends_has_no_scale():
    # Rows of 384 in tiles of 512 columns: the fourth group of the last row would be stored behind the last scale.
    x, to = numbers(4, 384, torch.float32, 1), way(E4M3, (1, 128), True, False, 0.0)
    *found, _ = norm_quantize(x, None, None, Norm("rms"), to)
    assert_stored(tuple(found), to, way(E4M3, (1, 128), True, False, 0.0))


def test_no_more_programs_than_the_second_launch_reads_the_findings_of(monkeypatch):
    monkeypatch.setattr(kernel, "processors", lambda where: 132)
    assert kernel.programs(1 << 20, 8, torch.device("cpu")) == 132 * 4
    assert kernel.programs(1 << 20, 4, torch.device("cpu")) == quantize.MOST_PROGRAMS.value == 1024
    assert kernel.programs(7, 4, torch.device("cpu")) == 7
