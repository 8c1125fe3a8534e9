"""`make codegen CHANGED=1` and `make codegen-all`: what is compiled again, what got worse, baselines of each Triton."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import triton

from benchmarks import codegen, codegen_all
from benchmarks.machine_code import baselines, judge, keys, launches, reasons, versions
from fp8engine.kernels.tuning import table

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in launches.cases()}
NAME = f"matmul_fp8 tensor sm_90 {table()['matmul_fp8']['sm_90']['small']} plain"
# What a launch's key has to depend on: kernels/matmul.py imports epilogue.py, which imports rounding.py.
SOURCES = {
    "matmul": ("tl.dot(a_MK, b_NK.T, acc_MN)", "tl.dot(a_MK, b_NK.T, acc_MN + 0)"),
    "epilogue": ("SATURATES = Constant(1 + 2.0**-22)", "SATURATES = Constant(1 + 2.0**-23)"),  # a constant
    "rounding": ("def saturating_cast(", "def saturating_cast(_, "),
    "tile": ("import triton.language as tl", "import triton.language.core as tl"),
}
# What machine code cannot depend on: comments, how a signature is laid out, docstrings, what runs on the host.
REST = {
    "matmul": ("def matmul_fp8(\n", "def more():\n    return 0\n\n\ndef matmul_fp8(\n"),
    "epilogue": ('"""Finish a tile of sums', '"""End a tile of sums'),
    "rounding": ("import triton\n", "import triton  # the compiler\n"),
    "tile": ("def place_of(tile, M, N, ", "def place_of(\n    tile, M,\n    N, "),
    "launch": ("PIECE = 16", "PIECE = 32"),
}
COMMITTED = {
    version: baselines.load(baselines.path(version), version)
    for version in baselines.RANGE
    if baselines.path(version).exists()
}


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """A copy of the committed one, to be spoilt."""
    return Path(shutil.copy(codegen.BASELINE, tmp_path))


def spoilt(path: Path, **values) -> dict:
    """The baseline with another key of NAME, and with other values in its row."""
    content = json.loads(path.read_text())
    content["kernels"][NAME].update(values)
    content["keys"][NAME] = "stale"
    path.write_text(json.dumps(content))
    return content


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_compiled_of_a_source_that_a_kernel_imports_at_any_remove_is_in_its_key(compiled: bool, tmp_path: Path):
    folder = tmp_path / "kernels"
    shutil.copytree(keys.KERNELS, folder)
    for source in ("attention", "norm_quantize", "matmul_grouped"):
        (folder / f"{source}.py").write_text("")
    before = keys.of(CASES[NAME])
    assert keys.of(CASES[NAME], folder) == before != {}
    for source, (old, new) in (SOURCES if compiled else REST).items():
        text = (path := folder / f"{source}.py").read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        keys._sources.cache_clear()
        assert (keys.of(CASES[NAME], folder) != before) == compiled, source
        path.write_text(text)


def test_what_triton_is_told_the_card_and_the_judgement_are_in_the_key(monkeypatch):
    case = CASES[NAME]
    other = next(c for c in CASES.values() if c.name.startswith("matmul_fp8 tensor sm_89") and c.name.endswith("plain"))
    changed = [dataclasses.replace(case, architecture=100), dataclasses.replace(case, wide=("_matmul_kernel",))]
    found = [keys.of(each) for each in (case, other, CASES[NAME.replace("plain", "fp32")], *changed)]
    monkeypatch.setattr(keys, "_judgement", lambda: "another")
    found.append(keys.of(case))
    monkeypatch.undo()
    monkeypatch.setattr(keys.triton, "__version__", "3.6.1")
    found.append(keys.of(case))
    assert len({key for every in found for key in every.values()}) == len(found)


def test_a_stale_key_is_compiled_judged_and_then_written(baseline: Path, capsys):
    loop = json.loads(baseline.read_text())["kernels"][NAME]["loop"]
    before = spoilt(baseline, loop=loop // 2)
    run = ["--jobs", "1", "--only", NAME, "--baseline", str(baseline), "--changed"]
    assert codegen.main(run) == 1
    printed = capsys.readouterr().out
    assert f"FAILED {NAME}: main loop of " in printed
    assert "QGMMA.64x128x32" in printed
    assert "\n0 of 1 launches not compiled: their keys are the baseline's\n1 kernels compiled" in printed
    assert codegen.main([*run, "--update"]) == 0
    written = json.loads(baseline.read_text())
    assert written["kernels"].pop(NAME)["loop"] > before["kernels"].pop(NAME)["loop"]
    assert written["keys"].pop(NAME) == keys.of(CASES[NAME])[NAME] != before["keys"].pop(NAME)
    assert written == before  # what was not compiled stays
    assert codegen.main(run) == 0
    assert "\n1 of 1 launches not compiled: their keys are the baseline's\n0 kernels" in capsys.readouterr().out


def test_a_kernel_with_a_fault_gets_no_key(baseline: Path, monkeypatch):
    """Written with one, it would not be compiled again, and nobody would hear of its fault."""
    content = json.loads(baseline.read_text())
    spills = judge.Row(NAME, 255, 8, 0, 1, 90, 4, "QGMMA.64x128x32", 1, 1, 100, 1, (), (), False, 90, True)
    monkeypatch.setattr(judge, "compile_case", lambda case: [spills])
    run = ["--jobs", "1", "--only", NAME, "--baseline", str(baseline)]
    assert codegen.main([*run, "--update"]) == 1
    del content["keys"][NAME]
    assert json.loads(baseline.read_text())["keys"] == content["keys"]
    assert codegen.main([*run, "--changed"]) == 1


def test_keys_alone_are_written_without_a_compiler(baseline: Path, monkeypatch):
    before = spoilt(baseline)
    monkeypatch.setattr(judge, "compile_case", lambda case: pytest.fail("compiled"))
    assert codegen.main(["--keys", "--only", NAME, "--baseline", str(baseline)]) == 0
    before["keys"][NAME] = keys.of(CASES[NAME])[NAME]
    assert json.loads(baseline.read_text()) == before


def test_development_the_oldest_triton_and_this_one_have_baselines_of_the_range_that_pyproject_allows():
    for constraints in ("constraints.txt", "constraints-oldest.txt"):
        (version,) = re.findall(r"^triton==(.+)$", (ROOT / constraints).read_text(), re.MULTILINE)
        assert version in COMMITTED
    assert triton.__version__ in COMMITTED
    assert f"triton=={baselines.DEVELOPED}\n" in (ROOT / "constraints.txt").read_text()
    [(first, after)] = set(re.findall(r"triton>=3\.(\d+),<3\.(\d+)", (ROOT / "pyproject.toml").read_text()))
    assert [version.split(".")[1] for version in baselines.RANGE] == [str(n) for n in range(int(first), int(after))]


def test_baselines_are_of_the_same_kernels_and_no_version_is_worse_without_a_reason_that_is_needed():
    assert len({frozenset(baseline["kernels"]) for baseline in COMMITTED.values()}) == 1
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
    row = {"registers": 100, "spills": 0, "ceiling": 90, "programs": 3}
    found = {"a": {"kernels": {"k": row}}, "b": {"kernels": {"k": row | changed}}}
    assert [str(row) for row in versions.worse(found)] == words


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
    file = tmp_path / "3.5.0.json"
    assert codegen.main(["--changed", "--baseline", str(file)]) == 1
    assert re.search(r"FAILED no baseline of Triton .*make codegen UPDATE=1", capsys.readouterr().out)
    monkeypatch.setattr(codegen.triton, "__version__", "3.5.0")
    assert codegen.main(["--changed", "--baseline", str(baselines.path(baselines.DEVELOPED))]) == 1
    assert "is the baseline of Triton 3.7.1, and this is 3.5.0" in capsys.readouterr().out
    assert baselines.load(file, "3.5.0", new=True) == {"triton": "3.5.0", "kernels": {}, "keys": {}}
    baselines.write(file, "3.5.0", {"k": {"spills": 0}}, {"k": "1", "gone": "2"})
    assert baselines.load(file, "3.5.0") == {"triton": "3.5.0", "kernels": {"k": {"spills": 0}}, "keys": {"k": "1"}}


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
