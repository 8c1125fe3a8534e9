"""The size of the house: each room within its budget of lines of code, and the page's table as it is counted."""

import pytest

from benchmarks.lines import BUDGET, PAGE, TABLE, Size, count, rooms, table, total

SLACK = 0.05  # a budget that is more above its room than this share has not followed a deletion


def test_each_room_is_within_its_budget_and_no_budget_lags_behind_its_room():
    code = {name: total(files).code for name, files in rooms().items()}
    assert set(code) == set(BUDGET)
    assert {name: lines for name, lines in code.items() if lines > BUDGET[name]} == {}
    assert {name: lines for name, lines in code.items() if lines < (1 - SLACK) * BUDGET[name] - 10} == {}


def test_the_page_has_what_is_counted():
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found.group() == table(rooms()), "python benchmarks/lines.py --write"


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("", Size(0, 0)),
        ("import os\n\n\nx = 1  # why\n", Size(4, 2)),
        ('def f():\n    """One\n\n    two."""\n    # three\n    return """a\nb"""\n', Size(7, 3)),
        ("x = (\n    1,\n\n    # why\n    2,\n)\n", Size(6, 4)),
    ],
)
def test_what_counts_as_code(source: str, size: Size):
    assert count(source) == size


def test_code_in_a_folder_below_a_room_counts_for_it(tmp_path):
    for file, source in {
        "fp8engine/ops/deep/a.py": "x = 1\n",
        "fp8engine/b.py": "y = 2\nz = 3\n",
        "kernels/c.py": "k = 4\n",
    }.items():
        (path := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "fp8engine" / "kernels").symlink_to("../kernels")
    assert {name: total(files).code for name, files in rooms(tmp_path).items()} == {
        "ops": 1,
        "top level": 2,
        "kernels": 1,
    }
