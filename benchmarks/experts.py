"""Benchmark of the grouped matmuls of experts on a card: ours and torch's FP8 beside BF16, forward and wgrad.

Casts are not timed here; each way multiplies operands that were cast before.  A result is right where it is within
LEAST_DB of BF16's: two E4M3 casts leave 28 dB.  Run by `make gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8engine.bench import harness
from fp8engine.bench.cases import sqnr
from fp8engine.bench.harness import Row, Timer
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts, grouped
from fp8engine.ops.backends import backend
from fp8engine.ops.reference.grouped import bounds_of, bounds_of_equal

E4M3 = torch.float8_e4m3fn
LEAST_DB = 22.0
BASE = "bf16, torch's grouped matmul"
HOWS = {
    "rowwise": (Cast.parse("e4m3 1x-1 p2"), Cast.parse("e4m3 1x-1 p2"), Cast.parse("e4m3 -1x1 p2")),
    "blockwise": (Cast.parse("e4m3 1x128 p2"), Cast.parse("e4m3 128x128 p2"), Cast.parse("e4m3 128x1 p2")),
}


class Case(NamedTuple):
    """Rows in all, and of the largest expert; N, K and how many experts."""

    rows: int
    largest: int
    n: int
    k: int
    experts: int

    def sizes(self) -> list[int]:
        """The largest expert first, the others alike, the last with what is left."""
        rest, others = self.rows - self.largest, self.experts - 1
        each = rest // others
        return [self.largest, *[each] * (others - 1), rest - each * (others - 1)]

    def __str__(self) -> str:
        return f"{self.experts} experts, {self.rows} rows ({self.largest} of one), {self.n}x{self.k}"


# Mixtral's first matrix, Qwen3-MoE's, all but a few rows in one expert, and experts of 17 rows.
CASES = (
    Case(16384, 2048, 14336, 4096, 8),
    Case(65536, 1024, 1536, 2048, 64),
    Case(16384, 12288, 14336, 4096, 8),
    Case(64 * 17, 17, 1536, 2048, 64),
)


def compare(case: Case, where: torch.device, timer: Timer) -> list[Row]:
    """A row for each way of each matmul."""
    torch.manual_seed(0)
    rows, _, n, k, experts = case
    bounds = bounds_of(torch.tensor(case.sizes(), device=where))
    x, dy = (torch.randn(rows, columns, device=where).bfloat16() for columns in (k, n))
    w = torch.randn(experts * n, k, device=where).bfloat16()
    ends = bounds[0, 1:].contiguous()
    y = torch.nn.functional.grouped_mm(x, w.view(experts, n, k).mT, offs=ends)
    dw = grouped.sums_16(dy, x, bounds, torch.bfloat16)
    found: dict[str, Callable[[Row], harness.Call]] = {
        BASE: lambda row: _right(
            row, lambda: torch.nn.functional.grouped_mm(x, w.view(experts, n, k).mT, offs=ends), y
        ),
        f"{BASE}, wgrad": lambda row: _right(row, lambda: grouped.sums_16(dy, x, bounds, torch.bfloat16), dw),
    }

    def forward(row: Row, recipe: str, name: str) -> harness.Call:
        first, second, _ = HOWS[recipe]
        a, b = casts.quantize(x, first), _weights(w, second, experts)
        way = ("promoted" if recipe == "blockwise" else "fast"), False
        return _right(row, lambda: _on(name, lambda: grouped.rows(a, b, bounds, None, torch.bfloat16, way)), y)

    def wgrad(row: Row, recipe: str) -> harness.Call:
        cast = HOWS[recipe][2]
        a, b = (grouped.quantize(each, cast, bounds, None, transposed=True) for each in (dy, x))
        way = "promoted", True
        return _right(row, lambda: _on("triton", lambda: grouped.sums(a, b, bounds, torch.bfloat16, way)), dw)

    found["rowwise, torch's grouped matmul"] = lambda row: forward(row, "rowwise", "cublas")
    for recipe in HOWS:
        found[f"{recipe}, ours"] = lambda row, recipe=recipe: forward(row, recipe, "triton")
        found[f"{recipe}, ours, wgrad"] = lambda row, recipe=recipe: wgrad(row, recipe)
    flops = 2 * rows * n * k
    return harness.compare(
        {"case": str(case), "shape": [rows, n, k]},
        found,
        lambda name, seconds, over: {
            "tflops": flops / seconds / 1e12,
            "over_bf16": over(f"{BASE}, wgrad" if name.endswith("wgrad") else BASE),
        },
        timer,
    )


def _weights(w: torch.Tensor, cast: Cast, experts: int):
    if not grouped.spans_rows(cast):
        return casts.quantize(w, cast)
    return grouped.quantize(w, cast, bounds_of_equal(len(w) // experts, experts, w.device))


def _on(name: str, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with backend(name):
        return call()


def _right(row: Row, call: Callable[[], torch.Tensor], wanted: torch.Tensor) -> harness.Call:
    row["sqnr"] = round(sqnr(call(), wanted), 1)
    row["correct"] = row["sqnr"] >= LEAST_DB
    return lambda turn: call()
