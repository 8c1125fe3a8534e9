"""The work of each group, in the group's own process: check or measure one thing, write it down, take the next.

A group ends by itself shortly before its time is over, and says what it did not reach.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import block, casts, checks, experts, generate, graphs, model, networks, peers
from benchmarks.card import sweep
from benchmarks.card.gluon import gluon_variants
from benchmarks.card.plan import CHUNKS
from benchmarks.card.records import Sink
from benchmarks.checks import smoke
from fp8engine.bench import cases, gemm, harness, linear, steps
from fp8engine.bench.harness import Limits, Timer
from fp8engine.ops import device, triton_backend

WHEELS = ".whl"  # a folder of the checkout: a wheel of torchao carried there is a peer


class Group:
    """What a group's work is given.  stop: the time.perf_counter() at which nothing new is begun."""

    def __init__(self, where: torch.device, sink: Sink, stop: float):
        self.where, self.sink, self.stop = where, sink, stop

    def each(self, things: Iterable[Any], do: Callable[[Any], None], name: Callable[[Any], str] = str) -> None:
        """Do it for each thing while there is time.  An error of one is noted, and the next is tried."""
        things = list(things)
        for done, thing in enumerate(things):
            if time.perf_counter() > self.stop:
                self.sink.write("note", text=f"no time for {len(things) - done} of {len(things)}: {name(thing)} ...")
                return
            self.sink.begin(name(thing))
            try:
                do(thing)
            except Exception as error:  # any: one that fails must not hide the others
                traceback.print_exc()
                self.sink.write("check", name=name(thing), wrong=harness.reason(error), raised=True)
                if fatal(error):
                    raise
                if self.where.type == "cuda":
                    torch.cuda.empty_cache()  # what ran out of memory must leave it to the next

    def checks(self, every: Iterable[tuple[str, Callable[[], str | None]]]) -> None:
        """Run checks, each until its kernels are done."""

        def one(named: tuple[str, Callable[[], str | None]]) -> None:
            start = time.perf_counter()
            wrong = named[1]()
            if self.where.type == "cuda":
                torch.cuda.synchronize(self.where)
            self.sink.write("check", name=named[0], wrong=wrong, seconds=round(time.perf_counter() - start, 2))

        self.each(every, one, lambda named: named[0])

    def timer(self, turns: int) -> Timer:
        """The card's clock."""
        return Timer.of(self.where, turns, turns)


def fatal(error: Exception) -> bool:
    """Whether nothing can run in this process any more: the CUDA context is lost.

    >>> fatal(RuntimeError("CUDA error: an illegal memory access was encountered")), fatal(ValueError("K"))
    (True, False)
    """
    return "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError)


def run_smoke(group: Group) -> None:
    """The short checks."""
    group.checks(smoke.checks(group.where))


def run_checks(group: Group, part: int) -> None:
    """One of CHUNKS parts of all other checks."""
    on_card = [(name, one) for name, one in checks.card_checks(group.where) if "gluon" not in name]
    every = [*checks.checks(group.where, more=True), *on_card]
    if part == 0 and importlib.util.find_spec("numpy") is None:
        group.sink.write("note", text="not checked: `auto`, which needs NumPy")
    mine = every[part * len(every) // CHUNKS : (part + 1) * len(every) // CHUNKS]
    # Without a card there are no graphs and no streams; those checks launch what the others do.
    group.checks(one for one in mine if group.where.type == "cuda" or one not in on_card)


def run_gemm(group: Group, shapes: Iterable[cases.Shape]) -> None:
    """Every matmul there is, on these shapes."""
    ways = gemm.variants("cuda", device.capability(group.where), triton_backend.usable())
    timer = group.timer(30)
    limits = _limits(group, timer)

    def one(shape: cases.Shape) -> None:
        with torch.no_grad():
            group.sink.rows("gemm", gemm.measured(shape, group.where, ways, timer, limits))

    group.each(shapes, one)


def run_casts(group: Group) -> None:
    """Every cast."""
    timer = group.timer(30)
    limits = _limits(group, timer)

    def one(shape: tuple[int, int]) -> None:
        with torch.no_grad():
            group.sink.rows("casts", casts.compare(shape, group.where, timer, limits))

    group.each(casts.SHAPES["cuda"], one)


def run_experts(group: Group) -> None:
    """The grouped matmuls of experts."""
    timer = group.timer(20)

    def one(case: experts.Case) -> None:
        with torch.no_grad():
            group.sink.rows("experts", experts.compare(case, group.where, timer))

    group.each(experts.CASES, one)


def run_sweep(group: Group) -> None:
    """Every configuration of the FP8 matmuls, beside its predicted time."""
    failed = lambda name, why: group.sink.write("check", name=name, wrong=why, raised=True)  # noqa: E731

    def one(shape: cases.Shape) -> None:
        with torch.no_grad():
            group.sink.rows("sweep", sweep.sweep(group.where, shape, failed))

    group.each(by_value(sweep.ALL), one)


def run_linear(group: Group) -> None:
    """A Linear, eager."""
    ways, timer = linear.variants(group.where, in_graphs=False), group.timer(20)
    group.each(
        linear.SHAPES["cuda"], lambda it: group.sink.rows("linear", linear.compare(it, group.where, ways, timer))
    )


def run_tuned(group: Group) -> None:
    """The same on what the card's trials choose.  What they say of themselves is kept."""
    told, log = logging.Handler(), logging.getLogger("fp8engine")
    told.emit = lambda record: group.sink.write("note", text=record.getMessage())  # type: ignore[method-assign]
    ways, timer = linear.variants(group.where, in_graphs=False), group.timer(20)
    log.addHandler(told)
    group.each(linear.SHAPES["cuda"], lambda it: group.sink.rows("tuned", linear.compare(it, group.where, ways, timer)))
    log.removeHandler(told)


def run_block(group: Group) -> None:
    """Decoder blocks, eager."""
    ways, timer = networks.variants(group.where, in_graphs=False), group.timer(10)
    group.each(block.CASES["cuda"], lambda it: group.sink.rows("steps", steps.compare(it, group.where, ways, timer)))


def run_model(group: Group) -> None:
    """A model that the host bounds in eager code; compiled, and in CUDA graphs, which need no host."""
    names, eager = (steps.BASE, "fp8engine current"), steps.variants(group.where, in_graphs=False)
    by_compile = "CUDA graphs"
    every = {name: eager[name] for name in names}
    if group.where.type == "cuda":
        runs = {"compiled": steps.compiled, by_compile: graphs.by_compile, "one CUDA graph": graphs.whole}
        more = [(name, way) for name in names for way in runs]
        more += [(f"fp8engine {recipe}", by_compile) for recipe in steps.RECIPES[1:]]
        every |= {f"{name}, {way}": eager[name]._replace(run=runs[way]) for name, way in more}
        if reason := without_torchao():
            group.sink.write("note", text=f"torchao {harness.NOT_MEASURED}: {reason}")
        else:
            every[f"torchao tensorwise, {by_compile}"] = steps.Variant(steps.torchao, graphs.by_compile)
    timer = group.timer(10)
    group.each(
        model.CASES["cuda"][:1],
        lambda it: group.sink.rows("steps", steps.compare(it, group.where, every, timer)),
    )


def run_host(group: Group) -> None:
    """The host's time of a Linear, and CUDA graphs."""
    group.each(peers.GRAPHS, lambda it: group.sink.rows("graphs", peers.graphs(it, group.where, group.timer(20))))


def run_compiled(group: Group) -> None:
    """What torch.compile makes, ours and others'."""
    reason = without_torchao()
    timer = group.timer(20)
    limits = _limits(group, timer)
    group.each(
        casts.SHAPES["cuda"][:1],
        lambda it: group.sink.rows("casts", peers.inductor_casts(it, group.where, timer, limits)),
        lambda it: f"Inductor's cast {it}",
    )
    names = (linear.BASE, "bf16 nn.Linear, compiled", "torchao tensorwise, compiled", "fp8engine current, compiled")
    ways = {name: way for name, way in linear.variants(group.where, in_graphs=True).items() if name in names}
    for shape in linear.SHAPES["cuda"][:2] if reason else ():
        row = {"name": names[2], "shape": list(shape), "correct": None, "why": f"{harness.NOT_MEASURED}: {reason}"}
        group.sink.rows("linear", [row])
    group.each(
        linear.SHAPES["cuda"][:2],
        lambda it: group.sink.rows("linear", linear.compare(it, group.where, ways, timer)),
        lambda it: f"compiled Linear {it}",
    )
    names = (steps.BASE, steps.COMPILED, "torchao tensorwise, compiled", "layer current, compiled")
    blocks = {name: way for name, way in networks.variants(group.where, in_graphs=True).items() if name in names}
    group.each(
        block.CASES["cuda"][:1],
        lambda it: group.sink.rows("steps", steps.compare(it, group.where, blocks, timer)),
        lambda it: f"compiled {it}",
    )


def run_generate(group: Group) -> None:
    """Generation."""
    ways, timer = generate.variants(), group.timer(5)
    group.each(
        generate.CASES["cuda"],
        lambda it: group.sink.rows("generate", generate.compare(it, group.where, ways, timer)),
    )


def run_gluon(group: Group) -> None:
    """The warp-specialised matmul: its checks, then its time beside the Triton one's and torch's."""
    if device.capability(group.where) != (9, 0):
        group.sink.write("note", text="not measured: the Gluon kernel is written for sm_90")
        return
    group.checks((name, one) for name, one in checks.card_checks(group.where) if "gluon" in name)
    ways, timer = gluon_variants(), group.timer(30)
    limits = _limits(group, timer)

    def one(shape: cases.Shape) -> None:
        with torch.no_grad():
            group.sink.rows("gemm", gemm.measured(shape, group.where, ways, timer, limits))

    group.each(by_value(cases.LLM)[:3], one)


def by_value(shapes: Iterable[cases.Shape]) -> list[cases.Shape]:
    """The largest matmul first: the least disturbed by anything but the Tensor Cores."""
    return sorted(dict.fromkeys(shapes), key=lambda shape: -shape.flops)


def _limits(group: Group, timer: Timer) -> Limits:
    group.sink.begin("limits of this card")
    with torch.no_grad():
        limits = harness.limits(group.where, timer.clock)
    group.sink.write("limits", flops=limits.flops, bytes=limits.bytes)
    return limits


def without_torchao(root: Path = Path(__file__).parents[2]) -> str | None:
    """Why torchao is no peer here, or None: it is installed, on PYTHONPATH, or a wheel of it lies in .whl."""
    if importlib.util.find_spec("torchao") is None:
        for wheel in sorted((root / WHEELS).glob("torchao-*.whl")):
            folder = tempfile.mkdtemp(prefix="torchao-")
            zipfile.ZipFile(wheel).extractall(folder)
            sys.path.append(folder)
            importlib.invalidate_caches()
    if importlib.util.find_spec("torchao") is None:
        return f"no torchao: put a folder that holds it on PYTHONPATH, or its wheel into {WHEELS}/"
    try:
        importlib.import_module("torchao.float8")
    except Exception as error:  # any: another package's import
        return f"torchao cannot be imported: {harness.reason(error)}"
    return None


WORK: dict[str, Callable[[Group], None]] = {
    "smoke": run_smoke,
    "gemm": lambda group: run_gemm(group, by_value(cases.LLM)),
    "casts": run_casts,
    "experts": run_experts,
    "sweep": run_sweep,
    "linear": run_linear,
    "block": run_block,
    "host": run_host,
    "compiled": run_compiled,
    "tuned": run_tuned,
    "few": lambda group: run_gemm(group, by_value((*cases.FEW_TOKENS, *cases.SQUARE))),
    "generate": run_generate,
    "model": run_model,
    "gluon": run_gluon,
} | {f"checks-{part + 1}": lambda group, part=part: run_checks(group, part) for part in range(CHUNKS)}
