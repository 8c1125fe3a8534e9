"""The emulated card as a driver of Triton: the library's own launches, compiled by its JIT, run on CPU tensors.

    with card.emulated(architecture=90, seed=3) as there:
        matmul_fp8(a, b, epilogue)            # any launcher of kernels/
    there.done                                # what ran

Triton compiles for the architecture with the real specialisations of each launch (== 1, divisible by 16) and stops at
PTX: no ptxas is needed.  Compiled kernels are kept under a key of their own, never taken for a real card's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from emulator.device_memory import FILLED, Allocation
from emulator.faults import UnknownInstruction
from emulator.launch import Done, Launch
from emulator.reader import Program, read
from emulator.scheduler import Step, prepare
from emulator.tma import TensorMap

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a CTA: CUDA C programming guide, compute capabilities
_NUMBERS = itertools.count(1000)  # of cards: compiled kernels are kept per device, with the launcher of its card
# Triton 3.6 gives a kernel's arguments to the C code one by one, behind 8 of its own; later ones as a list, the last.
FLAT = hasattr(nvidia, "_BASE_ARGS_FORMAT_LEN")
BEHIND = 8
HOOKS = (
    4  # what a launcher is given ahead of a kernel's arguments: metadata of kernel and launch, a hook before, one after
)
SCRATCH = 2  # pointers that Triton adds after a kernel's own arguments; none of our kernels uses them


class Card:
    """Where launches go.  done: what has run.  seed: of every launch's schedule, None for the simplest."""

    def __init__(self, architecture: int, seed: int | None):
        self.architecture, self.seed = architecture, seed
        self.done: list[Done] = []
        self.encoded = 0  # tensor maps, so far
        self.fresh: dict[int, tuple[torch.Tensor, np.ndarray]] = {}

    def empty(self, size: int) -> torch.Tensor:
        """`size` bytes that nobody has written: NaNs until then, and a fault for a kernel that reads them."""
        made = torch.full((size,), FILLED, dtype=torch.uint8)
        if size:
            self.fresh[made.data_ptr()] = made, np.ones(size, bool)  # kept: no later tensor gets this address
        return made

    def allocations(self, regions: list[tuple[int, int]]) -> Iterator[Allocation]:
        """Regions [first, last), those that overlap as one."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(set(regions)):
            if merged and first < merged[-1][1]:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            elif last > first:
                merged.append((first, last))
        for first, last in merged:
            fresh = next(
                (
                    unwritten[first - start : last - start]
                    for start, (_, unwritten) in self.fresh.items()
                    if start <= first and last <= start + len(unwritten)
                ),
                None,
            )
            yield Allocation(first, last, fresh)


class _Utils:
    """What Triton asks of a driver when it loads a compiled kernel: here the "binary" is the PTX."""

    def __init__(self, card: Card):
        self.card = card

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        program = _program(kernel)
        return program, program, 0, 0, 1024  # the module must be something: else Triton loads it at every launch

    def unload_module(self, module: tuple) -> None:
        """From Triton 3.9 on a kernel that is collected unloads what it loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self.card.architecture], "multiprocessor_count": 4, "warpSize": 32}

    def fill_tma_descriptor(self, address: int, swizzle: int, size: int, kind: int, box, shape, strides, padding: int):
        """A tensor map, as the driver encodes it."""
        self.card.encoded += 1
        return TensorMap(address, tuple(shape), tuple(strides), tuple(box), size, swizzle)

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name from Triton 3.7 on


@functools.lru_cache(maxsize=512)
def _program(ptx: bytes) -> tuple[Program, list[Step]]:
    program = read(ptx.decode())
    return program, prepare(program)


class _Launcher:
    """One compiled kernel's launches, built as Triton's CudaLauncher is: `launch` makes tensor maps of descriptors."""

    def __init__(self, card: Card, source: Any, metadata: Any):
        if metadata.num_ctas > 1:
            raise UnknownInstruction(f"{metadata.name} in clusters of {metadata.num_ctas} CTAs: this card runs none")
        self.card, self.shared = card, metadata.shared
        self.types = list(source.signature.values())
        boxes = list(getattr(metadata, "tensordesc_meta", None) or [])
        self.launch = nvidia.wrap_handle_tensordesc(self._launched, source.signature, boxes)

    def __call__(self, x: int, y: int, z: int, stream: int, function: tuple, *rest: Any) -> None:
        if FLAT:
            self.launch(x, y, z, stream, function, False, False, None, None, *rest)
        else:
            self.launch(x, y, z, stream, function, *[None] * BEHIND, rest[HOOKS:])

    def _launched(self, x: int, y: int, z: int, stream: int, function: tuple, *rest: Any) -> None:
        program, steps = function
        arguments, regions, given = [], [], iter(rest[BEHIND:] if FLAT else rest[-1])
        for kind in self.types:
            value = next(given)
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                arguments += [value, *itertools.islice(given, 2 * len(value.shape))]
                extent = (value.shape[0] - 1) * value.strides[0] + value.shape[1]
                regions.append((value.address, value.address + extent * value.itemsize))
            elif kind.startswith("*"):
                arguments.append(value.data_ptr())
                storage = value.untyped_storage()
                regions.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            else:
                arguments.append(value)
        arguments += [0] * SCRATCH
        launch = Launch(program, steps, arguments, (x, y, z), self.shared, self.card.allocations(regions))
        self.card.done.append(launch.run(self.card.seed))


class _Driver:
    """What Triton's runtime asks of the active driver."""

    def __init__(self, card: Card):
        self.card, self.utils, self.number = card, _Utils(card), next(_NUMBERS)
        self.launcher_cls = functools.partial(_Launcher, card)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def emulated(architecture: int = 90, seed: int | None = None) -> Iterator[Card]:
    """Within the block Triton's kernels run on the emulated card.  architecture: 80, 89 or 90."""
    card, key = Card(architecture, seed), CUDABackend.hash
    before = driver._active
    stops = mock.patch.object(CUDABackend, "make_cubin", lambda self, ptx, *rest: ptx.encode())
    apart = mock.patch.object(CUDABackend, "hash", lambda self: f"{key(self)}-emulated")
    driver.set_active(_Driver(card))  # pyright: ignore[reportArgumentType]
    try:
        with knobs.runtime.scope(), stops, apart:
            yield card
    finally:
        driver._active = before
        card.fresh.clear()  # Triton keeps the launcher, and that the card
