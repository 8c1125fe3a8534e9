"""What a run needs and this machine lacks, each with its remedy: all of it at once, before anything runs.

    python, driver, torch, Triton      their versions, and that they fit each other
    compiler                           Triton builds its launcher with it and with Python.h, unless the pack carries one
    disk, memory                       of the caches' folders and of the card

Each check returns what is lacking and its remedy, or None; it imports what it asks about, and nothing at import.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

OLDEST_PYTHON = (3, 11)
TORCH = (2, 11), (99, 0)  # from, and below: pyproject.toml, where torch has no end
TRITON = (3, 6), (3, 10)
ONE_LAUNCHER = (3, 7)  # from this Triton on one module launches every kernel: the pack's is enough
GIB = 1 << 30
CACHE, TEMPORARY, RESULTS = 2 * GIB, GIB, GIB // 16  # free bytes: kernels of the whole plan, Inductor's files, lines
FREE = 0.8  # of the card's memory; a card that others use gives wrong times as well
HANGS = 60.0  # seconds after which a driver that does not answer ends the run, and the stack is printed
LIBRARY = "libcuda.so.1"
CONTAINER = "in a container, start it with `--gpus all`"
WHEEL = "pip install 'torch>=2.11'"


class Lack(NamedTuple):
    """What is missing or does not fit, and what mends it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


class Places(NamedTuple):
    """Folders that the run writes to, and the pack that it may take kernels and launchers from."""

    cache: Path
    results: Path
    pack: Path


def python(places: Places) -> Lack | None:
    """Its version."""
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return None
    return Lack(f"Python {sys.version.split()[0]} is older than 3.11", "make gpu PYTHON=... names a newer one")


def driver(places: Places) -> Lack | None:
    """NVIDIA's driver: that it is there, answers, finds a card, and is where Triton looks for it."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return Lack(f"no NVIDIA driver ({error})", f"install it, see that nvidia-smi runs; {CONTAINER}")
    if status := cuda.cuInit(0):
        return Lack(
            f"the NVIDIA driver finds no card to use (cuInit: error {status})",
            f"see that nvidia-smi lists a card and that CUDA_VISIBLE_DEVICES is not empty; {CONTAINER}; "
            "after an update of the driver restart the machine",
        )
    if importlib.util.find_spec("triton") is not None:
        try:
            importlib.import_module("triton.backends.nvidia.driver").libcuda_dirs()
        except (AssertionError, OSError, subprocess.SubprocessError):
            return Lack(
                f"Triton does not find {LIBRARY}, which ldconfig -p does not list",
                f"run ldconfig as root, or set TRITON_LIBCUDA_PATH to the folder of {LIBRARY}",
            )
    return None


def torch(places: Places) -> Lack | None:
    """torch: there, of a version that we know, built for CUDA, for a driver like this one, and it finds the card."""
    if lack := _installed("torch", *TORCH, WHEEL):
        return lack
    it = importlib.import_module("torch")
    if it.version.hip is not None:
        return Lack(
            f"torch {it.__version__} is built for AMD cards", "their FP8 has no kernel here: use an NVIDIA card"
        )
    if it.version.cuda is None:
        return Lack(
            f"torch {it.__version__} is built without CUDA", f"{WHEEL} --force-reinstall, from PyPI: built for CUDA"
        )
    have, wanted = _driver_cuda(), int(it.version.cuda.split(".")[0])
    if have is not None and have // 1000 < wanted:
        older = f"{have // 1000}.{have % 1000 // 10}"
        return Lack(
            f"torch {it.__version__} is built for CUDA {it.version.cuda}, and the driver knows CUDA {older}",
            f"install a newer driver, or a torch for CUDA {have // 1000} (https://download.pytorch.org/whl)",
        )
    if have is not None and not it.cuda.is_available():
        return Lack(
            "torch does not find the card that the driver has", "python -c 'import torch; torch.cuda.init()' says why"
        )
    return None


def triton(places: Places) -> Lack | None:
    """Triton: there, and of a version that we know."""
    return _installed("triton", *TRITON, "pip install 'triton>=3.6,<3.10'")


def compiler(places: Places) -> Lack | None:
    """A C compiler and Python's headers, tried, unless the pack carries what they are needed for."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    carried, version = _carried(places.pack), sys.version.split()[0]
    if carried is not None and suffix in carried and (_version("triton") or ONE_LAUNCHER) >= ONE_LAUNCHER:
        return None
    pack = f", or a pack with a launcher for {suffix}: `make gpu-pack` makes it where both are"
    given = os.environ.get("CC")
    program = shutil.which(given) if given else shutil.which("gcc") or shutil.which("clang")
    if program is None:
        what = f"the compiler that CC names is not there ({given})" if given else "no C compiler (gcc or clang)"
        return Lack(what, f"apt-get install gcc libc6-dev, or set CC{pack}")
    headers = sysconfig.get_paths(scheme=_scheme())["include"]
    if not Path(headers, "Python.h").exists():
        return Lack(f"no Python.h in {headers}", f"install the headers of Python {version} (python3-dev){pack}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "it.c")
        source.write_text("#include <stdlib.h>\n#include <Python.h>\n")
        command = [program, str(source), f"-I{headers}", "-shared", "-fPIC", "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = next(iter(done.stderr.splitlines()), f"exit status {done.returncode}")
        return Lack(f"{program} does not compile a module of Python ({first})", f"apt-get install gcc libc6-dev{pack}")
    return None


def disk(places: Places) -> Lack | None:
    """Room on the file systems of what is written."""
    wanted: dict[int, tuple[Path, int]] = {}
    for folder, size in ((places.cache, CACHE), (Path(tempfile.gettempdir()), TEMPORARY), (places.results, RESULTS)):
        there = next(each for each in (folder, *folder.parents) if each.exists())
        if not os.access(there, os.W_OK):
            return Lack(f"{there} cannot be written to", "give --cache FOLDER or --out FOLDER, or set TMPDIR")
        first, so_far = wanted.get(there.stat().st_dev, (there, 0))
        wanted[there.stat().st_dev] = first, so_far + size
    for there, size in wanted.values():
        if (free := shutil.disk_usage(there).free) < size:
            return Lack(
                f"{free / GIB:.1f} GiB are free at {there}, {size / GIB:.1f} are needed",
                "make room, or give --cache FOLDER and set TMPDIR",
            )
    return None


def memory(places: Places) -> Lack | None:
    """Memory of the card that nobody uses."""
    it = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if it is None or not it.cuda.is_available():
        return None
    free, whole = it.cuda.mem_get_info()
    if free >= FREE * whole:
        return None
    return Lack(
        f"{free / GIB:.1f} of the card's {whole / GIB:.1f} GiB are free: others use it, and times would be wrong",
        "end the processes that nvidia-smi lists, or set CUDA_VISIBLE_DEVICES to another card",
    )


CHECKS: tuple[Callable[[Places], Lack | None], ...] = (python, driver, torch, triton, compiler, disk, memory)


def lacks(places: Places) -> dict[str, Lack]:
    """All that is lacking, by the name of the check."""
    found = {}
    faulthandler.dump_traceback_later(HANGS, exit=True, file=sys.__stderr__ or 2)
    for check in CHECKS:
        try:
            lack = check(places)
        except Exception as error:  # any: what is broken must not hide the rest
            lack = Lack(f"{check.__name__} cannot be asked ({type(error).__name__}: {error})", "install it anew")
        if lack is not None:
            found[check.__name__] = lack
    faulthandler.cancel_dump_traceback_later()
    return found


def _installed(name: str, oldest: tuple[int, int], too_new: tuple[int, int], remedy: str) -> Lack | None:
    if importlib.util.find_spec(name) is None:
        return Lack(f"{sys.executable} has no {name}", f"make gpu PYTHON=... names a Python that has, or {remedy}")
    version = _version(name)
    if version is not None and not oldest <= version < too_new:
        return Lack(f"{name} {importlib.metadata.version(name)} is not of the versions that are known", remedy)
    return None


def _version(name: str) -> tuple[int, int] | None:
    """(major, minor) of an installed package; None where it says none."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


def _driver_cuda() -> int | None:
    """CUDA's version that the driver knows, 12080 for 12.8; None without a driver."""
    try:
        cuda: Any = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    found = ctypes.c_int()
    return found.value if cuda.cuDriverGetVersion(ctypes.byref(found)) == 0 else None


def _carried(pack: Path) -> list[str] | None:
    """The Pythons, by the suffix of their modules, for which a pack that fits here has a launcher."""
    if not pack.exists() or importlib.util.find_spec("triton") is None:
        return None
    about = importlib.import_module("benchmarks.card.pack").manifest(pack)
    return None if "why" in about else about.get("launchers")


def _scheme() -> str:
    """Where Triton looks for headers: not in Debian's own scheme."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme
