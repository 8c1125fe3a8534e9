"""The C module through which Triton talks to the driver, compiled without a card for each Python that has headers here.

Triton compiles its driver.c when the first kernel is launched, with a C compiler and Python.h; from 3.7 on that module
launches every kernel.  Triton 3.6 compiles one more for each signature: those are not carried.

    make    keeps the module for each Python, in a folder of the cache      make gpu-pack
    use     takes the one that fits, and compiles where none does           make gpu

A module is known by the hash of its source and by the suffix of the Python that loads it.  Triton's own key is not
used: from 3.8 on it depends on where Triton is installed.  The linker asks for a libcuda.so.1, whose functions nobody
calls here: an empty library of that name serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from triton import knobs
from triton.runtime import build

FOLDER = "launchers"  # of the cache and of the pack
LIBRARY = "libcuda.so.1"
PYTHONS = tuple(f"python3.{minor}" for minor in range(11, 15))
ASK = (
    "import json, sysconfig as it; print(json.dumps([it.get_config_var('EXT_SUFFIX'), it.get_config_var('INCLUDEPY')]))"
)


class Kept(Exception):
    """The module was compiled, and is not to be loaded here."""


class Headers(NamedTuple):
    """suffix: of the modules of a Python.  folder: of its Python.h."""

    suffix: str
    folder: Path


def use(cache: Path) -> None:
    """Let this process take Triton's module from the cache's folder."""
    knobs.build.impl = functools.partial(_given, cache / FOLDER)  # pyright: ignore[reportAttributeAccessIssue]


def make(cache: Path) -> list[str]:
    """Compile the module for every Python; the suffixes of those that it was compiled for."""
    cc, folder = compiler(), cache / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of another Triton
    if cc is None:
        return []
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as stub:
        empty = ["-shared", f"-Wl,-soname,{LIBRARY}", "-x", "c", os.devnull, "-o", str(Path(stub, LIBRARY))]
        if subprocess.run([cc, *empty]).returncode:
            return []
        with knobs.build.scope(), knobs.nvidia.scope(), knobs.cache.scope():
            knobs.nvidia.libcuda_path = stub  # where Triton looks for it
            knobs.cache.dir = stub  # without the one that Triton may have compiled before
            knobs.build.impl = functools.partial(_kept, cc, folder, stub)  # pyright: ignore[reportAttributeAccessIssue]
            with contextlib.suppress(Kept):
                importlib.import_module("triton.backends.nvidia.driver").CudaUtils()
    return sorted(suffix(path) for path in folder.iterdir())


def compiler() -> str | None:
    """The C compiler that Triton takes, None where it finds none."""
    return shutil.which(os.environ.get("CC") or "gcc") or (None if os.environ.get("CC") else shutil.which("clang"))


def headers() -> list[Headers]:
    """Of this Python and of others on PATH."""
    found = [[sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_config_var("INCLUDEPY")]]
    for name in PYTHONS:
        if (program := shutil.which(name)) and program != sys.executable:
            asked = subprocess.run([program, "-c", ASK], capture_output=True, text=True)
            found += [json.loads(asked.stdout)] if asked.returncode == 0 else []  # pyenv's stand-ins fail
    return list({suffix: Headers(suffix, Path(folder)) for suffix, folder in reversed(found)}.values())


def _kept(cc: str, folder: Path, stub: str, name: str, source: str, where: str, libraries, include, linked) -> str:
    """Triton's request for a module, compiled for each Python and kept."""
    linking = ["-Wl,--no-as-needed", f"-L{stub}", *(f"-l:{library}" for library in linked)]
    for python in headers():
        if (python.folder / "Python.h").exists():
            made = Path(where, f"{name}{python.suffix}")
            places = [f"-I{place}" for place in (*include, where, python.folder)]
            command = [cc, source, "-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(made), *linking, *places]
            if subprocess.run(command).returncode == 0:
                shutil.move(made, folder / _name(source, python.suffix))
    raise Kept


def _given(folder: Path, name: str, source: str, where: str, *rest) -> str:
    """Triton's request for a module: the one that was carried, where it can be loaded, else a new one."""
    carried = folder / _name(source, str(sysconfig.get_config_var("EXT_SUFFIX")))
    if carried.exists():
        try:
            ctypes.CDLL(str(carried))
            return str(carried)
        except OSError as error:  # of an older C library
            print(f"the pack's launcher does not fit: {error}", file=sys.stderr)
    with knobs.build.scope():
        knobs.build.impl = None
        return build._build(name, source, where, *rest, [])


def _name(source: str, suffix: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()[:32] + suffix


def suffix(path: Path) -> str:
    """Of the Python that loads a module."""
    return path.name[path.name.index(".") :]
