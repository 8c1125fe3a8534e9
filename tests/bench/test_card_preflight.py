"""Preflight of `make gpu`: each lack is planted, found, and named with its remedy; several are named at once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.card import launchers, preflight
from benchmarks.card.preflight import GIB, Places

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
DRIVER = "int cuInit(int flags) {{ return {status}; }} int cuDriverGetVersion(int *it) {{ *it = {version}; return 0; }}"
Plant = Callable[..., None]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "cache", tmp_path / "results", tmp_path / "pack.tar.xz")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Plants a driver: a C library that answers as one."""

    def plant(status: int = 0, version: int = 12080) -> None:
        source, made = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER.format(status=status, version=version))
        subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        monkeypatch.setattr(preflight, "LIBRARY", str(made))
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))

    return plant


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Plants a torch: built for that CUDA, which finds a card or does not."""

    def plant(version: str | None = "12.8", finds: bool = True, free: float = 79.0) -> None:
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: finds)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * GIB), 80 * GIB))

    return plant


@pytest.fixture
def whole(driver: Plant, cuda: Plant) -> None:
    """A machine that lacks nothing."""
    driver()
    cuda()


def named(places: Places, check: str) -> str:
    """What that check alone finds lacking."""
    found = preflight.lacks(places)
    assert list(found) == [check], found
    assert found[check].remedy
    return str(found[check])


def test_a_machine_that_lacks_nothing(whole: None, places: Places):
    assert preflight.lacks(places) == {}


def test_an_old_python(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "OLDEST_PYTHON", (9, 0))
    assert "make gpu PYTHON=" in named(places, "python")


def test_no_driver(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(preflight, "LIBRARY", str(tmp_path / "none.so"))
    assert "no NVIDIA driver" in named(places, "driver")


def test_a_driver_that_finds_no_card(whole: None, driver: Plant, places: Places):
    driver(status=100)
    assert "cuInit: error 100" in (text := named(places, "driver"))
    assert "CUDA_VISIBLE_DEVICES" in text


def test_a_driver_where_triton_does_not_look(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    from triton.backends.nvidia import driver as nvidia

    def libcuda_dirs():
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(nvidia, "libcuda_dirs", libcuda_dirs)
    assert "set TRITON_LIBCUDA_PATH" in named(places, "driver")


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_package_that_is_not_there(package: str, whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    assert f"{sys.executable} has no {package}: make gpu PYTHON=" in named(places, package)


@pytest.mark.parametrize(("package", "version"), [("torch", "2.10.0"), ("triton", "3.5.1"), ("triton", "3.10.0")])
def test_a_version_that_is_not_known(
    package: str, version: str, whole: None, places: Places, monkeypatch: pytest.MonkeyPatch
):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))
    assert f"{package} {version} is not of the versions" in named(places, package)


def test_the_ranges_are_those_of_the_package():
    import tomllib

    about = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    assert "torch>={}.{}".format(*preflight.TORCH[0]) in about["dependencies"]
    (wanted,) = about["optional-dependencies"]["triton"]
    assert wanted.startswith("triton>={}.{},<{}.{};".format(*preflight.TRITON[0], *preflight.TRITON[1]))
    assert about["requires-python"] == ">={}.{}".format(*preflight.OLDEST_PYTHON)


def test_a_torch_for_cpus(whole: None, cuda: Plant, places: Places):
    cuda(version=None, finds=False)
    assert "is built without CUDA: pip install" in named(places, "torch")


def test_a_torch_for_amd(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "AMD" in named(places, "torch")


def test_a_torch_that_is_newer_than_the_driver(whole: None, cuda: Plant, places: Places):
    cuda(version="13.0", finds=False)
    text = named(places, "torch")
    assert "built for CUDA 13.0, and the driver knows CUDA 12.8" in text
    assert "install a newer driver, or a torch for CUDA 12" in text


def test_a_torch_that_does_not_find_the_card(whole: None, cuda: Plant, places: Places):
    cuda(finds=False)
    assert "torch.cuda.init()" in named(places, "torch")


@pytest.mark.parametrize("given", [None, "/nowhere/cc"])
def test_no_compiler(given: str | None, whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    if given:
        monkeypatch.setenv("CC", given)
    text = named(places, "compiler")
    assert (given or "no C compiler") in text
    assert "make gpu-pack" in text


def test_no_headers(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme=None: {"include": str(tmp_path)})
    assert f"no Python.h in {tmp_path}: install the headers" in named(places, "compiler")


def test_a_compiler_that_does_not_compile(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'stdlib.h: No such file or directory' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert "stdlib.h: No such file" in named(places, "compiler")


@pytest.mark.parametrize(
    ("suffix", "triton", "enough"), [(None, (3, 7), True), (None, (3, 6), False), (".cpython-99.so", (3, 7), False)]
)
def test_a_pack_with_a_launcher_needs_no_compiler(
    suffix: str | None,
    triton: tuple[int, int],
    enough: bool,
    whole: None,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    """Its launcher is for this Python, and launches every kernel: Triton 3.6 compiles more."""
    from benchmarks.card import pack

    (tmp_path / "made" / launchers.FOLDER).mkdir(parents=True)
    module = tmp_path / "made" / launchers.FOLDER / f"0{suffix or sysconfig.get_config_var('EXT_SUFFIX')}"
    module.touch()
    pack.write(tmp_path / "made", places.pack, {})
    monkeypatch.setenv("CC", "/nowhere/cc")
    real = preflight._version
    monkeypatch.setattr(preflight, "_version", lambda name: triton if name == "triton" else real(name))
    assert list(preflight.lacks(places)) == ([] if enough else ["compiler"])


def test_a_full_disk(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB // 2))
    assert "0.5 GiB are free at" in (text := named(places, "disk"))
    assert "--cache FOLDER" in text


def test_a_folder_that_cannot_be_written_to(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    assert "cannot be written to" in named(places, "disk")


def test_a_card_that_others_use(whole: None, cuda: Plant, places: Places):
    cuda(free=20.0)
    assert "20.0 of the card's 80.0 GiB are free" in (text := named(places, "memory"))
    assert "nvidia-smi" in text


def test_a_package_that_does_not_import_hides_nothing(whole: None, places: Places, monkeypatch: pytest.MonkeyPatch):
    def broken(places: Places):
        raise ImportError("libcudart.so.12")

    broken.__name__ = "torch"
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(preflight, "CHECKS", tuple(broken if it.__name__ == "torch" else it for it in preflight.CHECKS))
    found = preflight.lacks(places)
    assert list(found) == ["torch", "compiler"]
    assert "libcudart.so.12" in str(found["torch"])


def test_everything_is_named_at_once(places: Places, cuda: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    cuda(version=None, free=1.0)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else real(name, *rest)
    )
    monkeypatch.setattr(preflight, "OLDEST_PYTHON", (9, 0))
    monkeypatch.setattr(preflight, "LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert list(preflight.lacks(places)) == ["python", "driver", "torch", "triton", "compiler", "disk", "memory"]


def test_the_script_names_it_before_anything_runs(tmp_path: Path):
    """On this machine, which has no card and so is not at fault; a compiler is not there either."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--cache", str(tmp_path)]
    environment = os.environ | {"CC": "/nowhere/cc"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["not measured"] * 3
    assert "no NVIDIA driver" in lines[0]
    assert "is built without CUDA" in lines[1]
    assert "/nowhere/cc" in lines[2]
    assert not (tmp_path / "out").exists()
