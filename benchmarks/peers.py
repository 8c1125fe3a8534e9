"""Benchmarks of peers on a card: Inductor's fused casts, a CUDA graph beside eager code, the host's time.

    Inductor's cast   torch.compile of scale, clamp and cast, with a scale given and with the tensor's own amax
    CUDA graph        a Linear's forward and backward captured once and replayed, no host in it

Each is checked like the rest: casts against the reference bit for bit, a graph against eager code.  Run by `make gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import graphs as cuda_graphs
from benchmarks.casts import PER_TENSOR, SETS, WAYS, Way
from fp8engine.bench import harness, linear, steps
from fp8engine.bench.cases import Shape, sqnr
from fp8engine.bench.harness import Limits, Row, Timer
from fp8engine.nn.linear import Linear
from fp8engine.numerics.formats import E4M3
from fp8engine.ops.reference import quantize


class Graph(NamedTuple):
    """A Linear to capture.  recipe: None for nn.Linear in BF16."""

    shape: Shape
    recipe: str | None

    def __str__(self) -> str:
        return f"{self.recipe or 'bf16 nn.Linear'} {self.shape}"


# A layer bound by the host, where a graph shows what it costs, and one bound by the card.
GRAPHS = tuple(
    Graph(shape, recipe)
    for shape in (Shape(512, 1024, 1024), Shape(8192, 4096, 4096))
    for recipe in (None, *linear.RECIPES)
)


def graphs(case: Graph, where: torch.device, timer: Timer) -> list[Row]:
    """Forward and backward, eager and captured; "host_us" is the host's time for an eager forward."""
    torch.manual_seed(0)
    (m, n, k), recipe = case.shape, case.recipe
    if recipe is None:
        layer: torch.nn.Module = torch.nn.Linear(k, n, device=where, dtype=torch.bfloat16)
    else:
        layer = Linear(k, n, recipe=recipe, device=where, dtype=torch.bfloat16)
    x = torch.randn(m, k, device=where, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(m, n, device=where, dtype=torch.bfloat16)

    def step(turn: int) -> tuple[torch.Tensor, ...]:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        y = layer(x)
        y.backward(dy)
        return tuple(part for part in (y.detach(), x.grad) if part is not None)

    def eager(row: Row) -> harness.Call:
        for turn in range(steps.WARM_UP):
            step(turn)
        row |= {"host_us": linear.host_us(layer, x), "correct": True}
        return step

    def captured(row: Row) -> harness.Call:
        graph, written = cuda_graphs.captured(step, where)
        graph.replay()
        found = [part.clone() for part in written]
        # The same kernels on the same values: only a predicted scale may move between the two, by a part of an octave.
        row["sqnr"] = [round(sqnr(one, other), 1) for one, other in zip(found, step(0), strict=True)]
        row["correct"] = min(row["sqnr"]) >= linear.LEAST_SQNR
        return lambda turn: graph.replay()

    derive = lambda name, seconds, over: {"over_eager": over("eager")}  # noqa: E731
    common = {"case": str(case.recipe or linear.BASE), "shape": list(case.shape)}
    return harness.compare(common, {"eager": eager, "CUDA graph": captured}, derive, timer)


def inductor_casts(shape: tuple[int, int], where: torch.device, timer: Timer, limits: Limits) -> list[Row]:
    """Our casts per tensor and what torch.compile makes of the same arithmetic, BF16 [M, K], in one series."""
    generator = torch.Generator(where).manual_seed(0)
    sets = [torch.randn(*shape, generator=generator, device=where, dtype=torch.bfloat16) for _ in range(SETS)]
    one = torch.full((), E4M3.max / 16, device=where)  # nothing of random normal data saturates under it

    def given(x: torch.Tensor) -> torch.Tensor:
        return (x.float() * one).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)

    def own(x: torch.Tensor) -> torch.Tensor:
        scale = E4M3.max / x.abs().amax().float()
        return (x.float() * scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)

    def check(row: Row, cast: Callable[[torch.Tensor], torch.Tensor], exact: torch.Tensor | None) -> harness.Call:
        run = torch.compile(cast, fullgraph=True)
        codes = run(sets[0])
        if exact is None:  # its scale may be an ulp off ours: compare values
            wanted = quantize(sets[0], PER_TENSOR)[0]
            row["sqnr"] = round(sqnr(codes.float(), wanted.float()), 1)
            row["correct"] = row["sqnr"] >= linear.LEAST_SQNR
        else:
            row["correct"] = torch.equal(codes.view(torch.uint8), exact.view(torch.uint8))
        return lambda turn: run(sets[turn % SETS])

    def ours(row: Row, way: Way) -> harness.Call:
        row["correct"] = True  # the group "casts" has compared it
        return lambda turn: way.run(sets[turn % SETS], None)

    def derive(name: str, seconds: float, over: Callable) -> Row:
        rate = WAYS["tensor, predicted" if "given" in name else "tensor"].bytes(sets[0]) / seconds
        return {"gb_per_s": rate / 1e9, "of_copy": rate / limits.bytes}

    checks = {
        "tensor (beside Inductor)": lambda row: ours(row, WAYS["tensor"]),
        "Inductor, scale given": lambda row: check(row, given, given(sets[0])),
        "Inductor, its own amax": lambda row: check(row, own, None),
    }
    return harness.compare({"shape": list(shape)}, checks, derive, timer)
