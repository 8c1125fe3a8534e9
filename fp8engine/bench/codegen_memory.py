"""The kernels bound by memory, as `codegen` compiles them: casts, norms, activations, the update of scales.

What moves a tensor has to move it 16 bytes a thread; a launch that only reduces what another left behind need not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fp8engine.kernels.act_quantize import act_quantize, act_quantize_backward
from fp8engine.kernels.cast_transpose import cast_transpose, transpose_codes
from fp8engine.kernels.norm_quantize import norm_quantize, norm_quantize_backward
from fp8engine.kernels.quantize import quantize, quantize_given
from fp8engine.kernels.scale_update import scale_update
from fp8engine.ops.reference import How, Norm, RowStatistics, Slot, Store

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
M, K = 8192, 4096
CASTS = {
    "tensor": How(E4M3, -1, -1),
    "tensor predicted": How(E5M2, -1, -1, False, True),
    "row": How(E4M3, 1, -1, True),
    "1x128": How(E4M3, 1, 128, True),
    "128x128": How(E4M3, 128, 128, True),
}
SLOTS = 64


class MemoryCase(NamedTuple):
    """name, architectures, what to launch, and which kernels of it have to move 16 bytes a thread."""

    name: str
    architectures: tuple[int, ...]
    launch: Callable[[], Any]
    wide: tuple[str, ...]


def cases() -> Iterator[MemoryCase]:
    """Every launcher, in the forms that differ in machine code."""
    hopper, fp8, every = (90,), (90, 89), (90, 89, 80)
    wide = ("_cast_kernel", "_short_kernel", "_line_cast_kernel")
    for name, how in CASTS.items():
        for dtype in (BF16, torch.float32):
            x = _meta(M, K, dtype=dtype)
            word = str(dtype).removeprefix("torch.")
            yield _case(f"quantize {name} {word}", fp8, wide, quantize, x, how, _slot())
        both = wide if name != "128x128" else ()
        yield _case(f"cast_transpose {name}", hopper, both, cast_transpose, _meta(M, K, dtype=BF16), how, _slot())
        x = _meta(M, K, dtype=BF16)
        yield _case(f"cast_transpose {name} sums", fp8, both, cast_transpose, x, how, _slot(), True)
    yield _case("quantize column", hopper, (), quantize, _meta(M, K, dtype=BF16), How(E4M3, -1, 1, True), None)
    yield _case(
        "quantize_given", hopper, ("_given_kernel",), quantize_given, _meta(M, K, dtype=BF16), CASTS["tensor"], _meta()
    )
    yield _case("transpose_codes", hopper, ("_transpose_kernel",), transpose_codes, _meta(M, K, dtype=E4M3))
    for steps in (16, 1024):
        tables = _meta(steps, 10_000), _meta(2, 10_000), _meta(3, 10_000)
        yield _case(f"scale_update {steps} steps", every, ("_scale_update_kernel",), scale_update, *tables)
    stores = {
        "plain": Store(),
        "predicted": Store(CASTS["tensor predicted"], False, _slot()),
        "row": Store(CASTS["row"], False, _slot()),
        "1x128": Store(CASTS["1x128"], False, _slot()),
    }
    for name, to in stores.items():
        for kind in ("gelu", "swiglu"):
            x = _meta(M, 2 * K if kind == "swiglu" else K, dtype=BF16)
            yield _case(f"act {kind} {name}", hopper, (), act_quantize, x, kind, to)
            yield _case(
                f"act backward {kind} {name}", hopper, (), act_quantize_backward, _meta(M, K, dtype=BF16), x, kind, to
            )
        for kind, width in (("rms", 4096), ("layer", 4096), ("layer", 16384)):
            x, w = _meta(M, width, dtype=BF16), _meta(width, dtype=BF16)
            bias = w if kind == "layer" else None
            rows = RowStatistics(_meta(M), _meta(M) if kind == "layer" else None)
            yield _case(f"norm {kind} {width} {name}", hopper, (), norm_quantize, x, w, bias, Norm(kind), to)
            backward = norm_quantize_backward, x, x, w, rows, Norm(kind), to
            yield _case(f"norm backward {kind} {width} {name}", hopper, (), *backward)


def _case(
    name: str, architectures: tuple[int, ...], wide: tuple[str, ...], launcher: Callable, *arguments
) -> MemoryCase:
    return MemoryCase(name, architectures, lambda: launcher(*arguments), wide)


def _slot() -> Slot:
    return Slot(_meta(2, SLOTS), _meta(7, SLOTS, dtype=torch.int64), 3)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
