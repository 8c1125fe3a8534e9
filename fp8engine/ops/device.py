"""Device facts: capability, FP8 support, the dtype of emulated products; asked when needed, never at import.

| card | capability | FP8 Tensor Cores | emulated products | source |
| --- | --- | --- | --- | --- |
| V100 | sm_70 | no | FP16 Tensor Cores | CUDA C programming guide, compute capabilities |
| A100 | sm_80 | no | BF16 Tensor Cores | same |
| L4, RTX 4090 | sm_89 | yes | - | same |
| H100, H200 | sm_90 | yes | - | same |
| B200, B300, RTX 5090 | sm_100, sm_103, sm_120 | yes; by whom: triton_backend.on_blackwell | - | same |
| AMD (ROCm) | - | not ours: MI300's FP8 is FNUZ, with another bias and range | FP32 | AMD CDNA 3 ISA, FP8 and BF8 |
| CPU | - | no | BF16 where the CPU has instructions for it, else FP32 | benchmarks/cpu.py |

On a CPU with BF16 instructions a BF16 matmul takes 0.25-0.5 of FP32's time, without them 4 times as long; torch's
scaled FP8 matmul takes 1.7 times as long as FP32's where no instruction multiplies FP8.  These were measured
(benchmarks/cpu.py, results committed) and are not measured again in each process: on a busy machine a timing can come
out either way, and a rank or a resumed run must not differ from the others.  `fp8engine doctor` measures, and says
where this CPU disagrees.

Every FP8 value is exact in BF16 and in FP16, products of two are exact in FP32: emulation loses nothing.
"""

from __future__ import annotations

import functools
import platform
import timeit

import torch

from fp8engine import _torch
from fp8engine.errors import BackendError

FP8_CAPABILITY = (8, 9)


def is_amd(device: torch.device) -> bool:
    """Whether the device is a card under ROCm: torch calls it "cuda" too, and counts by gfx numbers (gfx942 is 9.4)."""
    return device.type == "cuda" and torch.version.hip is not None


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of an NVIDIA card; (0, 0) for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not is_amd(device) else (0, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8 in hardware: CUDA from sm_89 (Ada, Hopper) on."""
    return device.type == "cuda" and capability(device) >= FP8_CAPABILITY


def why_no_fp8(device: torch.device) -> str:
    """Why a device for which `has_fp8` is false multiplies no FP8 for us."""
    if is_amd(device):
        return f"{name(device)} is an AMD card, for whose FP8 formats (FNUZ on MI300) no kernel here is written"
    return f"{name(device)} has no FP8 Tensor Cores"


def name(device: torch.device) -> str:
    """The card's or CPU's name, as reports print it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU" if device.type == "cpu" else device.type


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA card; 0 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def check_one(operation: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise BackendError, with the names of both, unless all the tensors that are there lie where the first one does.

    >>> check_one("matmul", torch.ones(1), bias=torch.ones(1), scale=None)
    """
    for what, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise BackendError(
                f"{operation}: its first tensor is on {first.device} and {what.replace('_', ' ')} on {tensor.device}; "
                "an operation runs on one device: move one of them"
            )


@functools.cache
def product_dtype(device: torch.device) -> torch.dtype:
    """In which dtype an emulated FP8 matmul takes its operands on this device: whichever is fastest and exact."""
    if device.type == "cuda" and not is_amd(device):
        return torch.bfloat16 if capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if device.type == "cpu" and cpu_multiplies("bf16") else torch.float32


# Names under which torch.cpu.get_capabilities() knows instructions that multiply the format.
INSTRUCTIONS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"), "fp8": ("amx_fp8",)}


@functools.cache
def cpu_multiplies(format: str) -> bool:
    """Whether this CPU has instructions that multiply "bf16" or "fp8"."""
    known = torch.cpu.get_capabilities()
    return any(known.get(name, False) for name in INSTRUCTIONS[format])


@functools.cache
def cpu_scales_rows() -> bool:
    """Whether torch's scaled matmul takes a scale per row on a CPU; torch 2.11's fails an assertion of its own."""
    codes, scales = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        _torch.scaled_mm(codes, codes.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


SLOW = 0.2  # seconds of a matmul that is timed once


@functools.cache
def cpu_timings() -> dict[str, float | None]:
    """Milliseconds of one 256x512x512 matmul on this CPU, None where it has none: in FP32, BF16, and FP8 by torch.

    The best of four, or one alone that takes longer than `SLOW`: torch's FP8 takes seconds on a CPU without
    instructions for it.  For `fp8engine doctor` and the benchmarks; nothing is chosen by it.
    """
    generator, one, found = torch.Generator().manual_seed(0), torch.ones(()), {}
    values = torch.randn(256, 512, generator=generator), torch.randn(512, 512, generator=generator)

    def plain(a, b):
        return a @ b.t()

    def scaled(a, b):
        return _torch.scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    ways = {"fp32": (torch.float32, plain), "bf16": (torch.bfloat16, plain)}
    for name, (dtype, multiply) in {**ways, "torch_scaled_fp8": (torch.float8_e4m3fn, scaled)}.items():
        call = functools.partial(multiply, *(x.to(dtype) for x in values))
        try:
            once = timeit.timeit(call, number=1)
            found[name] = 1e3 * (once if once > SLOW else min(timeit.repeat(call, number=1, repeat=3)))
        except (RuntimeError, AttributeError):  # a CPU build, or a torch, without it
            found[name] = None
    return found
