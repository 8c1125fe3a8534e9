"""`fp8engine bench` as a person and a script call it, and the benchmark script from a bare checkout."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused, shown, told

import fp8engine
from fp8engine.bench import gemm, harness
from fp8engine.bench.harness import Limits
from fp8engine.cli import bench


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU, whose limits are not measured here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(harness, "limits", lambda where, ticks: Limits(1e12, 1e10))


@pytest.mark.parametrize("command", ["gemm", "linear"])
def test_json_holds_everything_and_a_person_gets_a_line_for_each_row(command: str, tmp_path: Path):
    words = ("bench", command, "--shapes", "64,64,64;32,48,64")
    printed = told(*words, "--out", tmp_path / "found.json")
    assert printed == json.loads((tmp_path / "found.json").read_text())
    assert {tuple(row["shape"]) for row in printed["rows"]} == {(64, 64, 64), (32, 48, 64)}
    assert all(row["correct"] is True and row["seconds"] > 0 for row in printed["rows"]), printed["rows"]
    text = shown(*words)
    assert all(row["name"] in text for row in printed["rows"])
    if command == "gemm":
        assert printed["what"].startswith("CPU: FP8 emulated")
        assert all(row["emulated"] == ("fp8" in row["name"]) for row in printed["rows"])
        assert printed["summary"]["triton fp8 tensor fast"]["note"] == "not measured"
        for part in ("64x64x64", "reference fp8 block (emulated)", "TFLOP/s", "fast: not measured", "10 GB/s"):
            assert part in text, part


def test_a_line_shows_no_number_for_what_is_wrong(capsys: pytest.CaptureFixture[str]):
    about = {"shape": [1, 1, 1], "emulated": False, "error": 0.5}
    rows: list[dict] = [
        about | {"name": "bad", "correct": False, "why": "wrong"},
        about | {"name": "not", "correct": None, "why": "LookupError: no [sm_89]"},
    ]
    machine = {"card": None, "cpu": "a CPU", "torch": "2"}
    limits = {"matmul_16_bits_tflops": 1.0, "copy_gb_per_s": 1.0}
    summary = {"other": gemm.mean(rows, "bad"), "triton 16 bits": {"geometric_mean": 1.25, "minimum": math.pi}}
    bench.tell({"machine": machine, "what": "", "limits": limits, "rows": rows, "summary": summary})
    text = capsys.readouterr().out
    for part in ("5.0e-01", "wrong at 1 of 1 shapes", "no [sm_89]", "geometric mean 1.250, least 3.142"):
        assert part in text, part


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("gemm", "--shapes", "64,64"), "'64,64' is not M,N,K"),
        (("gemm", "--shapes", "squares"), "did you mean 'square'"),
        (("linear", "--shapes", "7"), "unknown list of shapes '7'"),
        (("gemm", "--shapes", "8,8,8", "--device", "cuda:77"), "device 'cuda:77' cannot be used"),
        (("gemm", "--shapes", "8,8,8", "--device", "gpu"), "device 'gpu' cannot be used"),
        (("gemm", "--shapes", "8,8,8", "--device", "meta"), "device 'meta' cannot be used: want 'cuda' or 'cpu'"),
        (("linear", "--device", "meta"), "device 'meta' cannot be used"),
        (("model", "--device", "meta"), "device 'meta' cannot be used"),
        (("gemm", "--shapes", "8,8,8", "--out", "/no/such/folder/x.json"), "cannot write"),
    ],
)
def test_what_it_refuses(arguments: tuple, why: str):
    refused(why, "bench", *arguments)


ROOT = str(Path(fp8engine.__file__).parents[1])
WITHOUT = f"""
import sys
for name in ("rich", "typer", "safetensors", "triton", "pytest"):
    sys.modules[name] = None
import warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {ROOT!r})
from fp8engine.bench import cases, gemm, harness, linear, predict, steps, timing
import torch
ticks = harness.Timer(timing.WallClock(), 2)
result = gemm.gemm([cases.Shape(16, 16, 16)], torch.device("cpu"), None, ticks, harness.Limits(1.0, 1.0))
from fp8engine.ops import device
without = [] if device.cpu_scales_rows() else ["torch fp8 row"]  # torch 2.11's CPU
print([row["name"] for row in result["rows"] if not row["correct"]] == without, len(result["rows"]))
"""


def test_a_machine_without_rich_typer_and_triton_can_run_it(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "7"]
