"""Kernels and launchers compiled beforehand, and a file that carries them: Triton's cache, filled without a card.

    build    processes that pretend to have a card compile what the plan launches        make gpu-pack
    unpack   the file's kernels become entries of this machine's cache                   make gpu

Triton looks a kernel up by a hash of: the kernel's source and what it calls, its signature, constants and divisibility;
its options; the version of ptxas and the architecture; environment variables that change code; and Triton's own files.
The last differ between wheels of one version (libtriton for Python 3.11 is not that for 3.12), though what they compile
to does not: `stable_keys` puts Triton's version in their place, here and on the card.  The hash of a source depends on
which other kernels the process has hashed before (Triton 3.6, DependenciesFinder._update_hash: it merges the global
values of a called function before it has looked for them): `stable_keys` hashes all of ours, until none changes.  An
entry names its files by absolute paths, so that they are written anew where the file is unpacked.
"""

from __future__ import annotations

import importlib
import io
import json
import lzma
import os
import pkgutil
import tarfile
from pathlib import Path
from typing import Any

import triton
import triton.runtime.cache
from triton import knobs

from benchmarks.card import launchers
from benchmarks.card.plan import PACK as FILE  # noqa: F401

ARCHITECTURE = 90
MOST_BYTES = 64 << 20
KEPT = (".json", ".cubin")  # of an entry's files: what a launch needs
MANIFEST, HASHES = "manifest.json", "from-the-pack.json"


def stable_keys() -> None:
    """Let the keys of Triton's cache depend on its version, and neither on the bytes of its wheel nor on the past."""
    triton.runtime.cache.triton_key = lambda: f"fp8engine's pack, Triton {triton.__version__}"
    kernels, before = _kernels(), None
    while before != (found := [kernel.cache_key for kernel in kernels]):
        before = found
        for kernel in kernels:
            kernel.hash = None


def _kernels() -> list[Any]:
    """Every function of kernels/ that Triton compiles."""
    folder = importlib.import_module("fp8engine.kernels").__path__
    modules = [importlib.import_module(f"fp8engine.kernels.{one.name}") for one in pkgutil.iter_modules(folder)]
    every = {id(value): value for module in modules for value in vars(module).values() if hasattr(value, "cache_key")}
    return list(every.values())


def compiler() -> dict[str, str]:
    """What a pack is made with, and has to be used with."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    lines = get_ptxas_version(ARCHITECTURE).strip().splitlines()
    return {"triton": triton.__version__, "ptxas": lines[-1]}


def entries(cache: Path) -> list[Path]:
    """Folders of the cache that hold a finished kernel."""
    return sorted(path.parent for path in cache.glob("*/__grp__*.json") if any(path.parent.glob("*.cubin")))


def write(cache: Path, file: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Pack a cache.  more: what else the manifest says.  Returns the manifest; raises ValueError over MOST_BYTES."""
    every = entries(cache)
    modules = sorted((cache / launchers.FOLDER).glob("*.so"))
    about = {**compiler(), **more, "kernels": len(every), "launchers": [launchers.suffix(path) for path in modules]}
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(".new")
    with lzma.open(made, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        _add(tar, MANIFEST, json.dumps(about).encode())
        for path in modules:
            _add(tar, f"{launchers.FOLDER}/{path.name}", path.read_bytes())
        for entry in every:
            for path in sorted(entry.iterdir()):
                if path.suffix in KEPT and not path.name.startswith("__grp__"):
                    _add(tar, f"{entry.name}/{path.name}", path.read_bytes())
    size = made.stat().st_size
    if size > MOST_BYTES:
        made.unlink()
        raise ValueError(
            f"the pack has {size >> 20} MiB, and {MOST_BYTES >> 20} may travel: give make gpu-pack GROUPS=..."
        )
    os.replace(made, file)
    return {**about, "bytes": size}


def manifest(file: Path) -> dict[str, Any]:
    """What the file says of itself, with "why" where it cannot be used here."""
    if not file.exists():
        return {
            "kernels": 0,
            "why": f"no {file.parent.name}/{file.name}: make gpu-pack makes it, on any machine with Triton",
        }
    with lzma.open(file) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        about = json.loads(_read(tar, next(iter(tar))))
    for name, version in compiler().items():
        if about[name] != version:
            return {**about, "why": f"the pack was made with {name} {about[name]}, and here is {version}"}
    return about


def unpack(file: Path, cache: Path) -> dict[str, Any]:
    """Add the file's kernels to the cache.  Returns the manifest, with "why" where it cannot be used."""
    about = manifest(file)
    if "why" in about:
        return about
    with lzma.open(file) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        members = iter(tar)
        next(members)
        groups: dict[Path, dict[str, str]] = {}
        hashes = []
        for member in members:
            path = cache / member.name
            if path.parent.parent != cache:
                raise ValueError(f"{file} has a member outside of the cache: {member.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            data = _read(tar, member)
            path.write_bytes(data)
            if path.parent.name == launchers.FOLDER:
                continue
            groups.setdefault(path.parent, {})[path.name] = str(path)
            if path.suffix == ".json":
                hashes.append(json.loads(data)["hash"])
    for folder, children in groups.items():  # last: an entry is looked up by this file
        name = next(name for name in children if name.endswith(".json"))
        (folder / f"__grp__{name}").write_text(json.dumps({"child_paths": children}))
    (cache / HASHES).write_text(json.dumps(hashes))
    return about


class Counts:
    """How many of our kernels this process took from the pack, found in the cache, or had to compile."""

    def __init__(self, cache: Path):
        known = cache / HASHES
        self._packed = frozenset(json.loads(known.read_text()) if known.exists() else ())
        self.pack = self.cache = self.compiled = 0
        knobs.compilation.listener = self

    def __call__(self, *, src, metadata, cache_hit: bool, **rest: Any) -> None:
        """Triton calls it with each kernel that a launch asks for the first time."""
        if not getattr(getattr(src, "fn", None), "__module__", "").startswith("fp8engine"):
            return  # Inductor's
        if not cache_hit:
            self.compiled += 1
        elif metadata["hash"] in self._packed:
            self.pack += 1
        else:
            self.cache += 1


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is no file")
    return file.read()
