"""The table of predicted times, and the timing model's constants against the committed machine code."""

import pytest

from benchmarks import predicted
from fp8engine.numerics import matmul_time
from fp8engine.numerics.matmul_time import CEILINGS
from fp8engine.ops import launches
from fp8engine.ops.launches import Launch

ROWS = predicted.baseline()


@pytest.mark.parametrize("family", ["triton", "gluon"])
@pytest.mark.parametrize("sums", ["promoted", "block", "block by block"])
def test_no_ceiling_is_higher_than_the_machine_code_says(family, sums):
    rows = [one for one in map(predicted._read_row, ROWS.items()) if one and predicted._is(one, family, sums)]
    plain = CEILINGS["triton"][sums]  # a kernel that is not there yet is taken for the plain one
    assert CEILINGS[family][sums] <= max((one.kernel.ceiling + 0.005 for one in rows), default=plain)


def test_the_page_has_what_is_computed_now(monkeypatch: pytest.MonkeyPatch):
    """Else run `python -m benchmarks.predicted --write`: another launch or time makes it stale."""
    page = "".join(page.read_text() for page in predicted.DOCS)
    assert predicted.written(page) == page
    assert [part[1] for part in predicted.PART.finditer(page)] == list(predicted.TABLES)
    with monkeypatch.context() as patch:
        once = launches.cast
        patch.setattr(launches, "cast", lambda *given, **how: [*once(*given, **how), Launch("cast")])
        stale = predicted.written(page)
        changed = [name for name in predicted.TABLES if part_of(stale, name) != part_of(page, name)]
        assert changed == ["speedups", "launches"]
    monkeypatch.setattr(matmul_time, "STORE", 2 * matmul_time.STORE)
    assert part_of(predicted.written(page), "kernels") != part_of(page, "kernels")


def part_of(page: str, name: str) -> str:
    """A table of the page."""
    return next(part[0] for part in predicted.PART.finditer(page) if part[1] == name)


def wgrad_of(lines: list[str]) -> str:
    """The line of one kind and shape."""
    (found,) = [line for line in lines if line.startswith("| blocks 1x128 by 1x128") and "8192x4096x4096" in line]
    return found


def test_the_table_names_every_kind_new_rows_are_taken_and_strange_ones_are_listed():
    lines = predicted.kernels()
    assert len(lines) == 2 + len(predicted.KINDS) * len(predicted.SHAPES)
    assert "128x128x128 gluon | 89% |" in wgrad_of(lines)
    assert "| - |" not in "".join(lines)
    fast, strange = (
        "matmul_block 1x128 1x128 sm_90 128x128x128 g8 w8 s4 p1 gluon plain",
        "matmul_block twice sm_90 wide",
    )
    row = {"ceiling": 95, "programs": 1}
    rows = ROWS | {fast: row, strange: row}
    assert "128x128x128 gluon | 95% |" in wgrad_of(predicted.kernels(rows))
    assert any(strange in line for line in predicted.unknown(rows))
    assert any("CEILINGS of gluon, block by block" in line for line in predicted.stale(rows))
    found = predicted._read("matmul_fp8 tensor sm_90 128x256x128 g8 w8 s4 p2 tma flat k/4 plain", row)
    assert found is not None
    assert (found.kernel.overlapped, found.kernel.split) == (True, 4)
