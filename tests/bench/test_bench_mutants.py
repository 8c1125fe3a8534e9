"""The mutants of the kernels: each can still be planted, and its outcome is in the committed result."""

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants.__main__ import RESULTS, as_expected, known
from benchmarks.mutants.planted import FAMILIES, KINDS, ROOT, Mutant, mutants
from benchmarks.mutants.table import PAGE, table
from benchmarks.mutants.trials import WAYS, Copy, Suite

MUTANTS = mutants()
KILLED, SURVIVED = {"test": "tests/a.py::test", "seconds": 1}, {"test": "", "seconds": 1}
HOST = {"cast_transpose", "constant", "encoded", "launch", "limits", "tuning"}  # without a kernel
# Kinds that a family has no place for.
ABSENT = {
    "casts": {"registers", "ring"},
    "norms": {"atomics", "registers", "ring"},
    "matmuls": {"atomics", "registers"},
    "Gluon": {"dtype", "launch", "overflow", "rounding", "transposed", "unwritten", "value"},
    "split-K": {"atomics", "registers", "ring", "rounding", "transposed", "value"},
    "grouped": {"overflow", "registers", "ring", "rounding", "value"},
    "attention": {"atomics", "count", "launch", "registers", "ring"},
    "scale update": {"atomics", "launch", "registers", "ring", "sum", "transposed", "value"},
}


def test_the_old_text_occurs_once_and_the_new_one_differs():
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    for mutant in MUTANTS:
        if mutant.kernel:
            assert f"def {mutant.kernel}(" in texts[mutant.file], mutant
            assert re.compile(mutant.old)
        else:
            assert texts[mutant.file].count(mutant.old) == 1, mutant
        assert mutant.new != mutant.old, mutant
        assert mutant.wrong.endswith("."), mutant
        assert not (mutant.equal and mutant.missed), mutant


def test_every_file_of_kernels_has_mutants_and_every_kind_is_planted_in_every_family_that_has_a_place_for_it():
    assert len(set(MUTANTS)) == len(MUTANTS)
    files = {path.stem for path in (ROOT / "kernels").glob("*.py")} - HOST
    assert {mutant.file for mutant in MUTANTS} == {f"kernels/{name}.py" for name in files}
    planted = Counter((mutant.family, mutant.kind) for mutant in MUTANTS)
    for family in FAMILIES:
        assert {kind for kind in KINDS if not planted[family, kind]} == ABSENT[family]


def test_the_committed_result_is_of_these_mutants_and_none_survived_without_a_reason():
    rows = json.loads(RESULTS.read_text())["mutants"]
    assert [Mutant(*(row[field] for field in Mutant._fields)) for row in rows] == MUTANTS
    for row, mutant in zip(rows, MUTANTS, strict=True):
        ran = [row[way] for way in WAYS if row[way]]
        assert any(outcome["test"] for outcome in ran) != bool(mutant.equal or mutant.missed), mutant.wrong
    assert table(known()) in PAGE.read_text(), "python -m benchmarks.mutants --only nothing"


def test_a_cell_of_the_table_counts_the_bugs_of_one_kind_in_one_family():
    cases = {"Both": (), "Equal": ("same bits",), "Missed": (None, "not modelled")}
    place = ("kernels/split_k.py", "mask")
    both, equal, missed = (Mutant(*place, f"{word}.", "a", "b", *why) for word, why in cases.items())
    none = {"interpreter": SURVIVED, "emulated": None}
    found = {both: {"interpreter": KILLED, "emulated": KILLED}, equal: none, missed: none}
    lines = table(found).split("\n")
    assert next(line for line in lines if line.startswith("| mask")).split("|")[2:-1] == [
        " 3 i1 c1 =1 !1 " if family == "split-K" else "  " for family in FAMILIES
    ]
    assert lines[-2] == "- split-K, mask. Missed. not modelled"


@pytest.mark.slow
def test_a_fork_reads_a_file_again_and_ends_what_takes_too_long():
    mutant = next(each for each in MUTANTS if each.file == "kernels/column_sums.py" and each.kind == "mask")
    card = "tests/emulated/test_emulated_memory.py::test_sums_of_columns_stay_within_their_bound[(3, 7)]"
    code = ["_column_sums_kernel", r"bar\.sync\s+0;", "// no barrier"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), "emulated")
        process: Any = copy._collect(Suite((card,), "sums"))
        process.stdin.write(f"{json.dumps([None, code, 300.0])}\n")
        process.stdin.flush()
        edited = json.loads(process.stdout.readline())
        mutant.plant(copy.root)
        asked = [["fp8engine.kernels.column_sums", None, 300.0], [None, None, 0.01]]
        told, _ = process.communicate("".join(f"{json.dumps(each)}\n" for each in asked))
    wrong, late = (json.loads(line) for line in told.splitlines())
    assert wrong[0].endswith(card.removeprefix("tests/"))
    assert "Unwritten" in edited[1] or "Race" in edited[1]
    assert edited[2] > 0
    assert late is None


def test_a_mutant_is_planted_and_a_text_that_is_not_there_is_named(tmp_path):
    file, kernel = Mutant("kernel.py", "mask", "Off by one.", "<", "<="), tmp_path / "kernel.py"
    kernel.write_text("a < b\n")
    assert file.plant(tmp_path) == "a < b\n"
    assert kernel.read_text() == file._replace(kernel="_kernel").plant(tmp_path) == "a <= b\n"
    with pytest.raises(ValueError, match=r"kernel\.py has 0 times, not once: '>'"):
        file._replace(old=">", new=">=").plant(tmp_path)


def test_a_block_that_is_no_mutant_is_shown(tmp_path):
    (tmp_path / "a.txt").write_text(
        "# kernels/a.py\n\n[mask] Off by one.\n- a\n+ b\n= equal\n\n[ring] No wait.\n~ _kernel: c; d\n+ e\n! unseen\n"
    )
    assert mutants(tmp_path) == [
        Mutant("kernels/a.py", "mask", "Off by one.", "a", "b", "equal"),
        Mutant("kernels/a.py", "ring", "No wait.", "c; d", "e", None, "unseen", "_kernel"),
    ]
    for wrong in ("[mask] Off by one.\n- a\n", "[none] Off by one.\n- a\n+ b\n", "Off by one.\n- a\n+ b\n"):
        (tmp_path / "a.txt").write_text(f"# kernels/a.py\n\n{wrong}")
        with pytest.raises(ValueError, match=r"a.txt: not '\[kind\] a sentence'.*\n.*Off by one.\n- a"):
            mutants(tmp_path)


def test_a_survivor_needs_a_reason_and_a_reason_a_survivor():
    plain = Mutant("a.py", "mask", "Off by one.", "a", "b")
    assert as_expected(plain, {"interpreter": KILLED, "emulated": SURVIVED})
    assert not as_expected(plain, {"interpreter": SURVIVED, "emulated": None})
    for told in (plain._replace(equal="same bits"), plain._replace(missed="not modelled")):
        assert as_expected(told, {"interpreter": None, "emulated": SURVIVED})
        assert not as_expected(told, {"interpreter": SURVIVED, "emulated": KILLED})
