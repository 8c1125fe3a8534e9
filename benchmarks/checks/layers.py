"""Checks of whole layers: against their emulation, and on a card under CUDA graphs, torch.compile and sync alarms.

Each check returns what was wrong, or None.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.checks.matmuls import FAST_ERROR, OUTPUT_ERROR
from fp8engine.convert.swap import convert
from fp8engine.nn.linear import Linear
from fp8engine.ops import backends

RECIPES = ("current", "delayed", "rowwise", "blockwise")


def checks(where: torch.device, more: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of everything that can be checked there.  more: larger layers, for a card."""
    for recipe in ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise"):
        yield f"Linear, {recipe}: triton against reference", lambda recipe=recipe: emulated(where, recipe, more)


def card_checks(where: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of what only a CUDA device with FP8 Tensor Cores can show."""
    for recipe in RECIPES:
        yield f"Linear, {recipe}: captured in a CUDA graph", lambda recipe=recipe: captured(where, recipe)
        yield f"Linear, {recipe}: no waiting in a step", lambda recipe=recipe: waits(where, recipe)
        yield f"Linear, {recipe}: torch.compile equals eager", lambda recipe=recipe: compiled(where, recipe)
        yield f"Linears, {recipe}: CUDA graphs of torch.compile", lambda recipe=recipe: reduced(where, recipe)
    if importlib.util.find_spec("numpy"):  # `auto` decides with it
        yield "Linear, auto: no waiting in steps that sample, copy and decide", lambda: waits(where, "auto", 4)


def emulated(where: torch.device, recipe: str, more: bool) -> str | None:
    """A Linear's output and gradients on our kernels, against the same layer emulated.

    Both multiply the same FP8 values; they differ by accumulation (FAST_ERROR) and by roundings to BF16, one in ours
    and two in the emulation.
    """
    m, n, k = (512, 1024, 768) if more else (48, 80, 64)
    results = []
    for name in ("triton", "reference"):
        torch.manual_seed(0)
        made = Linear(k, n, recipe=recipe, device=where, dtype=torch.bfloat16)
        x = torch.randn(m, k, device=where, dtype=torch.bfloat16).requires_grad_()
        with backends.backend(name):
            y = made(x)
            y.backward(torch.randn(m, n, device=where, dtype=torch.bfloat16))
        bias = made.bias.grad if made.bias is not None else None
        results.append((y.detach(), x.grad, made.weight.grad, bias))
    limit = FAST_ERROR + 3 * OUTPUT_ERROR[torch.bfloat16]
    for name, ours, emulated in zip(("y", "dx", "dw", "db"), *results, strict=True):
        error = ((ours.double() - emulated.double()).norm() / emulated.double().norm()).item()
        if not error <= limit:
            return f"{name}: relative difference {error:.2e}, limit {limit:.2e}"
    return None


def captured(where: torch.device, recipe: str) -> str | None:
    """Forward and backward captured once and replayed on other data and weights equal eager code."""
    for name in _backends(recipe):
        with backends.backend(name):
            made, x, dy = _layer(where, recipe)
            side = torch.cuda.Stream(where)
            side.wait_stream(torch.cuda.current_stream(where))
            with torch.cuda.stream(side):  # warm up: kernels are compiled, gradients allocated
                for _ in range(3):
                    made(x).backward(dy)
            torch.cuda.current_stream(where).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            made.zero_grad(set_to_none=True)
            x.grad = None
            with torch.cuda.graph(graph):
                y = made(x)
                y.backward(dy)
            written = _parts(y, x, made)  # by every replay
            for replay in (1, 2):
                with torch.no_grad():
                    x.copy_(torch.randn_like(x) / 2)  # within the range seen: a predicted scale stays as it is
                    made.weight.data.mul_(-0.75)  # as an optimizer's step inside the graph: no counter moves
                graph.replay()
                replayed = {part: tensor.clone() for part, tensor in written.items()}
                made.zero_grad(set_to_none=True)
                x.grad = None
                y = made(x)
                y.backward(dy)
                if wrong := _apart(replayed, _parts(y, x, made), 1e-2):
                    return f"{name}, replay {replay}, {wrong}"
    return None


def waits(where: torch.device, recipe: str, steps: int = 1) -> str | None:
    """Training steps under torch's alarm for calls that wait for the card."""
    for name in _backends(recipe):
        with backends.backend(name):
            made, x, dy = _layer(where, recipe)
            made(x).backward(dy)
            torch.cuda.synchronize(where)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(steps):
                    made(x).backward(dy)
            except RuntimeError as error:
                return f"{name}: {error}"
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return None


def compiled(where: torch.device, recipe: str) -> str | None:
    """One whole graph, forward and backward, against eager code."""
    made, x, dy = _layer(where, recipe)
    y = made(x)
    y.backward(dy)
    wanted = _parts(y, x, made)
    made, x, dy = _layer(where, recipe)
    y = torch.compile(made, fullgraph=True)(x)
    y.backward(dy)
    return _apart(_parts(y, x, made), wanted, 1e-3)


def reduced(where: torch.device, recipe: str) -> str | None:
    """Six steps of two layers compiled one by one in mode "reduce-overhead": values and tables are the compiled ones'.

    What a layer writes to the scaling tables is not declared to torch.compile: a CUDA graph that worked on a copy of a
    table would lose it.
    """
    draw = lambda: torch.randn(256, 512, device=where, dtype=torch.bfloat16)  # noqa: E731
    data = [(draw() * size, draw()) for size in (1, 2, 4, 1, 2, 8)]  # amaxes that a table which is not written has not
    found = []
    for mode in ("reduce-overhead", None):
        torch.compiler.reset()
        torch.manual_seed(0)
        layers: list[Any] = [torch.nn.Linear(512, 512) for _ in range(2)]
        model = convert(torch.nn.Sequential(*layers).to(where, torch.bfloat16), recipe)
        for layer in model:
            layer.compile(fullgraph=True, mode=mode)
        for x, dy in data:
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad(set_to_none=True)
            x = x.clone().requires_grad_()
            y = model(x)
            y.backward(dy)
        first: Any = model[0]
        state = first.numerics.state
        tables = {"amaxes": state.history_HS, "live": state.live_2S, "counts": state.counts_CS}
        found.append(tables | {"y": y, "dx": x.grad, "dw": first.weight.grad})
        found[-1] = {name: part.detach().clone() for name, part in found[-1].items()}
    for name, part in found[1].items():
        if not torch.equal(part, found[0][name]):
            apart = (part != found[0][name]).sum().item()
            return f"{name}: {apart} of {part.numel()} elements differ from what is compiled without CUDA graphs"
    return None if found[1]["counts"][0].min() > 0 else "no calls were counted"


def _backends(recipe: str) -> tuple[str, ...]:
    return ("triton",) if recipe == "blockwise" else ("triton", "cublas")


def _layer(where: torch.device, recipe: str) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    made = Linear(768, 1024, recipe=recipe, device=where, dtype=torch.bfloat16)
    x = torch.randn(512, 768, device=where, dtype=torch.bfloat16).requires_grad_()
    return made, x, torch.randn(512, 1024, device=where, dtype=torch.bfloat16)


def _parts(y: torch.Tensor, x: torch.Tensor, made: Linear) -> dict[str, torch.Tensor]:
    parts = {"y": y.detach(), "dx": x.grad, "dw": made.weight.grad}
    return {name: part for name, part in parts.items() if part is not None}


def _apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], limit: float) -> str | None:
    for name, part in wanted.items():
        error = ((found[name].double() - part.double()).norm() / part.double().norm()).item()
        if not error <= limit:
            return f"{name}: relative difference {error:.2e}, limit {limit:.0e}"
    return None
