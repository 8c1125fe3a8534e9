"""`make codegen CHANGED=1`: what is compiled again, what is not, and that the script finds a kernel that got worse."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from benchmarks import codegen
from benchmarks.machine_code import judge, keys, launches
from fp8engine.kernels.tuning import table

CASES = {case.name: case for case in launches.cases()}
CONFIG = table()["matmul_fp8"]["sm_90"]["small"]
NAME = f"matmul_fp8 tensor sm_90 {CONFIG} plain"
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
    """And a source that it does not import is not."""
    folder = tmp_path / "kernels"
    shutil.copytree(keys.KERNELS, folder)
    for source in ("attention", "norm_quantize", "matmul_grouped"):
        (folder / f"{source}.py").write_text("")
    before = keys.of(CASES[NAME])
    for source, (old, new) in (SOURCES if compiled else REST).items():
        keys._sources.cache_clear()
        assert keys.of(CASES[NAME], folder) == before != {}
        text = (path := folder / f"{source}.py").read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        keys._sources.cache_clear()
        assert (keys.of(CASES[NAME], folder) != before) == compiled, source
        path.write_text(text)


def test_what_triton_is_told_the_card_and_the_judgement_are_in_the_key(monkeypatch):
    case = CASES[NAME]
    other = next(c for c in CASES.values() if c.name.startswith("matmul_fp8 tensor sm_89") and c.name.endswith("plain"))
    found = [keys.of(case), keys.of(other), keys.of(CASES[NAME.replace("plain", "fp32")])]
    found.append(keys.of(dataclasses.replace(case, architecture=100)))
    found.append(keys.of(dataclasses.replace(case, wide=("_matmul_kernel",))))
    monkeypatch.setattr(keys, "_judgement", lambda: "another")
    found.append(keys.of(case))
    monkeypatch.undo()
    monkeypatch.setattr(keys.triton, "__version__", "3.6.1")
    found.append(keys.of(case))
    assert len({key for every in found for key in every.values()}) == len(found)


def test_a_stale_key_is_compiled_judged_and_then_written(baseline: Path, capsys):
    """The loop that was half as long fails although nothing else is compiled; a true row with its key is let be."""
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
    capsys.readouterr()
    assert codegen.main(run) == 0
    printed = capsys.readouterr().out
    assert "\n1 of 1 launches not compiled: their keys are the baseline's\n0 kernels compiled" in printed


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
