"""benchmarks/gpu.py without a card: what it says and keeps, and that a check which fails or never ran is no pass."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fp8engine.bench.harness import Limits
from fp8engine.ops import device

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
WITHOUT_CARD = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """The script as a module, on a pretended card."""
    spec = importlib.util.spec_from_file_location("gpu_script", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    monkeypatch.setattr(module.checks, "card_checks", lambda where: [])
    return module


def test_without_a_card_nothing_is_claimed():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")], capture_output=True, text=True, cwd="/"
    )
    if torch.cuda.is_available():
        pytest.fail("this test is about a machine without a card; deselect it on one")
    assert (done.returncode, done.stdout) == (0, "not measured: torch finds no CUDA device on this machine\n")


def test_a_bare_checkout_is_enough():
    # No site-packages of ours on the path but torch's and Triton's: the script finds the library beside itself.
    code = (
        "import sys, runpy\n"
        "blocked = {'rich', 'typer', 'safetensors', 'pytest', 'hypothesis', 'ml_dtypes', 'torchao', 'transformers'}\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'gpu.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=WITHOUT_CARD)
    assert done.stdout == "not measured: torch finds no CUDA device on this machine\n", done.stderr


def test_what_fails_is_listed_and_what_crashes_does_not_hide_the_rest(script, monkeypatch, capsys):
    def crash():
        raise RuntimeError("out of resources")

    every = [("fine", lambda: None), ("wrong", lambda: "3 of 9 elements"), ("crashes", crash), ("last", lambda: None)]
    monkeypatch.setattr(script.checks, "checks", lambda where, more: every)
    failed = script._check(CPU, time.perf_counter() + 60)
    assert failed == ["wrong: 3 of 9 elements", "crashes: RuntimeError: out of resources"]
    out = capsys.readouterr().out
    assert "last: ok" in out
    assert "2 checks passed, 2 failed, 0 not reached in time" in out


def test_a_check_that_was_not_reached_is_no_pass(script, monkeypatch):
    monkeypatch.setattr(script.checks, "checks", lambda where, more: [("late", lambda: None)] * 3)
    assert script._check(CPU, time.perf_counter() - 1) == ["3 checks were not reached in time"]


def test_every_shape_is_saved_before_the_next_begins(script, monkeypatch, tmp_path: Path, capsys):
    seen = []

    def gemm(shapes, where, limits=None):
        seen.append((shapes, limits))
        if len(seen) == 3:
            raise KeyboardInterrupt
        row = {"name": "triton fp8 tensor fast", "shape": list(shapes[0]), "correct": None, "why": "fake"}
        return {"limits": {"matmul_16_bits_tflops": 700.0, "copy_gb_per_s": 4000.0}, "rows": [row]}

    monkeypatch.setattr(script.gemm, "gemm", gemm)
    machine = {"date": "2026-01-02", "card": "NVIDIA H200"}
    with pytest.raises(KeyboardInterrupt):
        script._bench(CPU, tmp_path, machine, time.perf_counter() + 600)
    result = json.loads((tmp_path / "2026-01-02-gemm.json").read_text())
    assert [row["shape"] for row in result["rows"]] == [list(shapes[0]) for shapes, _ in seen[:2]]
    assert [limits for _, limits in seen] == [None] + [Limits(700e12, 4000e9)] * 2  # measured once
    assert "triton fp8 tensor fast" in result["summary"]
    assert script._slug("NVIDIA H200") == "nvidia-h200"


def test_casts_and_layers_are_measured_and_saved(script, monkeypatch, tmp_path: Path, capsys):
    measured = ("casts", "linear", "steps", "generate")
    for name, module in ((name, getattr(script, name)) for name in measured):
        row = {"name": name, "shape": [1], "network": "n", "size": "s", "case": "c", "correct": None, "why": "fake"}
        monkeypatch.setattr(module, name, lambda shapes, where, row=row: {"machine": {}, "rows": [row]})
    script._layers(CPU, tmp_path, {"date": "d"}, time.perf_counter() + 600)
    for what, name, shapes in (("quantize", "casts", script.casts.SHAPES), ("linear", "linear", script.linear.SHAPES)):
        rows = json.loads((tmp_path / f"d-{what}.json").read_text())["rows"]
        assert [row["name"] for row in rows] == [name] * len(shapes["cuda"])
    script._layers(CPU, tmp_path, {"date": "late"}, time.perf_counter())
    assert "out of time: linear" in capsys.readouterr().out
    assert not list(tmp_path.glob("late*"))


def test_out_of_time_is_said(script, tmp_path: Path, capsys):
    script._bench(CPU, tmp_path, {"date": "d"}, time.perf_counter())
    assert "out of time" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
