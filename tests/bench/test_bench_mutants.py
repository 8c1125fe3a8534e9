"""The mutants of the kernels: each can still be planted, and its outcome is in the committed result."""

import json
from collections import Counter

import pytest

from benchmarks.mutants.__main__ import RESULTS, as_expected
from benchmarks.mutants.planted import ROOT, Mutant, mutants
from benchmarks.mutants.trials import WAYS, Outcome

MUTANTS = mutants()
KILLED, SURVIVED = Outcome("tests/a.py::test", "AssertionError", 1.0), Outcome("", "", 1.0)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.wrong)
def test_the_old_text_occurs_once_and_the_new_one_differs(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.wrong.endswith(".")


def test_every_kernel_has_its_number_of_mutants():
    counts = Counter(mutant.file for mutant in MUTANTS)
    assert counts.pop("kernels/scaling.py") >= 22
    assert counts.pop("kernels/produce.py") >= 36
    gluon = [counts.pop(f"kernels/{name}.py") for name in ("gluon_ring", "matmul_gluon", "matmul_gluon_scaled")]
    assert sum(gluon) >= 15
    others = ("matmul_fp8", "matmul_block", "matmul_fp16", "split_k", "epilogue", "activations", "tile")
    assert set(counts) == {f"kernels/{name}.py" for name in others}
    assert counts.total() >= 30
    assert len(set(MUTANTS)) == len(MUTANTS)


def test_the_committed_result_is_of_these_mutants_and_none_survived_without_a_reason():
    rows = json.loads(RESULTS.read_text())["mutants"]
    assert [Mutant(*(row[field] for field in Mutant._fields)) for row in rows] == MUTANTS
    for row, mutant in zip(rows, MUTANTS, strict=True):
        assert any(row[way]["test"] for way in WAYS if row[way]) != bool(mutant.equal), mutant.wrong


def test_a_mutant_is_planted_and_a_text_that_is_not_there_is_named(tmp_path):
    (tmp_path / "kernel.py").write_text("a < b\n")
    assert Mutant("kernel.py", "Off by one.", "<", "<=", None).plant(tmp_path) == "a < b\n"
    assert (tmp_path / "kernel.py").read_text() == "a <= b\n"
    with pytest.raises(ValueError, match=r"kernel\.py has 0 times, not once: '>'"):
        Mutant("kernel.py", "Off by one.", ">", ">=", None).plant(tmp_path)


def test_a_block_that_is_no_mutant_is_shown(tmp_path):
    (tmp_path / "a.txt").write_text("# kernels/a.py\n\nOff by one.\n- a\n+ b\n= equal\n")
    assert mutants(tmp_path) == [Mutant("kernels/a.py", "Off by one.", "a", "b", "equal")]
    (tmp_path / "a.txt").write_text("# kernels/a.py\n\nOff by one.\n- a\n")
    with pytest.raises(ValueError, match=r"a.txt: not a sentence.*\nOff by one.\n- a"):
        mutants(tmp_path)


def test_a_survivor_needs_a_reason_and_a_reason_a_survivor():
    plain, equal = Mutant("a.py", "Off by one.", "a", "b", None), Mutant("a.py", "Off by one.", "a", "b", "same bits")
    assert as_expected(plain, [KILLED, SURVIVED])
    assert not as_expected(plain, [SURVIVED, SURVIVED])
    assert as_expected(equal, [SURVIVED, SURVIVED])
    assert not as_expected(equal, [SURVIVED, KILLED])
