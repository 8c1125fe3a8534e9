"""Kernels compiled for an absent card: the launches of the library itself, caught before they reach a driver.

`caught(architecture)` puts a pretended card under Triton and keeps every launch's signature, constants and options
instead of running it; `Launch.compile` makes machine code of one with the ptxas in Triton's wheel.  What is compiled is
what would be launched: nothing is written down a second time.

Needs Triton (not in interpreter mode) and no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from fp8engine.errors import VersionError

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
NOTE = re.compile(r"\bC7\d{3}\b")
# "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...": a number for each cause.
SERIALIZED = {f"C{number}" for number in range(7510, 7516)}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel's machine code and the report of ptxas.  shared: bytes a program; spills: bytes."""

    ptx: str
    sass: str
    shared: int
    warps: int
    registers: int
    spills: int
    notes: tuple[str, ...]

    @property
    def serialized(self) -> bool:
        """Whether ptxas makes each Tensor Core instruction wait for the one before."""
        return not SERIALIZED.isdisjoint(self.notes)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch that was caught, and can be compiled.  programs: how many it starts, where there is no card."""

    kernel: Any
    signature: dict[str, str]
    constants: dict
    attributes: dict
    options: dict[str, Any]
    architecture: int
    programs: int

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.fn.__name__

    @property
    def by_name(self) -> dict[str, Any]:
        """Its constants by the names of the parameters."""
        return {self.kernel.arg_names[index[0]]: value for index, value in self.constants.items()}

    def with_constant(self, name: str, value: int) -> Launch:
        """The same with another value of a constant."""
        place = (self.kernel.arg_names.index(name),)
        return dataclasses.replace(self, constants=self.constants | {place: value})

    def compile(self) -> Compiled:
        """Machine code, in about a second.  Raises what Triton or ptxas raises."""
        source = self.kernel.ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        with (
            tempfile.TemporaryDirectory() as folder,
            knobs.cache.scope(),
            knobs.nvidia.scope(),
            _pretended(self.architecture) as card,
        ):
            knobs.cache.dir = folder  # empty: nothing compiled before is taken for this
            knobs.nvidia.dump_ptxas_log = True
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                made = triton.compile(source, target=card.get_current_target(), options=self.options)
            notes = printed.getvalue()
            code = Path(folder) / "kernel.cubin"
            code.write_bytes(made.asm["cubin"])
            sass = _run(str(TOOLS / "nvdisasm"), "-c", str(code))
        spills, registers = SPILLS.search(notes), REGISTERS.search(notes)
        if not spills or not registers:
            raise VersionError(f"ptxas of Triton {triton.__version__} reports no registers or spills: {notes[-300:]!r}")
        return Compiled(
            ptx=made.asm["ptx"],
            sass=sass,
            shared=made.metadata.shared,
            warps=made.metadata.num_warps,
            registers=int(registers[1]),
            spills=sum(map(int, spills.groups())),
            notes=tuple(sorted(set(NOTE.findall(notes)))),
        )


class _PretendedCard:
    """The part of a Triton driver that a launch uses before it compiles."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture  # compiled kernels are kept per device: one number per architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextlib.contextmanager
def caught(architecture: int) -> Iterator[list[Launch]]:
    """Within the block no kernel runs; the list fills with the launches, each as on a card of that architecture (90).

    Give the launchers meta tensors: shapes and dtypes are real, addresses aligned, memory not there.
    Raises VersionError in interpreter mode, where nothing is compiled.
    """
    if knobs.runtime.interpret:
        raise VersionError("TRITON_INTERPRET=1 interprets kernels; to compile them run without it")
    launches: list[Launch] = []
    grids: list[tuple[int, ...]] = []
    run = JITFunction.run

    def run_noting_the_grid(self, *arguments, grid, warmup, **rest):
        grids.append(grid)
        return run(self, *arguments, grid=grid, warmup=warmup, **rest)

    def keep(*, fn, compile, **rest) -> bool:
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(compile["specialization_data"])["options"].items()
        }
        (attributes,) = compile["configs"]
        told = compile["signature"], compile["constants"], attributes, options
        launches.append(Launch(fn.jit_function, *told, architecture, math.prod(grids[-1])))
        return True  # Triton then leaves compiling to this hook, and does not launch

    with knobs.runtime.scope(), _pretended(architecture):
        knobs.runtime.jit_cache_hook = keep
        JITFunction.run = run_noting_the_grid
        try:
            yield launches
        finally:
            JITFunction.run = run


@contextlib.contextmanager
def _pretended(architecture: int) -> Iterator[_PretendedCard]:
    before = driver._active
    card = _PretendedCard(architecture)
    driver.set_active(card)  # pyright: ignore[reportArgumentType]
    try:
        yield card
    finally:
        driver._active = before


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
