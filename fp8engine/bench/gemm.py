"""Benchmark of every matmul there is here: checked against float64, then timed beside torch's own.

    over_peer     torch's time over the variant's, torch doing the same: the same format, scales and accumulation
    over_16_bits  the time of torch's 16-bit matmul over the variant's

Both are of medians in one run; above 1 the variant is faster.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8engine.bench import harness
from fp8engine.bench.cases import Operands, Pair, Shape, Truth
from fp8engine.bench.harness import Limits, Row, Timer
from fp8engine.ops import device, reference, scaled_mm, triton_backend
from fp8engine.ops.reference import Epilogue

# Relative errors of the sums against float64, random normal data, K = 4096 (mmaemu, a bit-level model of the H100).
# Fast accumulation truncates each step's addends at 2^-13 of the largest: at worst these errors add up, so they grow
# with K.  Promoted sums start anew every 128 of K and are added in FP32: no growth.  The same for FP32 throughout.
FAST, PROMOTED, EXACT, AT_K = 1.35e-3, 1.3e-4, 1e-5, 4096
ROUNDING = 2.0**-9  # of one rounding to BF16, at most; its root mean square is 0.6 of that
MARGIN = 2.0  # for sums in another order, and for the largest of many stripes (cases.Truth) lying over the mean

SETS = 2  # of operands, taken in turn
BASE = "torch 16 bits"
ON_TENSOR_CORES = {  # way to multiply FP8 -> scales of its operands, and its sums
    "tensor fast": ("tensor", FAST),
    "tensor promoted": ("tensor", PROMOTED),
    "row fast": ("row", FAST),
    "row promoted": ("row", PROMOTED),
    "block": ("block", PROMOTED),
    "block by block": ("block by block", PROMOTED),
}


OURS = ("triton 16 bits", *(f"triton fp8 {name}" for name in ON_TENSOR_CORES))


@dataclass(frozen=True)
class Variant:
    """One way to multiply.

    kind: of operands, a key of cases.KINDS.  run: makes y.  sums: relative error of its sums, one of the above.
    peer: the variant of torch's that does the same.  roundings: to 16 bits.  emulated: FP8 without FP8 Tensor Cores.
    """

    kind: str
    run: Callable[[Pair], torch.Tensor]
    sums: float = EXACT
    peer: str | None = None
    roundings: int = 1
    emulated: bool = False

    def tolerance(self, k: int) -> float:
        """Relative error above which a result is wrong."""
        growth = max(1.0, k / AT_K) if self.sums == FAST else 1.0
        return MARGIN * (self.sums * growth + self.roundings * ROUNDING)


def variants(kind: str, capability: tuple[int, int] = (0, 0), triton: bool = False) -> dict[str, Variant]:
    """Variants that can be measured on a kind of device ("cuda" or "cpu"), by name.

    capability: of the card.  triton: whether there is a Triton that we know.

    >>> list(variants("cuda", (7, 0)))
    ['torch 16 bits', 'reference fp8 tensor', 'reference fp8 row', 'reference fp8 block']
    """
    bits = "fp16" if kind == "cuda" and capability < (8, 0) else "bf16"
    found = {BASE: Variant(bits, _plain)}
    if kind == "cpu":
        found["torch fp32"] = Variant("fp32", _plain, roundings=0)
    elif triton and capability >= (8, 0):
        found["triton 16 bits"] = Variant(bits, _triton_16_bits, peer=BASE)
    if capability < device.FP8_CAPABILITY:
        return found | _emulated(kind)
    for name, (scales, sums) in ON_TENSOR_CORES.items():
        peer = f"torch fp8 {name.removesuffix(' promoted')}"
        if scales in ("tensor", "row") or capability == scaled_mm.BLOCKS_ON:
            found[peer] = Variant(scales, _torch(sums == FAST), sums)
        if triton:
            ours = Variant(scales, _triton(sums == PROMOTED), sums, peer if peer in found else None)
            found[f"triton fp8 {name}"] = ours
    return found


def _emulated(kind: str) -> dict[str, Variant]:
    """FP8 without Tensor Cores for it: 16-bit sums before the scales, then the result; a CPU has torch's way too."""
    found = {}
    for scales in ("tensor", "row", "block"):
        peer = f"torch fp8 {scales}" if kind == "cpu" and scales != "block" else None
        if peer is not None:
            found[peer] = Variant(scales, _torch(False), PROMOTED, roundings=2, emulated=True)
        found[f"reference fp8 {scales}"] = Variant(scales, _reference, peer=peer, roundings=2, emulated=True)
    return found


def _plain(pair: Pair) -> torch.Tensor:
    return pair.a.data @ pair.b.data.t()


def _torch(fast: bool) -> Callable[[Pair], torch.Tensor]:
    return lambda pair: scaled_mm.matmul(pair.a, pair.b, fast=fast)


def _triton(promoted: bool) -> Callable[[Pair], torch.Tensor]:
    return lambda pair: kernel("matmul_fp8")(pair.a, pair.b, Epilogue(None, torch.bfloat16), promoted)


def _triton_16_bits(pair: Pair) -> torch.Tensor:
    return kernel("matmul_fp16")(pair.a.data, pair.b.data, Epilogue(None, pair.a.data.dtype))


def _reference(pair: Pair) -> torch.Tensor:
    return reference.matmul_fp8(pair.a, pair.b, None, torch.bfloat16)


def kernel(name: str, module: str = "matmul") -> Callable[..., torch.Tensor]:
    """A launcher of kernels/.  Imported at each call, 0.3 us beside a launch's 20 to 50: Triton is optional."""
    return getattr(importlib.import_module(f"fp8engine.kernels.{module}"), name)


def gemm(
    shapes: Sequence[Shape],
    where: torch.device,
    ways: Mapping[str, Variant] | None = None,
    timer: Timer | None = None,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Check and time every variant on every shape: {"machine", "what", "limits", "rows", "summary"}, plain values.

    ways: named variants, timer: what times them, limits: what the machine reaches; defaults: all that there are here.
    """
    if ways is None:
        ways = variants(where.type, device.capability(where), triton_backend.usable())
    timer = timer or Timer.of(where, 30, 9)
    with torch.no_grad():
        limits = harness.limits(where, timer.clock) if limits is None else limits
        rows = [row for shape in shapes for row in measured(shape, where, ways, timer, limits)]
    rates = {"matmul_16_bits_tflops": limits.flops / 1e12, "copy_gb_per_s": limits.bytes / 1e9}
    about = {"machine": harness.machine(where), "what": _what(where, ways), "limits": rates}
    return {**about, "rows": rows, "summary": {name: mean(rows, name) for name in OURS}}


def measured(shape: Shape, where: torch.device, ways: Mapping[str, Variant], timer: Timer, limits: Limits) -> list[Row]:
    """One shape's rows, each rate as a share of the machine's limit too."""
    sets = [Operands(shape, where, seed) for seed in range(SETS)]
    truths: dict[tuple[str, int], Truth] = {}

    def check(row: Row, way: Variant) -> harness.Call:
        row["emulated"] = way.emulated
        errors = []
        for index, operands in enumerate(sets):
            pair = operands[way.kind]
            if (way.kind, index) not in truths:
                truths[way.kind, index] = Truth.of(pair)
            errors.append(truths[way.kind, index].error(way.run(pair)))
        worst, allowed = max(errors), way.tolerance(shape.k)
        row |= {"correct": worst <= allowed, "error": worst if math.isfinite(worst) else None, "tolerance": allowed}
        return lambda turn: way.run(sets[turn % SETS][way.kind])

    def derive(name: str, seconds: float, over: Callable) -> Row:
        rate, peer = shape.flops / seconds, ways[name].peer
        rates = {"tflops": rate / 1e12, "of_16_bit_rate": rate / limits.flops}
        return {**rates, "peer": peer, "over_peer": over(peer), "over_16_bits": over(BASE)}

    checks = {name: lambda row, way=way: check(row, way) for name, way in ways.items()}
    return harness.compare({"shape": list(shape)}, checks, derive, timer, truths.clear)


def mean(rows: Iterable[Row], name: str) -> Row:
    """A variant's over_peer over all shapes: the geometric mean and the least, or a note that says why there are none.

    One wrong shape leaves a variant without a mean: a mean over the others would hide it.
    """
    mine = [row for row in rows if row["name"] == name]
    ratios = [row["over_peer"] for row in mine if row.get("over_peer") is not None]
    wrong = sum(row["correct"] is False for row in mine)
    found: Row = {"geometric_mean": None, "minimum": None, "shapes": len(ratios), "note": None}
    if wrong or not ratios:
        return found | {"note": f"wrong at {wrong} of {len(mine)} shapes" if wrong else harness.NOT_MEASURED}
    return found | {"geometric_mean": statistics.geometric_mean(ratios), "minimum": min(ratios)}


def _what(where: torch.device, ways: Mapping[str, Variant]) -> str:
    if where.type == "cpu":
        return "CPU: FP8 emulated; the Triton kernels are not run, their interpreter is no speed"
    if any(name.startswith("triton fp8") for name in ways):
        return "FP8 Tensor Cores; Triton's kernels beside torch's"
    if device.has_fp8(where):
        return "FP8 Tensor Cores; without Triton, torch's matmuls alone"
    return f"{device.why_no_fp8(where)}: 16-bit rows measured, FP8 emulated"
