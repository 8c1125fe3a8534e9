"""How fast a Linear trains: forward and backward under every recipe, beside nn.Linear in BF16 and torchao.

    over_bf16   the time of BF16 nn.Linear's forward and backward over the variant's, medians in one run

A variant whose y, dx or dw is further from float64 than FP8 explains has its SQNR and nothing else: no time, no ratio.
Host time is that of queueing a forward; launches are what the profiler counts on a card.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8engine.bench.cases import Shape, sqnr
from fp8engine.bench.run import machine
from fp8engine.bench.timing import Clock, clock, measure
from fp8engine.nn.linear import Linear
from fp8engine.numerics import cost
from fp8engine.ops import device

RECIPES = ("current", "delayed", "rowwise", "blockwise")
SETS = 2
# Of y, dx and dw against float64, in dB: E5M2 keeps two bits of a gradient, which leaves about 24 dB on random normal
# data (docs/numerics.md); 18 is a layer that is wrong and not only rounded.
LEAST_SQNR = 18.0
BASE = "bf16 nn.Linear"
HOST_CALLS = 30
# Target of DESIGN section 9 for `current`, as (M, K, N) there: tokens x in x out.
TARGETS = {(8192, 14336, 4096): 1.55, (8192, 4096, 4096): 1.45, (8192, 4096, 1024): 1.20, (8192, 1024, 1024): 1.0}
SHAPES = {
    "cuda": tuple(Shape(*shape) for shape in TARGETS),
    "cpu": (Shape(512, 512, 512), Shape(64, 256, 256)),
}


@dataclass(frozen=True)
class Variant:
    """A layer of that kind: (in, out, device) -> module.  Compiled: by torch.compile."""

    make: Callable[[int, int, torch.device], nn.Module]
    compiled: bool = False


def variants(where: torch.device, compiled: bool) -> dict[str, Variant]:
    """What can be measured there.  compiled: torch.compile as well, half a minute a variant."""
    found = {BASE: Variant(_bf16)}
    found |= {f"fp8engine {recipe}": Variant(_ours(recipe)) for recipe in RECIPES}
    if compiled:
        found["bf16 nn.Linear, compiled"] = Variant(_bf16, True)
        found |= {f"fp8engine {recipe}, compiled": Variant(_ours(recipe), True) for recipe in RECIPES}
        if where.type == "cuda" and importlib.util.find_spec("torchao") is not None:
            found["torchao tensorwise, compiled"] = Variant(_torchao, True)
    return found


def _bf16(inputs: int, outputs: int, where: torch.device) -> nn.Module:
    return nn.Linear(inputs, outputs, device=where, dtype=torch.bfloat16)


def _ours(recipe: str) -> Callable[[int, int, torch.device], nn.Module]:
    return lambda inputs, outputs, where: Linear(inputs, outputs, recipe=recipe, device=where, dtype=torch.bfloat16)


def _torchao(inputs: int, outputs: int, where: torch.device) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(nn.Sequential(_bf16(inputs, outputs, where)))


def linear(
    shapes: Sequence[Shape],
    where: torch.device,
    ways: dict[str, Variant] | None = None,
    ticks: Clock | None = None,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check and time every variant on every shape (M tokens, N outputs, K inputs): {"machine", "what", "rows"}."""
    ways = variants(where, where.type == "cuda") if ways is None else ways
    ticks = clock(where) if ticks is None else ticks
    turns = (30 if where.type == "cuda" else 9) if turns is None else turns
    rows = [row for shape in shapes for row in compare(shape, where, ways, ticks, turns)]
    what = "forward and backward" + ("" if device.has_fp8(where) else "; FP8 emulated: values, not speed")
    return {"machine": machine(where), "what": what, "rows": rows}


def compare(shape: Shape, where: torch.device, ways: dict[str, Variant], ticks: Clock, turns: int) -> list[dict]:
    """One shape's rows."""
    generator = torch.Generator(where).manual_seed(0)
    weight = torch.randn(shape.n, shape.k, generator=generator, device=where).mul_(shape.k**-0.5).bfloat16()
    sets = [
        (
            torch.randn(shape.m, shape.k, generator=generator, device=where).bfloat16().requires_grad_(),
            torch.randn(shape.m, shape.n, generator=generator, device=where).bfloat16(),
        )
        for _ in range(SETS)
    ]
    wanted = _exact(weight, *sets[0])
    rows, calls = {}, {}
    for name, way in ways.items():
        rows[name], step = _checked(name, way, shape, weight, sets, wanted)
        if rows[name]["correct"]:
            calls[name] = step
    times = measure(calls, ticks, turns) if calls else {}
    for name, timing in times.items():
        rows[name] |= {
            "seconds": timing.median,
            "spread": timing.spread,
            "over_bf16": times[BASE].median / timing.median if BASE in times else None,
            "target": TARGETS.get(shape) if where.type == "cuda" and name == "fp8engine current" else None,
            "model": cost.speedup(shape.m, shape.n, shape.k, "amax pass"),
        }
    return list(rows.values())


def _checked(name: str, way: Variant, shape: Shape, weight, sets, wanted) -> tuple[dict, Callable[[int], object]]:
    row: dict[str, Any] = {"name": name, "shape": list(shape), "correct": None}
    try:
        layer = way.make(shape.k, shape.n, weight.device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(weight if parameter.dim() == 2 else torch.zeros_like(parameter))
        run = torch.compile(layer, fullgraph=True) if way.compiled else layer
        parameter = next(each for each in layer.parameters() if each.dim() == 2)

        def step(turn: int):
            x, dy = sets[turn % SETS]
            x.grad = parameter.grad = None
            y = run(x)
            y.backward(dy)
            return y

        y = step(0)
        found = [part for part in (y, sets[0][0].grad, parameter.grad) if part is not None]
        row["sqnr"] = [round(sqnr(one, exact), 1) for one, exact in zip(found, wanted, strict=True)]
        row["host_us"] = _host_us(run, sets[0][0])
    except Exception as error:  # any: a kernel, a compiler or a peer that does not take this
        return row | {"why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}, lambda turn: None
    row["correct"] = min(row["sqnr"]) >= LEAST_SQNR
    return (row if row["correct"] else row | {"why": "wrong gradients: no time, no ratio"}), step


def _exact(weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w, x, dy = weight.double(), x.detach().double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


def _host_us(run: Callable, x: torch.Tensor) -> float:
    """Microseconds of the host for a forward, the card's own time left out (on a CPU they are the same)."""
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        run(x)
    taken = time.perf_counter() - start
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return 1e6 * taken / HOST_CALLS


def line(row: dict[str, Any]) -> str:
    """A row as plain text."""
    name = f"{row['name']:30s} {'x'.join(map(str, row['shape'])):16s}"
    if not row["correct"]:
        return f"{name} {'cannot run' if row['correct'] is None else 'WRONG'}: {row['why']}"
    ratio = "" if row["over_bf16"] is None else f"{row['over_bf16']:6.2f}x bf16"
    target = "" if row["target"] is None else f"   target {row['target']:.2f}"
    sqnr = "/".join(f"{value:.0f}" for value in row["sqnr"])
    return (
        f"{name} {1e3 * row['seconds']:9.3f} ms {row['spread']:5.0%} {ratio}   y/dx/dw {sqnr} dB"
        f"   host {row['host_us']:.0f} us{target}"
    )
