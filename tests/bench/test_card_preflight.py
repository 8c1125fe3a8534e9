"""Preflight of `make gpu`: each lack is planted, found, and named with its remedy; several are named at once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver as nvidia

from benchmarks.card import launchers, pack, preflight
from benchmarks.card.preflight import GIB, Places

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
DRIVER = "int cuInit(int flags) {{ return {status}; }} int cuDriverGetVersion(int *it) {{ *it = 12080; return 0; }}"


class Machine:
    """A machine that lacks nothing; its methods plant a lack."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path):
        self.patch, self.folder, self.set = patch, folder, patch.setattr
        self.places = Places(folder / "cache", folder / "results", folder / "pack.tar.xz")
        self.driver()
        self.cuda()

    def driver(self, status: int = 0) -> None:
        """A driver: a C library that answers as one."""
        made = self.folder / "libcuda.so.1"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
        subprocess.run(command, input=DRIVER.format(status=status), text=True, check=True)
        self.set(preflight, "LIBRARY", str(made))
        self.patch.setenv("TRITON_LIBCUDA_PATH", str(self.folder))

    def cuda(self, version: str | None = "12.8", finds: bool = True, free: float = 79.0) -> None:
        """A torch: built for that CUDA, which finds a card or does not."""
        self.set(torch.version, "cuda", version)
        self.set(torch.cuda, "is_available", lambda: finds)
        self.set(torch.cuda, "mem_get_info", lambda: (int(free * GIB), 80 * GIB))

    def instead(self, module: Any, function: str, package: str, answer: Any) -> None:
        """A function of importlib that answers so for that package."""
        real = getattr(module, function)
        self.set(module, function, lambda name, *rest: answer if name == package else real(name, *rest))

    def without(self, package: str) -> None:
        self.instead(importlib.util, "find_spec", package, None)

    def version(self, package: str, version: str) -> None:
        self.instead(importlib.metadata, "version", package, version)

    def hidden_driver(self) -> None:
        def libcuda_dirs():
            raise AssertionError("libcuda.so cannot found!")

        self.set(nvidia, "libcuda_dirs", libcuda_dirs)

    def compiler(self, path: str = "") -> None:
        """Only that one; "": none."""
        self.patch.setenv("PATH", "/nowhere")
        self.patch.setenv("CC", path)

    def broken_compiler(self) -> None:
        broken = self.folder / "cc"
        broken.write_text("#!/bin/sh\necho 'stdlib.h: No such file or directory' >&2\nexit 1\n")
        broken.chmod(0o755)
        self.patch.setenv("CC", str(broken))

    def disk(self, free: int) -> None:
        self.set(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    def read_only(self) -> None:
        real = os.access
        self.set(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


# What is planted, the check that finds it, and what is told.
LACKS: dict[str, tuple[Callable[[Machine], None], str, tuple[str, ...]]] = {
    "an old Python": (lambda it: it.set(preflight, "OLDEST_PYTHON", (9, 0)), "python", ("make gpu PYTHON=",)),
    "no driver": (lambda it: it.set(preflight, "LIBRARY", "/nowhere/none.so"), "driver", ("no NVIDIA driver",)),
    "a driver that finds no card": (
        lambda it: it.driver(status=100), "driver", ("cuInit: error 100", "CUDA_VISIBLE_DEVICES")),
    "a driver where Triton does not look": (Machine.hidden_driver, "driver", ("set TRITON_LIBCUDA_PATH",)),
    "no torch": (lambda it: it.without("torch"), "torch", (f"{sys.executable} has no torch: make gpu PYTHON=",)),
    "no Triton": (lambda it: it.without("triton"), "triton", (f"{sys.executable} has no triton: make gpu PYTHON=",)),
    "an old torch": (lambda it: it.version("torch", "2.10.0"), "torch", ("torch 2.10.0 is not of the versions",)),
    "an old Triton": (lambda it: it.version("triton", "3.5.1"), "triton", ("triton 3.5.1 is not of the versions",)),
    "a new Triton": (lambda it: it.version("triton", "3.10.0"), "triton", ("triton 3.10.0 is not of the versions",)),
    "a torch for CPUs": (
        lambda it: it.cuda(version=None, finds=False), "torch", ("is built without CUDA: pip install",)),
    "a torch for AMD": (lambda it: it.set(torch.version, "hip", "6.3"), "torch", ("AMD",)),
    "a torch that is newer than the driver": (
        lambda it: it.cuda(version="13.0", finds=False), "torch",
        ("built for CUDA 13.0, and the driver knows CUDA 12.8", "install a newer driver, or a torch for CUDA 12")),
    "a torch that does not find the card": (lambda it: it.cuda(finds=False), "torch", ("torch.cuda.init()",)),
    "no compiler": (lambda it: it.compiler(), "compiler", ("no C compiler", "make gpu-pack")),
    "a compiler that is not there": (
        lambda it: it.compiler("/nowhere/cc"), "compiler", ("/nowhere/cc", "make gpu-pack")),
    "no headers": (
        lambda it: it.set(sysconfig, "get_paths", lambda scheme=None: {"include": "/nowhere"}), "compiler",
        ("no Python.h in /nowhere: install the headers",)),
    "a compiler that does not compile": (Machine.broken_compiler, "compiler", ("stdlib.h: No such file",)),
    "a full disk": (lambda it: it.disk(GIB // 2), "disk", ("0.5 GiB are free at", "--cache FOLDER")),
    "a folder that cannot be written to": (Machine.read_only, "disk", ("cannot be written to",)),
    "a card that others use": (
        lambda it: it.cuda(free=20.0), "memory", ("20.0 of the card's 80.0 GiB are free", "nvidia-smi")),
}  # fmt: skip


@pytest.mark.parametrize("lack", LACKS)
def test_a_lack_is_named_with_its_remedy(lack: str, machine: Machine):
    plant, check, told = LACKS[lack]
    plant(machine)
    found = preflight.lacks(machine.places)
    assert list(found) == [check], found
    assert found[check].remedy
    assert all(text in str(found[check]) for text in told), found


def test_the_ranges_are_those_of_the_package():
    about = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    assert "torch>={}.{}".format(*preflight.TORCH[0]) in about["dependencies"]
    (wanted,) = about["optional-dependencies"]["triton"]
    assert wanted.startswith("triton>={}.{},<{}.{};".format(*preflight.TRITON[0], *preflight.TRITON[1]))
    assert about["requires-python"] == ">={}.{}".format(*preflight.OLDEST_PYTHON)


SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


@pytest.mark.parametrize(
    ("suffix", "triton", "lacks"),
    [(SUFFIX, (3, 7), []), (SUFFIX, (3, 6), ["compiler"]), (".cpython-99.so", (3, 7), ["compiler"])],
)
def test_a_pack_with_a_launcher_needs_no_compiler(suffix: str, triton: tuple, lacks: list[str], machine: Machine):
    """Its launcher is for this Python, and launches every kernel: Triton 3.6 compiles more."""
    assert preflight.lacks(machine.places) == {}, "a machine that lacks nothing"
    folder = machine.folder / "made" / launchers.FOLDER
    folder.mkdir(parents=True)
    (folder / f"0{suffix}").touch()
    pack.write(folder.parent, machine.places.pack, {})
    machine.compiler("/nowhere/cc")
    machine.instead(preflight, "_version", "triton", triton)
    assert list(preflight.lacks(machine.places)) == lacks


def test_a_package_that_does_not_import_hides_nothing(machine: Machine):
    def torch(places: Places):
        raise ImportError("libcudart.so.12")

    machine.compiler("/nowhere/cc")
    machine.set(preflight, "CHECKS", tuple(torch if it.__name__ == "torch" else it for it in preflight.CHECKS))
    found = preflight.lacks(machine.places)
    assert list(found) == ["torch", "compiler"]
    assert "libcudart.so.12" in str(found["torch"])


def test_everything_is_named_at_once(machine: Machine):
    machine.cuda(version=None, free=1.0)
    machine.without("triton")
    machine.disk(0)
    for name in ("an old Python", "no driver", "a compiler that is not there"):
        LACKS[name][0](machine)
    assert [*preflight.lacks(machine.places)] == ["python", "driver", "torch", "triton", "compiler", "disk", "memory"]


def test_the_script_names_it_before_anything_runs(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--cache", str(tmp_path)]
    environment = os.environ | {"CC": "/nowhere/cc"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    why = ["no NVIDIA driver", *([] if torch.version.cuda else ["is built without CUDA"]), "/nowhere/cc"]
    for words, line in zip(why, done.stdout.splitlines(), strict=True):
        assert line.startswith("not measured: ")
        assert words in line
    assert not (tmp_path / "out").exists()
