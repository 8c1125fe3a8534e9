"""The table of predicted times, and the timing model's constants against the committed machine code."""

import json

import pytest

from benchmarks import predicted
from fp8engine.numerics.cards import H100_SXM
from fp8engine.numerics.matmul_time import CEILINGS

AFTER = json.loads(predicted.AFTER.read_text())["kernels"]
BEFORE = json.loads(predicted.BEFORE.read_text())["kernels"]


@pytest.mark.parametrize("family", ["triton", "gluon"])
@pytest.mark.parametrize("sums", ["promoted", "block", "block by block"])
def test_no_ceiling_is_higher_than_the_machine_code_says(family, sums):
    rows = [one for one in map(predicted._read_row, AFTER.items()) if one and predicted._is(one, family, sums)]
    if rows:  # a kernel that is not there yet is taken for the plain one
        assert CEILINGS[family][sums] <= max(one.kernel.ceiling for one in rows) + 0.005
    else:
        assert CEILINGS[family][sums] <= CEILINGS["triton"][sums]


def test_the_table_names_every_kind_before_and_after():
    lines = predicted.table(BEFORE, AFTER, H100_SXM)
    assert sum(line.startswith("| ") for line in lines) == 2 + len(predicted.KINDS) * len(predicted.SHAPES)
    (wgrad,) = [line for line in lines if line.startswith("| blocks 1x128 by 1x128") and "8192x4096x4096" in line]
    assert "| 57% |" in wgrad  # 64x128, which two columns of Hopper's load port let through faster than 128x128 at 49 %


def test_new_rows_are_taken_and_strange_ones_are_listed():
    fast = "matmul_block 1x128 1x128 sm_90 128x128x128 g8 w8 s4 p1 gluon plain"
    strange = "matmul_block twice sm_90 wide"
    row = {"ceiling": 95, "programs": 1}
    lines = predicted.table(BEFORE, {**AFTER, fast: row, strange: row}, H100_SXM)
    (wgrad,) = [line for line in lines if line.startswith("| blocks 1x128 by 1x128") and "8192x4096x4096" in line]
    assert "128x128x128 gluon | 95% |" in wgrad
    assert wgrad.rstrip(" |").endswith("x")
    assert any(strange in line for line in lines)
    assert any("CEILINGS of gluon, block by block" in line for line in lines)
    flat = "matmul_fp8 tensor sm_90 128x256x128 g8 w8 s4 p2 tma flat k/4 plain"
    found = predicted._read(flat, row)
    assert found is not None
    assert (found.kernel.overlapped, found.kernel.split) == (True, 4)
