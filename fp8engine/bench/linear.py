"""Benchmark of a linear layer: forward and backward under every recipe, beside nn.Linear in BF16 and torchao.

    over_bf16   the time of BF16 nn.Linear's forward and backward over the variant's, medians in one run

A result is right if y, dx and dw are no further from float64 than FP8 explains.  Host time is that of queueing a
forward while the card is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8engine.bench import harness
from fp8engine.bench.cases import Shape, sqnr
from fp8engine.bench.harness import Row, Timer
from fp8engine.bench.steps import RECIPES, Variant, as_graphs, bf16, training
from fp8engine.bench.timing import Clock
from fp8engine.nn.linear import Linear
from fp8engine.numerics.cards import card_of
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import device
from fp8engine.ops.cost import Setting, speedup

SETS = 2
# Of y, dx and dw against float64, in dB: E5M2 keeps two bits of a gradient, which leaves about 24 dB on random normal
# data (docs/numerics.md); 18 is a layer that is wrong and not only rounded.
LEAST_SQNR = 18.0
BASE = "bf16 nn.Linear"
HOST_CALLS = 30
HEAD_START = 80_000_000  # cycles that the card spins for: 40 ms, more than a millisecond a call
# Target of DESIGN section 9 for `current`, as (M, K, N) there: tokens x in x out.
TARGETS = {(8192, 14336, 4096): 1.55, (8192, 4096, 4096): 1.45, (8192, 4096, 1024): 1.20, (8192, 1024, 1024): 1.0}
SHAPES = {
    "cuda": tuple(Shape(*shape) for shape in TARGETS),
    "cpu": (Shape(512, 512, 512), Shape(64, 256, 256)),
}


def variants(where: torch.device, compiled: bool) -> dict[str, Variant]:
    """Variants of a layer that can be measured there.  compiled: torch.compile as well, half a minute a variant."""
    found = {BASE: Variant(bf16)} | {f"fp8engine {recipe}": Variant(_ours(recipe)) for recipe in RECIPES}
    return found | (as_graphs(found, where) if compiled else {})


def _ours(recipe: str) -> Callable[[Any], nn.Module]:
    """Not by `fe.convert`, which would leave a layer alone, in 16 bits, that FP8 has no kernel for."""
    return lambda plain: Linear(
        plain.in_features, plain.out_features, recipe=recipe, device=plain.weight.device, dtype=torch.bfloat16
    )


def linear(
    shapes: Sequence[Shape],
    where: torch.device,
    ways: dict[str, Variant] | None = None,
    ticks: Clock | None = None,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check and time every variant on every shape (M tokens, N outputs, K inputs): {"machine", "what", "rows"}."""
    ways = variants(where, where.type == "cuda") if ways is None else ways
    timer = Timer.of(where, ticks, turns, (30, 9))
    rows = [row for shape in shapes for row in compare(shape, where, ways, timer)]
    return harness.result(where, harness.training_on(where), rows)


def compare(shape: Shape, where: torch.device, ways: dict[str, Variant], timer: Timer) -> list[Row]:
    """One shape's rows."""
    random = torch.Generator(where).manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=random, device=where)  # noqa: E731
    weight = normal(shape.n, shape.k).mul_(shape.k**-0.5).bfloat16()
    sets = [
        (normal(shape.m, shape.k).bfloat16().requires_grad_(), normal(shape.m, shape.n).bfloat16()) for _ in range(SETS)
    ]
    wanted = _exact(weight, *sets[0])

    def derive(name: str, seconds: float, over: Callable) -> Row:
        target = TARGETS.get(shape) if where.type == "cuda" and name == "fp8engine current" else None
        return {"over_bf16": over(BASE), "target": target, "predicted": predicted(name, shape, where)}

    checks = {name: lambda row, way=way: _checked(row, way, weight, sets, wanted) for name, way in ways.items()}
    return harness.compare({"shape": list(shape)}, checks, derive, timer)


def predicted(name: str, shape: Shape, where: torch.device) -> float | None:
    """The predicted over_bf16 of one of our variants on a card with FP8 Tensor Cores; None for others.

    >>> predicted("fp8engine current", Shape(8192, 4096, 4096), torch.device("cpu"))
    """
    recipe = name.removeprefix("fp8engine ").split(",")[0]
    if recipe not in RECIPES or not device.has_fp8(where):
        return None
    card = card_of(device.name(where), device.processors(where))
    return speedup(resolve(recipe), *shape, card, Setting(bias=True))


def _checked(row: Row, way: Variant, weight: torch.Tensor, sets, wanted) -> harness.Call:
    outputs, inputs = weight.shape
    layer = way.make(nn.Linear(inputs, outputs, device=weight.device, dtype=torch.bfloat16))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(weight if parameter.dim() == 2 else torch.zeros_like(parameter))
    parameter = next(each for each in layer.parameters() if each.dim() == 2)
    run, step = training(way, layer, sets)
    found = [part for part in (step(0), sets[0][0].grad, parameter.grad) if part is not None]
    row["sqnr"] = [round(sqnr(one, exact), 1) for one, exact in zip(found, wanted, strict=True)]
    row["host_us"] = host_us(run, sets[0][0])
    row["correct"] = min(row["sqnr"]) >= LEAST_SQNR
    if not row["correct"]:
        row["why"] = "wrong gradients: no time, no ratio"
    return step


def _exact(weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w, x, dy = weight.double(), x.detach().double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


def host_us(run: Callable, x: torch.Tensor, card: Any = torch.cuda) -> float | None:
    """Microseconds of the host for a forward, while the card is busy with something else (on a CPU: for all of it).

    A card that is done would make the host's time that of the card.  None where it was done before the host was.
    card: the part of torch.cuda that it uses (Event, _sleep, synchronize).
    """
    if x.device.type != "cuda":
        return 1e6 * _seconds(run, x) / HOST_CALLS
    card.synchronize(x.device)
    free = card.Event()
    card._sleep(HEAD_START)
    free.record()
    taken = _seconds(run, x)
    busy = not free.query()
    card.synchronize(x.device)
    return 1e6 * taken / HOST_CALLS if busy else None


def _seconds(run: Callable, x: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        run(x)
    return time.perf_counter() - start


def line(row: Row) -> str:
    """A row as plain text."""
    errors = "/".join(f"{value:.0f}" for value in row.get("sqnr", ()))
    return harness.line(
        f"{row['name']:30s} {'x'.join(map(str, row['shape'])):16s}",
        row,
        ("ms", "{:9.3f} ms"),
        ("spread", " {:5.0%} "),
        ("over_bf16", "{:6.2f}x bf16"),
        ("host_us", f"   y/dx/dw {errors} dB   host {{:.0f}} us"),
        ("target", "   target {:.2f}"),
        ("predicted", "   predicted {:.2f}"),
    )
