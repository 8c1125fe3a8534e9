"""Checks that need a card: CUDA graphs, no waiting in a step, compiled code, the warp-specialised kernel.

Each check returns what was wrong, or None; `fp8engine.bench.check` has those that need no card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fp8engine.bench import check
from fp8engine.nn.linear import Linear
from fp8engine.numerics.formats import E4M3
from fp8engine.ops import backends, device, triton_backend
from fp8engine.ops.reference import Epilogue

RECIPES = ("current", "delayed", "rowwise", "blockwise")


def checks(where: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) for a CUDA device with FP8 Tensor Cores."""
    for recipe in RECIPES:
        yield f"Linear, {recipe}: captured in a CUDA graph", lambda recipe=recipe: captured(where, recipe)
        yield f"Linear, {recipe}: no waiting in a step", lambda recipe=recipe: waits(where, recipe)
        yield f"Linear, {recipe}: torch.compile equals eager", lambda recipe=recipe: compiled(where, recipe)
    yield "Linear, auto: no waiting in steps that look, read and decide", lambda: waits(where, "auto", 4)
    yield "a matmul is one launch", lambda: launches(where)
    if device.capability(where) == (9, 0):
        for promoted in (False, True):
            name = "promoted" if promoted else "fast"
            yield f"matmul_gluon, {name}: equals its twin bit for bit", lambda promoted=promoted: gluon(where, promoted)


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


def launches(where: torch.device) -> str | None:
    """Kernels that one matmul of operands contiguous along K starts."""
    a, b = (check._integers(where, 256, 512, E4M3, by_row=False) for _ in "ab")
    end = Epilogue()
    triton_backend.matmul(a, b, end)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        triton_backend.matmul(a, b, end)
        torch.cuda.synchronize(where)
    names = [event.name for event in (profile.events() or ()) if event.device_type == torch.autograd.DeviceType.CUDA]
    return None if len(names) == 1 else f"{len(names)}: {names}"


def gluon(where: torch.device, promoted: bool) -> str | None:
    """The warp-specialised kernel against the Triton one: integers, and random data, whose sums come in one order."""
    from fp8engine.kernels.matmul_fp8 import matmul_fp8
    from fp8engine.kernels.matmul_gluon import matmul_gluon, unsupported
    from fp8engine.kernels.tuning import Config

    config = Config(128, 128, 128, kernel="gluon") if promoted else Config(128, 256, 128, parts=2, kernel="gluon")
    for m, n, k in ((1, 8, 16), (64, 64, 128), (130, 264, 144), (1024, 2048, 4096), (4100, 1032, 2064)):
        for by_row in (False, True):
            a, b = (check._integers(where, rows, k, E4M3, by_row) for rows in (m, n))
            end = Epilogue(torch.randint(-3, 4, (n,), device=where).bfloat16() if by_row else None)
            if reason := unsupported(a, b, end):
                return f"{m}x{n}x{k}: {reason}"
            found, twin = matmul_gluon(a, b, end, promoted, config), matmul_fp8(a, b, end, promoted)
            if not torch.equal(found, twin):
                return f"{m}x{n}x{k}, by_row={by_row}: {int((found != twin).sum())} of {twin.numel()} differ"
    return None


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
