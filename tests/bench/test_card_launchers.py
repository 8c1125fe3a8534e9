"""Triton's launcher, compiled without a card and carried to a machine without a compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from triton.backends import nvidia

from benchmarks.card import launchers, pack

ROOT = Path(__file__).parents[2]
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
LOAD = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.card import launchers
launchers.use(Path(sys.argv[1]))
from triton.backends.nvidia.driver import CudaUtils
print("loaded", callable(CudaUtils().load_binary))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the launcher."""
    folder = tmp_path_factory.mktemp("cache")
    assert SUFFIX in launchers.make(folder)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver's library that has every function which Triton's C code names."""
    folder = tmp_path_factory.mktemp("driver")
    names = set(re.findall(r"\bcu[A-Z]\w+(?=\()", Path(nvidia.__path__[0], "driver.c").read_text()))
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
    made = ["-o", str(folder / launchers.LIBRARY), f"-Wl,-soname,{launchers.LIBRARY}"]
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-w", "-x", "c", "-", *made]
    subprocess.run(command, input=code, text=True, check=True)
    return folder


def loaded(cache: Path, driver: Path, tmp_path: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """A process that asks Triton for its launcher, with a cache of Triton's that is empty."""
    paths = {"TRITON_LIBCUDA_PATH": str(driver), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment = os.environ | {"CC": compiler, "LD_LIBRARY_PATH": str(driver), **paths}
    return subprocess.run([sys.executable, "-c", LOAD, str(cache)], capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.short
def test_a_machine_without_a_compiler_loads_what_was_carried(cache: Path, driver: Path, tmp_path: Path):
    pack.write(cache, tmp_path / "pack.tar.xz", {})
    there = tmp_path / "there"
    assert pack.unpack(tmp_path / "pack.tar.xz", there)["launchers"] == launchers.make(cache)
    done = loaded(there, driver, tmp_path, "/nowhere/cc")
    assert done.stdout == "loaded True\n", done.stderr
    assert "/nowhere/cc" in loaded(tmp_path / "empty", driver, tmp_path / "other", "/nowhere/cc").stderr


@pytest.mark.slow
def test_what_does_not_load_is_compiled_anew(cache: Path, driver: Path, tmp_path: Path):
    (module,) = (cache / launchers.FOLDER).glob(f"*{SUFFIX}")
    (tmp_path / launchers.FOLDER).mkdir()
    (tmp_path / launchers.FOLDER / module.name).write_bytes(b"\x7fELF of another C library")
    done = loaded(tmp_path, driver, tmp_path, "gcc")
    assert done.stdout == "loaded True\n", done.stderr
    assert "the pack's launcher does not fit" in done.stderr


def test_other_pythons_on_the_path_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    answer = json.dumps([".cpython-399.so", str(tmp_path)])
    for name, lines in (("python3.12", f"echo '{answer}'"), ("python3.13", "exit 127")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {python.suffix: python.folder for python in launchers.headers()}
    assert found == {".cpython-399.so": tmp_path, SUFFIX: Path(str(sysconfig.get_config_var("INCLUDEPY")))}


def test_without_a_compiler_nothing_is_carried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert launchers.make(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
