"""Help, version and completion of the command line: shown at once, without torch, in the engine's own words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8engine
from fp8engine import environment
from fp8engine.bench.cases import LISTS
from fp8engine.cli import options
from fp8engine.demo import DEFAULT
from fp8engine.demo.model import SIZES
from fp8engine.export.layout import LAYOUTS
from fp8engine.numerics.recipe import RECIPES

ROOT = Path(fp8engine.__file__).parents[1]
COMMANDS = ("train", "inspect", "compare", "export", "plan", "doctor", "bench")
BENCHES = ("gemm", "linear", "model", "predict")
# What Python runs at its end, in each interpreter that finds this folder: it says whether torch was imported.
TELLS = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"


def started(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """`python -m fp8engine` in a process of its own, which says at its end whether it imported torch."""
    (folder / "sitecustomize.py").write_text(TELLS)
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "fp8engine", *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | more, cwd=folder, capture_output=True, text=True
    )


ASKED = [("--help",), ("-h",), ("--version",), *((name, "--help") for name in COMMANDS)]


@pytest.mark.parametrize("arguments", [*ASKED, *(("bench", name, "--help") for name in BENCHES)], ids=" ".join)
def test_help_and_version_import_no_torch(arguments: tuple[str, ...], tmp_path: Path):
    done = started(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["False"]
    if arguments == ("--version",):
        assert done.stdout == f"fp8engine {fp8engine.__version__}\n"
    else:
        assert "Usage: fp8engine" in done.stdout


def test_completion_names_the_commands_without_torch(tmp_path: Path):
    asked = {"_FP8ENGINE_COMPLETE": "complete_bash", "COMP_WORDS": "fp8engine ", "COMP_CWORD": "1"}
    done = started(tmp_path, **asked)
    assert sorted(done.stdout.split()) == sorted(COMMANDS)
    assert done.stderr.split() == ["False"]


def test_a_command_that_runs_has_the_whole_engine(tmp_path: Path):
    """The module that it calls imports fp8engine as any script does."""
    (tmp_path / "mine.py").write_text(
        "import fp8engine as fe\ndef model(): return fe.Linear(16, 16, recipe='current')\n"
    )
    done = started(tmp_path, "inspect", "mine:model")
    assert "converted already" in done.stdout, done.stderr
    assert done.stderr.split() == ["True"]


def test_what_the_output_cannot_encode_is_a_question_mark(tmp_path: Path):
    (tmp_path / "mine.py").write_text("import torch\ndef model(): return torch.nn.Linear(16, 16)\n")
    done = started(tmp_path, "inspect", "mine:model", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "? Linear ? 16x16 ? 100.0% ? auto" in done.stdout


def test_a_wrong_option_is_refused_without_torch(tmp_path: Path):
    done = started(tmp_path, "train", "--stpes", "3")
    assert done.returncode == 2
    assert "No such option: --stpes" in done.stderr
    assert done.stderr.split()[-1] == "False"


@pytest.mark.parametrize(
    ("orig_argv", "argv", "starts"),
    [
        (["python", "-m", "fp8engine", "train", "--help"], ["-m", "train", "--help"], True),
        (["python", "-X", "dev", "-m", "fp8engine"], ["-m"], True),
        (["python", "/venv/bin/fp8engine", "doctor"], ["/venv/bin/fp8engine", "doctor"], True),
        (["python", "-m", "mine", "fp8engine"], ["-m", "fp8engine"], False),
        (["python", "run.py", "--with", "fp8engine"], ["run.py"], False),  # a script that has cut its arguments off
        (["python", "-c", "from multiprocessing.spawn import spawn_main"], ["/venv/bin/fp8engine", "doctor"], False),
        (["python"], [""], False),
        (["python", "train.py"], [], False),
    ],
)
def test_what_starts_the_command_line(orig_argv, argv, starts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    monkeypatch.setattr(sys, "argv", argv)
    assert not environment.starts_command_line()  # torch is imported already
    monkeypatch.delitem(sys.modules, "torch")
    assert environment.starts_command_line() == starts


def test_the_names_in_the_help_are_the_engines():
    assert tuple(RECIPES) == options.RECIPES
    assert options.TRAINED == DEFAULT
    assert DEFAULT[-1] == "auto"
    assert set(DEFAULT) <= set(RECIPES)
    assert tuple(SIZES) == options.SIZES
    assert tuple(LAYOUTS) == options.LAYOUTS
    assert tuple(LISTS) == options.SHAPES
