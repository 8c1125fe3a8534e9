"""Benchmark of a linear layer: forward and backward under every recipe, beside nn.Linear in BF16 and torchao.

    over_bf16   the time of BF16 nn.Linear's forward and backward over the variant's, medians in one run

A result is right if y, dx and dw are no further from float64 than FP8 explains.  Host time is that of queueing a
forward while the card is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8engine.bench import harness
from fp8engine.bench.cases import Shape
from fp8engine.bench.harness import Row, Timer
from fp8engine.bench.steps import RECIPES, TRAINING, Right, Variant, as_graphs, bf16
from fp8engine.nn.linear import Linear
from fp8engine.numerics.cards import card_of
from fp8engine.numerics.recipe import resolve
from fp8engine.ops import device
from fp8engine.ops.cost import Setting, speedup

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


def variants(where: torch.device, in_graphs: bool) -> dict[str, Variant]:
    """Variants of a layer that can be measured there.  in_graphs: by torch.compile as well, half a minute each."""
    found = {BASE: Variant(bf16)} | {f"fp8engine {recipe}": Variant(_ours(recipe)) for recipe in RECIPES}
    return found | (as_graphs(found, where) if in_graphs else {})


def _ours(recipe: str) -> Callable[[Any], nn.Module]:
    """Not by `fe.convert`, which would leave a layer alone, in 16 bits, that FP8 has no kernel for."""

    def make(plain: nn.Linear) -> nn.Module:
        where = plain.weight.device
        layer = Linear(plain.in_features, plain.out_features, recipe=recipe, device=where, dtype=torch.bfloat16)
        layer.load_state_dict(plain.state_dict())
        return layer

    return make


def linear(
    shapes: Sequence[Shape], where: torch.device, ways: dict[str, Variant] | None = None, timer: Timer | None = None
) -> dict[str, Any]:
    """Check and time every variant on every shape (M tokens, N outputs, K inputs): {"machine", "what", "rows"}."""
    ways = variants(where, where.type == "cuda") if ways is None else ways
    timer = timer or Timer.of(where, 30, 9)
    return harness.result(where, TRAINING, [row for shape in shapes for row in compare(shape, where, ways, timer)])


def compare(shape: Shape, where: torch.device, ways: Mapping[str, Variant], timer: Timer) -> list[Row]:
    """One shape's rows."""
    random = torch.Generator(where).manual_seed(0)

    def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        """Numbers that BF16 has, in FP64."""
        return torch.randn(rows, columns, generator=random, device=where).mul_(scale).bfloat16().double()

    plain = nn.Linear(shape.k, shape.n, device=where, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(drawn(shape.n, shape.k, shape.k**-0.5))
        plain.bias.zero_()
    pairs = [(drawn(shape.m, shape.k).requires_grad_(), drawn(shape.m, shape.n)) for _ in range(2)]
    right = Right(plain, pairs, (LEAST_SQNR,) * 3)

    def check(row: Row, way: Variant) -> harness.Call:
        _, forward, step = right.check(row, way)
        row["host_us"] = host_us(forward, pairs[0][0].to(torch.bfloat16))
        return step

    def derive(name: str, seconds: float, over: Callable) -> Row:
        target = TARGETS.get(shape) if where.type == "cuda" and name == "fp8engine current" else None
        return {"over_bf16": over(BASE), "target": target, "predicted": predicted(name, shape, where)}

    checks = {name: lambda row, way=way: check(row, way) for name, way in ways.items()}
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
