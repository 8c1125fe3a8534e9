"""Search for the fastest configuration of each kernel on this card: verified, measured, written into tuning.json.

For each operation and shape class, one step after another, starting from the committed configuration:

    1. tiles and warps    2. stages and parts    3. order of tiles, flattened loops
    4. cuts of K (split_k.py), in the classes that may have few tiles    5. descriptors, Gluon

Within a step every candidate runs on every shape of the class, those that are predicted to be the fastest first
(ops/predicted.py), BATCH at a time: its result is checked, then it is timed in turns with the others and with what
would run otherwise.  The highest geometric mean over the shapes goes on to the next step.  Where the time is up, the
rest is left untried, and its rows say so: the prediction gives the order, the measurement the configuration.

    ratio = the other's time / ours, the least over the shapes, rounded down

so whoever takes a kernel from 1.0 on takes only what was measured faster at every shape.  The other is torch's scaled
matmul (padded where it must be), torch's 16-bit matmul for matmul_fp16; for matmul_block the emulated matmul where
torch's scaled matmul has no scales in blocks.

    python -m benchmarks.tune [--operation NAME] [--shapes tune] [--write] [--limit SECONDS] [--json]
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.common import WHERE, parser
from benchmarks.tuning_table import difference, dump, merged
from fp8engine import files
from fp8engine.bench.cases import Operands, Pair, Shape, Truth, parse
from fp8engine.bench.gemm import FAST, PROMOTED, SETS, Variant, kernel
from fp8engine.bench.harness import Call, Row, Timer, compare, machine
from fp8engine.bench.timing import Clock, clock
from fp8engine.errors import BackendError, Fp8EngineError, UnknownName
from fp8engine.kernels import limits, tuning
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.cards import Card, card_of
from fp8engine.ops import device, predicted, reference, scaled_mm, triton_backend
from fp8engine.ops.reference import Epilogue

TURNS = 15
BATCH = 8  # candidates timed together: so many are under way when the time is up
NOT_TRIED = "not tried: the time was up"
TMA = (9, 0)  # capability from which there are tensor descriptors
GLUON = (9, 0)  # the one that Gluon's matmul is written for
WITH_GLUON = ("matmul_fp8_promoted", "matmul_block")  # what it multiplies
# FP32 sums a thread holds: 128 leave room for the rest in 255 registers, 256 spill.
MOST_SUMS = 128
BLOCK_K = {"matmul_fp8": (64, 128), "matmul_fp8_promoted": (64, 128), "matmul_block": (128,), "matmul_fp16": (64,)}
OPERATIONS = tuple(BLOCK_K)
CUTS = (1, 2, 4, 8, 16, 32)  # most parts of K
FEW_TILES = ("small", "unaligned")  # classes of shapes that may leave multiprocessors idle
# K less this: 4 bytes or 8 from a multiple of 16, so no descriptor can describe the rows.
UNALIGNING = 4
UNALIGNED_SHAPES = 3  # of a list: pointers are one kernel, and slower


@dataclass(frozen=True)
class Job:
    """How candidates are tried.  check: what would run otherwise.  ours: y of the same operands, by a configuration."""

    check: Variant
    ours: Callable[[Pair, Config], torch.Tensor]
    where: torch.device
    ticks: Clock


@dataclass(frozen=True)
class Tried:
    """One candidate.  ratios: the other's time over ours, by shape, measured.  why: it was left out, or None."""

    config: Config
    ratios: tuple[float, ...] = ()
    why: str | None = None

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios; 0 where it was left out."""
        return 0.0 if self.why or not self.ratios else statistics.geometric_mean(self.ratios)


Trial = Callable[[Shape, Sequence[Config]], list[float | str]]


@dataclass(frozen=True)
class Order:
    """The order of trials, and when they end.

    seconds: predicted time of a configuration at a shape; None: as they come.  left: seconds that remain.
    """

    seconds: Callable[[Config, Shape], float] | None = None
    left: Callable[[], float] = lambda: math.inf

    def first(self, configs: Sequence[Config], shapes: Sequence[Shape]) -> list[Config]:
        """The configurations, the shortest predicted time first: the geometric mean over the shapes."""
        if self.seconds is None:
            return list(configs)
        return sorted(configs, key=lambda config: self.mean(config, shapes) or 0.0)

    def mean(self, config: Config, shapes: Sequence[Shape]) -> float | None:
        """Predicted seconds of a configuration: the geometric mean over the shapes."""
        if self.seconds is None:
            return None
        return statistics.geometric_mean(self.seconds(config, shape) for shape in shapes)


AS_THEY_COME = Order()


def trial(job: Job, shape: Shape, configs: Sequence[Config]) -> list[float | str]:
    """For each configuration the other's time over ours, or why it must not be used: it fails, or its result is wrong.

    Only what is right is timed.
    """
    sets = [Operands(shape, job.where, seed)[job.check.kind] for seed in range(SETS)]
    truths = [Truth.of(pair) for pair in sets]
    allowed = job.check.tolerance(shape.k)

    def other(row: Row) -> Call:
        row["correct"] = True
        return lambda turn: job.check.run(sets[turn % SETS])

    def check(row: Row, config: Config) -> Call:
        worst = max(truth.error(job.ours(pair, config)) for pair, truth in zip(sets, truths, strict=True))
        row["correct"] = worst <= allowed
        if not row["correct"]:
            row["why"] = f"wrong result: relative error {worst:.1e}, allowed {allowed:.1e}"
        return lambda turn: job.ours(sets[turn % SETS], config)

    checks = {str(i): lambda row, config=config: check(row, config) for i, config in enumerate(configs)}
    derive = lambda name, seconds, over: {"ratio": over("other")}  # noqa: E731
    _, *rows = compare({}, {"other": other, **checks}, derive, Timer(job.ticks, TURNS))
    return [row["ratio"] if row["correct"] else row["why"] for row in rows]


def search(
    start: Config,
    steps: Sequence[Callable[[Config], list[Config]]],
    shapes: Sequence[Shape],
    run: Trial,
    order: Order = AS_THEY_COME,
):
    """(best, everything tried): the configuration with the highest geometric mean, its ratio the least over the shapes.

    None where nothing ran and was right.  steps: a configuration -> candidates around it.
    """
    tried: list[Tried] = []
    best: Tried | None = None
    for step in steps:
        around = best.config if best else start
        configs = order.first([one for one in dict.fromkeys(step(around)) if one != around], shapes)
        found = _try_all([around, *configs], shapes, run, order)
        tried += found
        # The first of equals: what went into the step stays unless something was faster.
        top = max(found, key=lambda one: one.mean)
        best = top if top.mean > 0 else best
    if best is None:
        return None, tried
    return best.config._replace(ratio=math.floor(min(best.ratios) * 1000) / 1000), tried


def _try_all(configs: list[Config], shapes: Sequence[Shape], run: Trial, order: Order) -> list[Tried]:
    found: list[Tried] = []
    for first in range(0, len(configs), BATCH):
        batch = configs[first : first + BATCH]
        if first and order.left() <= 0:  # the configuration that the step began with is always measured
            found += [Tried(config, why=NOT_TRIED) for config in batch]
        else:
            found += _try_batch(batch, shapes, run)
    return found


def _try_batch(configs: list[Config], shapes: Sequence[Shape], run: Trial) -> list[Tried]:
    state = {config: Tried(config) for config in configs}
    for shape in shapes:
        left = [config for config in configs if state[config].why is None]
        for config, result in zip(left, run(shape, left) if left else [], strict=True):
            if isinstance(result, str):
                state[config] = Tried(config, why=f"{shape}: {result}")
            else:
                state[config] = Tried(config, (*state[config].ratios, result))
    return list(state.values())


def steps(operation: str, name: str, tma: bool, gluon: bool) -> list[Callable[[Config], list[Config]]]:
    """The grid around a configuration, in the order above.  name: the shape class.

    tma: whether descriptors can be used.  gluon: whether there is a Gluon kernel of the operation.
    """

    def tiles(base: Config) -> list[Config]:
        ks = dict.fromkeys((base.block_k, *BLOCK_K[operation]))
        return [
            # A wide tile is stored in halves, or it does not fit beside its operands.
            base._replace(block_m=m, block_n=n, block_k=k, warps=warps, parts=2 if n == 256 else 1, kernel="triton")
            for m, n, k, warps in itertools.product((64, 128), (64, 128, 256), ks, (4, 8))
            if m * n <= MOST_SUMS * 32 * warps
        ]

    def pipeline(base: Config) -> list[Config]:
        return [base._replace(stages=s, parts=p) for s, p in itertools.product((3, 4, 5), (1, 2, 4))]

    def order(base: Config) -> list[Config]:
        return [
            base._replace(group_m=rows, flatten=flat) for rows, flat in itertools.product((4, 8, 16), (False, True))
        ]

    def cuts(base: Config) -> list[Config]:
        return [base._replace(split_k=parts, kernel="triton") for parts in CUTS]

    def means(base: Config) -> list[Config]:
        found = [base._replace(descriptors=way, kernel="triton") for way in (True, False)] if tma else []
        if tma and gluon:  # a kernel of its own, which need not like the same tile
            tile = dict(zip(("block_m", "block_n", "block_k"), limits.TILE, strict=True))
            ours = base._replace(**tile, warps=8, parts=2, descriptors=True, kernel="gluon")
            found += [ours._replace(stages=stages) for stages in dict.fromkeys((base.stages, 4, 5))]
        return found

    return [tiles, pipeline, order, *([cuts] if name in FEW_TILES else []), means]


def classes(shapes: Sequence[Shape]) -> dict[str, list[Shape]]:
    """The shapes by shape class; the first ones, a little narrower along K, are the class "unaligned"."""
    found: dict[str, list[Shape]] = {}
    for shape in shapes:
        found.setdefault(tuning.shape_class(shape.m, shape.n), []).append(shape)
    narrow = [shape._replace(k=shape.k - UNALIGNING) for shape in shapes if shape.k % 16 == 0]
    if narrow:
        found[tuning.UNALIGNED] = narrow[:UNALIGNED_SHAPES]
    return found


def rows_for(content: Mapping[str, Any], operations: Sequence[str] | None, architecture: str) -> list[str]:
    """The operations to tune: those asked for, else all that the table has for the architecture.

    Raises UnknownName for no operation, BackendError for an architecture that the table does not have.
    """
    known = content["operations"]
    for operation in operations or ():
        if operation not in known:
            raise UnknownName("operation", operation, known)
    found = [name for name in operations or known if architecture in known[name]]
    if not found or (operations and len(found) < len(operations)):
        listed = ", ".join(f"{name} ({', '.join(known[name])})" for name in operations or known)
        raise BackendError(f"the tuning table has no row for {architecture}; it has {listed}")
    return found


def tune(
    operations: Sequence[str] | None,
    shapes: Sequence[Shape],
    where: torch.device,
    note: Callable[[str], None] = lambda line: None,
    limit: float = math.inf,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the new table, everything tried) on this card.  note: called with a line on each class's result.

    limit: seconds after which no further candidates are tried, shared by the classes.
    Raises BackendError without a card or without Triton.
    """
    if where.type != "cuda":
        raise BackendError(
            "tuning measures kernels on a card, and torch finds none; 'fp8engine bench gemm' runs on a CPU"
        )
    triton_backend.require()
    content = json.loads(tuning.TABLE.read_text())
    capability = device.capability(where)
    architecture = "sm_{}{}".format(*capability)
    ticks, tried, rows = clock(where), [], {}
    gluon, card = capability == GLUON, card_of(device.name(where), device.processors(where))
    end = time.monotonic() + limit
    with torch.no_grad():
        for operation in rows_for(content, operations, architecture):
            job = job_of(operation, where, ticks)
            for name, mine in classes(shapes).items():
                start = tuning.Config(**content["operations"][operation][architecture][name])._replace(ratio=None)
                tma = capability >= TMA and name != tuning.UNALIGNED
                grid = steps(operation, name, tma, gluon and operation in WITH_GLUON)
                order = _order(operation, card, end)
                run = lambda shape, configs, job=job: trial(job, shape, configs)  # noqa: E731
                best, found = search(start, grid, mine, run, order)
                tried += [_as_row(operation, name, one, order.mean(one.config, mine)) for one in found]
                note(f"{operation} {architecture} {name}: {_told(best, found, order, mine)}")
                if best is not None:
                    rows[operation, name] = best._asdict()
    return merged(content, architecture, rows, machine(where)), tried


def job_of(operation: str, where: torch.device, ticks: Clock) -> Job:
    """How an operation's candidates are run, checked and what they are held against, on a card."""
    out = Epilogue(None, torch.bfloat16)
    launch = kernel("matmul_fp16" if operation == "matmul_fp16" else "matmul_fp8")
    if operation == "matmul_fp16":
        check = Variant("bf16", lambda pair: pair.a.data @ pair.b.data.t())
        return Job(check, lambda pair, config: launch(pair.a.data, pair.b.data, out, config), where, ticks)
    promoted = operation != "matmul_fp8"
    if operation == "matmul_block":
        multiply = scaled_mm.matmul if scaled_mm.no_blocks(where) is None else reference.matmul_fp8
        check = Variant("block", lambda pair: multiply(pair.a, pair.b), PROMOTED)
    else:
        multiply = partial(scaled_mm.matmul, fast=not promoted)
        check = Variant("tensor", lambda pair: multiply(pair.a, pair.b), PROMOTED if promoted else FAST)
    return Job(check, lambda pair, config: launch(pair.a, pair.b, out, promoted, config), where, ticks)


def _order(operation: str, card: Card, end: float) -> Order:
    return Order(
        lambda config, shape: predicted.seconds(operation, config, shape, card), lambda: end - time.monotonic()
    )


def _told(best: Config | None, found: Sequence[Tried], order: Order, shapes: Sequence[Shape]) -> str:
    """A class's result in a line: what was measured, what was predicted of it, and how many were left."""
    left = sum(one.why == NOT_TRIED for one in found)
    rest = f"; {left} not tried: the time was up" if left else ""
    if best is None:
        return f"nothing ran{rest}"
    mean = order.mean(best, shapes)
    said = "" if mean is None else f", predicted {1e6 * mean:.0f} us"
    return f"{best}, measured ratio {best.ratio}{said}{rest}"


def _as_row(operation: str, name: str, one: Tried, mean: float | None) -> dict[str, Any]:
    config = {"operation": operation, "class": name, "config": str(one.config)}
    return config | {"ratios": list(one.ratios), "predicted_us": mean and 1e6 * mean, "why": one.why}


def main() -> None:
    """Tune, show the difference, write the table where that is asked for."""
    options = parser(__doc__)
    options.add_argument("--operation", action="append", help=f"may be repeated: {', '.join(OPERATIONS)}; default: all")
    options.add_argument("--shapes", default="tune", help="names of lists, or M,N,K; several joined by semicolons")
    options.add_argument("--write", action="store_true", help="replace kernels/tuning.json; else only the difference")
    options.add_argument("--limit", type=float, default=math.inf, help="seconds; after it, no further candidates")
    options.add_argument("--json", action="store_true", help="print the table, all that was tried and the difference")
    asked = options.parse_args()
    try:
        shapes = parse(asked.shapes)
        table, tried = tune(asked.operation, shapes, WHERE, lambda line: print(line, file=sys.stderr), asked.limit)
    except Fp8EngineError as error:
        options.error(str(error))
    new, path = dump(table), tuning.TABLE
    diff = difference(path.read_text(), new)
    if asked.write:
        files.write(path, new)
    if asked.json:
        told = {"table": table, "tried": tried, "diff": diff, "written": str(path) if asked.write else None}
        print(json.dumps(told, indent=1, allow_nan=False))
    else:
        print(diff or "nothing changes\n", end="")
        print(f"written to {path}" if asked.write else "not written: --write replaces the table", file=sys.stderr)


if __name__ == "__main__":
    main()
