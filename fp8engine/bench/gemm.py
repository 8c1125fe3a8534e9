"""Benchmark of every matmul there is here: checked against float64, then timed beside torch's own.

    over_peer     torch's time over the variant's, torch doing the same: the same format, scales and accumulation
    over_16_bits  the time of torch's 16-bit matmul over the variant's

Both are of medians in one run; above 1 the variant is faster.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8engine import _torch
from fp8engine.bench import harness
from fp8engine.bench.cases import LLM, Operands, Pair, Shape, Truth
from fp8engine.bench.harness import Limits, Row, Timer
from fp8engine.bench.timing import Clock
from fp8engine.errors import BackendError
from fp8engine.ops import device, reference, scaled_mm, triton_backend
from fp8engine.ops.reference import Epilogue

# Relative errors of the sums against float64, random normal data, K = 4096 (mmaemu, a bit-level model of the H100).
# Fast accumulation truncates each step's addends at 2^-13 of the largest: at worst these errors add up, so they grow
# with K.  Promoted sums start anew every 128 of K and are added in FP32: no growth.  The same for FP32 throughout.
FAST, PROMOTED, EXACT, AT_K = 1.35e-3, 1.3e-4, 1e-5, 4096
ROUNDING = 2.0**-9  # of one rounding to BF16, at most; its root mean square is 0.6 of that
MARGIN = 2.0  # for sums in another order, and for the largest of many stripes (cases.Truth) lying over the mean

SETS = 2  # of operands, taken in turn
TARGETS = {  # variant -> (geometric mean, minimum) of over_peer on a Hopper card over LLM shapes; None: no target
    "triton fp8 tensor fast": (1.00, 0.95),
    "triton fp8 row fast": (1.00, 0.95),
    "triton fp8 tensor promoted": (0.90, None),
    "triton fp8 row promoted": (0.90, None),
    "triton 16 bits": (0.95, None),
}
REFERENCE = "reference fp8 "
BASE = "torch 16 bits"


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
    fp8 = kind == "cuda" and capability >= device.FP8_CAPABILITY
    bits = "fp16" if kind == "cuda" and capability < (8, 0) else "bf16"
    found = {BASE: Variant(bits, _plain)}
    if kind == "cpu":
        found["torch fp32"] = Variant("fp32", _plain, roundings=0)
    elif triton and capability >= (8, 0):
        found["triton 16 bits"] = Variant(bits, _triton_16_bits, peer=BASE)
    if fp8 or (kind == "cpu" and hasattr(torch, "_scaled_mm")):
        found |= _scaled_mm(fp8)
    if kind == "cuda" and capability == scaled_mm.BLOCKS_ON:
        found |= {f"torch fp8 {blocks}": Variant(blocks, _torch_blocks, PROMOTED) for blocks in _BLOCKS}
    if fp8 and triton:
        found |= _triton_fp8(found)
    if not fp8:
        for scales in ("tensor", "row", "block"):  # BF16 sums before the scales, then the result
            peer = f"torch fp8 {scales}"
            found[REFERENCE + scales] = Variant(
                scales, _reference, peer=peer if peer in found else None, roundings=2, emulated=True
            )
    return found


def _scaled_mm(fp8: bool) -> dict[str, Variant]:
    """torch's scaled matmul; a CPU has one accumulation only."""
    if not fp8:
        return {f"torch fp8 {kind}": Variant(kind, _torch_scaled(False), PROMOTED, None, 2, True) for kind in _PER}
    return {
        f"torch fp8 {kind}{' fast' if fast else ''}": Variant(kind, _torch_scaled(fast), FAST if fast else PROMOTED)
        for kind in _PER
        for fast in (True, False)
    }


def _triton_fp8(peers: Mapping[str, Variant]) -> dict[str, Variant]:
    found = {}
    for kind in _PER:
        found[f"triton fp8 {kind} fast"] = Variant(kind, _triton(False), FAST, f"torch fp8 {kind} fast")
        found[f"triton fp8 {kind} promoted"] = Variant(kind, _triton(True), PROMOTED, f"torch fp8 {kind}")
    for kind in _BLOCKS:
        peer = f"torch fp8 {kind}"
        found[f"triton fp8 {kind}"] = Variant(kind, _triton(True), PROMOTED, peer if peer in peers else None)
    return found


_PER, _BLOCKS = ("tensor", "row"), ("block", "block by block")


def _plain(pair: Pair) -> torch.Tensor:
    return pair.a.data @ pair.b.data.t()


def _torch_scaled(fast: bool) -> Callable[[Pair], torch.Tensor]:
    def run(pair: Pair) -> torch.Tensor:
        scale_b = pair.b.scale.t() if pair.b.scale.dim() == 2 else pair.b.scale
        return _torch.scaled_mm(
            pair.a.data, pair.b.data.t(), pair.a.scale, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return run


def _triton(promoted: bool) -> Callable[[Pair], torch.Tensor]:
    return lambda pair: kernel("matmul_fp8")(pair.a, pair.b, Epilogue(None, torch.bfloat16), promoted)


def _torch_blocks(pair: Pair) -> torch.Tensor:
    return scaled_mm.matmul(pair.a, pair.b)


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
    ticks: Clock | None = None,
    limits: Limits | None = None,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check and time every variant on every shape: {"machine", "what", "limits", "rows", "summary"}, plain values.

    ways: named variants, ticks: what times them, limits: what the machine reaches; defaults: all that there are here.
    turns: that count, per variant and shape.  Raises BackendError for a device that is neither CUDA nor a CPU.
    """
    if where.type not in ("cpu", "cuda"):
        raise BackendError(f"no matmul benchmark on {where.type}; use 'cuda' or 'cpu'")
    if ways is None:
        ways = variants(where.type, device.capability(where), triton_backend.usable())
    timer = Timer.of(where, ticks, turns, (30, 9))
    with torch.no_grad():
        limits = harness.limits(where, timer.clock) if limits is None else limits
        rows = [row for shape in shapes for row in measured(shape, where, ways, timer, limits)]
    rates = {"matmul_16_bits_tflops": limits.flops / 1e12, "copy_gb_per_s": limits.bytes / 1e9}
    return harness.result(where, _what(where, ways), rows, limits=rates, summary=summary(rows))


def measured(shape: Shape, where: torch.device, ways: Mapping[str, Variant], timer: Timer, limits: Limits) -> list[Row]:
    """One shape's rows, each rate as a share of the machine's limit too."""
    rows = compare(shape, where, ways, timer)
    for row in rows:
        if "tflops" in row:
            row["of_16_bit_rate"] = row["tflops"] * 1e12 / limits.flops
    return rows


def compare(shape: Shape, where: torch.device, ways: Mapping[str, Variant], timer: Timer) -> list[Row]:
    """One shape's rows."""
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
        rate, peer = shape.flops / seconds / 1e12, ways[name].peer
        return {"tflops": rate, "peer": peer, "over_peer": over(peer), "over_16_bits": over(BASE)}

    checks = {name: lambda row, way=way: check(row, way) for name, way in ways.items()}
    return harness.compare({"shape": list(shape)}, checks, derive, timer, truths.clear)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each variant of TARGETS against torch's over all shapes, and the highest rate.

    "llm": over the LLM shapes among them, for which the targets are.  One wrong shape leaves a variant without a mean:
    a mean over the others would hide it.
    """
    found: dict[str, Any] = {}
    for name, (mean, least) in TARGETS.items():
        mine = [row for row in rows if row["name"] == name]
        llm = [row for row in mine if tuple(row["shape"]) in LLM]
        target = {"geometric_mean": mean, "minimum": least}
        found[name] = {**_means(mine), "llm": _means(llm), "target": target}
    timed = [row for row in rows if "tflops" in row and row["name"].startswith("triton fp8")]
    best = max(timed, key=lambda row: row["tflops"], default=None)
    found["best_tflops"] = None if best is None else {key: best[key] for key in ("name", "shape", "tflops")}
    return found


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [row["over_peer"] for row in rows if row.get("over_peer") is not None]
    wrong = sum(row["correct"] is False for row in rows)
    valid = bool(ratios) and not wrong
    return {
        "geometric_mean": statistics.geometric_mean(ratios) if valid else None,
        "minimum": min(ratios) if valid else None,
        "shapes": len(ratios),
        "note": f"wrong at {wrong} of {len(rows)} shapes" if wrong else None if valid else harness.NOT_MEASURED,
    }


def _what(where: torch.device, ways: Mapping[str, Variant]) -> str:
    if where.type == "cpu":
        return "CPU: FP8 emulated; the Triton kernels are not run, their interpreter is no speed"
    if any(name.startswith("triton fp8") for name in ways):
        return "FP8 Tensor Cores; Triton's kernels beside torch's"
    if device.has_fp8(where):
        return "FP8 Tensor Cores; without Triton, torch's matmuls alone"
    return f"{device.why_no_fp8(where)}: 16-bit rows measured, FP8 emulated"
