"""`make codegen-all`: a baseline for each Triton that users get, and where one is worse than another."""

import re
from pathlib import Path

import pytest
import triton

from benchmarks import codegen, codegen_all
from benchmarks.machine_code import baselines, reasons, versions

ROOT = Path(__file__).parents[2]
COMMITTED = {
    version: baselines.load(baselines.path(version), version)
    for version in baselines.RANGE
    if baselines.path(version).exists()
}


def rows(**changed) -> dict:
    """A baseline of one kernel."""
    return {"kernels": {"k": {"registers": 100, "spills": 0, "ceiling": 90, "programs": 3} | changed}}


def test_development_and_the_oldest_triton_have_baselines():
    for constraints in ("constraints.txt", "constraints-oldest.txt"):
        (version,) = re.findall(r"^triton==(.+)$", (ROOT / constraints).read_text(), re.MULTILINE)
        assert version in COMMITTED
    assert triton.__version__ in COMMITTED, "this environment's"
    assert f"triton=={baselines.DEVELOPED}\n" in (ROOT / "constraints.txt").read_text()


def test_the_range_is_what_pyproject_allows():
    [(first, after)] = set(re.findall(r"triton>=3\.(\d+),<3\.(\d+)", (ROOT / "pyproject.toml").read_text()))
    assert [version.split(".")[1] for version in baselines.RANGE] == [str(n) for n in range(int(first), int(after))]


def test_baselines_are_of_the_same_kernels_and_no_version_is_worse_without_a_reason_that_is_needed():
    names = {version: set(baseline["kernels"]) for version, baseline in COMMITTED.items()}
    assert all(found == names[baselines.DEVELOPED] for found in names.values())
    assert [str(row) for row in versions.worse(COMMITTED) if row.reason() is None] == []
    assert versions.unused(COMMITTED) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"spills": 8}, ["k: Triton b has 8 bytes spilled (100 registers), a has 0"]),
        ({"ceiling": 85}, []),
        ({"ceiling": 84}, ["k: Triton b has 84 % of the Tensor Core's rate (100 registers), a has 90"]),
        ({"programs": 2, "registers": 168}, []),  # registers cost programs, and two of three are enough
        ({"programs": 1, "registers": 255}, ["k: Triton b has 1 programs a multiprocessor (255 registers), a has 3"]),
    ],
)
def test_what_counts_as_worse(changed, words):
    assert [str(row) for row in versions.worse({"a": rows(), "b": rows(**changed)})] == words


@pytest.mark.parametrize(
    ("what", "given", "covered"),
    [
        ("spills", ("3.9.0", "cast row", "spills", 16), True),
        ("spills", ("3.9.0", "cast row", "spills", 24), False),
        ("spills", ("3.8.0", "cast row", "spills", 16), False),
        ("spills", ("3.9.0", "norm row", "spills", 16), False),
        ("spills", ("3.9.0", "cast row", "programs", 16), False),
        ("ceiling", ("3.9.0", "cast row", "ceiling", 16), True),
        ("ceiling", ("3.9.0", "cast row", "ceiling", 15), False),
    ],
)
def test_a_reason_holds_down_to_its_limit_and_for_its_rows_and_versions(what: str, given: tuple, covered: bool):
    assert reasons.Reason(("3.9.0",), "cast *", what, 16, "").covers(*given) == covered


def test_a_triton_without_a_baseline_is_an_error_that_names_the_remedy(tmp_path, monkeypatch, capsys):
    assert codegen.main(["--changed", "--baseline", str(tmp_path / "3.5.0.json")]) == 1
    assert re.search(r"FAILED no baseline of Triton .*make codegen UPDATE=1", capsys.readouterr().out)
    monkeypatch.setattr(codegen.triton, "__version__", "3.5.0")
    assert codegen.main(["--changed", "--baseline", str(baselines.path(baselines.DEVELOPED))]) == 1
    assert "is the baseline of Triton 3.7.1, and this is 3.5.0" in capsys.readouterr().out


def test_a_baseline_that_is_not_there_is_begun_by_an_update(tmp_path):
    new = baselines.load(tmp_path / "3.5.0.json", "3.5.0", new=True)
    assert new == {"triton": "3.5.0", "kernels": {}, "keys": {}}
    baselines.write(tmp_path / "3.5.0.json", "3.5.0", {"k": {"spills": 0}}, {"k": "1", "gone": "2"})
    written = baselines.load(tmp_path / "3.5.0.json", "3.5.0")
    assert written == {"triton": "3.5.0", "kernels": {"k": {"spills": 0}}, "keys": {"k": "1"}}


def test_another_triton_is_first_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    assert codegen_all.with_triton(tmp_path)["PYTHONPATH"] == f"{tmp_path}:before"
    (tmp_path / f"{baselines.DEVELOPED}/triton-{baselines.DEVELOPED}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(codegen_all.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "3.0.0\n"}))
    with pytest.raises(RuntimeError, match=r"was to hold Triton 3.7.1, and 3.0.0 is imported"):
        codegen_all.install(baselines.DEVELOPED, tmp_path)


def test_the_comparison_fails_without_a_reason(monkeypatch, capsys):
    assert not codegen_all.compared(baselines.RANGE)
    monkeypatch.setattr(versions, "worse", lambda found: [versions.Worse("k", "spills", "3.9.0", 8, 0, "3.6.0", 100)])
    assert not codegen_all.compared(["3.6.0"])
    assert codegen_all.compared(["3.6.0", "3.9.0"])
    assert "FAILED k: Triton 3.9.0 has 8 bytes spilled" in capsys.readouterr().out
