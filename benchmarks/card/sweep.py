"""Every configuration of an FP8 matmul that may be the fastest, on shapes of language models: predicted and measured.

A row is one configuration at one shape.  kernels/tuning.json is written from the rows, and the timing model
(numerics/matmul_time.py) is held against them: `python -m benchmarks.sweep FILE`.  Results are checked against
cuBLASLt's before they are timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8engine.bench import cases, timing
from fp8engine.kernels import tuning
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.cards import card_of
from fp8engine.ops import device, predicted
from fp8engine.ops.card_trials import CardRunner
from fp8engine.ops.choice_file import Job

OPERATIONS = (  # of the table, and the kind of scales that it is timed with
    ("matmul_fp8", "tensor"),
    ("matmul_fp8_promoted", "tensor"),
    ("matmul_block", "block"),
    ("matmul_block", "block by block"),
)
TILES = (
    (128, 256, 8),
    (128, 128, 8),
    (128, 128, 4),
    (64, 256, 4),
    (64, 128, 4),
    (128, 64, 4),
    (64, 64, 4),
)
SUMS = 128  # FP32 sums that a thread of a kernel that promotes can hold: it has twice as many
TURNS, WARMUP = 5, 2
ALL = tuple(dict.fromkeys((*cases.LLM, *cases.FEW_TOKENS, *cases.SQUARE)))


def configurations(operation: str) -> list[Config]:
    """Those that are tried, the committed ones among them."""
    committed = [row._replace(ratio=None) for name, row in rows(operation).items() if name != tuning.UNALIGNED]
    found = [one for one in (*committed, *_triton(operation), *_gluon(operation)) if _fits(operation, one)]
    return list(dict.fromkeys(found))


def rows(operation: str) -> dict[str, Config]:
    """The committed configurations of Hopper, by shape class."""
    return tuning.table()[operation]["sm_90"]


def _triton(operation: str) -> Iterator[Config]:
    for (m, n, warps), flatten, stages in itertools.product(TILES, (True, False), (3, 4, 5)):
        held = m * n // (32 * warps) * (1 if operation == "matmul_fp8" else 2)
        if held > SUMS or (stages == 5 and m * n > 128 * 128) or (stages == 3 and m * n < 128 * 128):
            continue
        parts, cuts = (2 if m * n > 128 * 128 else 1), (16 if m * n < 128 * 128 else 1)
        yield Config(m, n, 128, warps=warps, stages=stages, parts=parts, flatten=flatten, split_k=cuts)


def _gluon(operation: str) -> Iterator[Config]:
    if operation != "matmul_fp8":  # whose sums are not promoted
        for group in (4, 8, 16):
            yield Config(128, 128, 128, group_m=group, stages=5, parts=4, kernel="gluon")


def _fits(operation: str, config: Config) -> bool:
    return tuning.shared_memory(operation, config) <= tuning.SHARED_MEMORY[9, 0]


def sweep(where: torch.device, shape: cases.Shape, note: Callable[[str, str], None]) -> list[dict[str, Any]]:
    """A shape's rows.  note: called with a configuration that fails, and why."""
    found = []
    for operation, kind in OPERATIONS:
        job, runner = Job(operation, kind, *shape), CardRunner(where)
        calls: dict[str, Callable[[int], object]] = {}
        configs = {"cublas": None, **{str(one): one for one in configurations(operation)}}
        for name, config in configs.items():
            try:
                call = runner.ready(job, config)
            except Exception as error:  # any: one that fails must not hide the others
                note(f"{operation} {kind} {shape} {name}", f"{type(error).__name__}: {error}")
                continue
            calls[name] = lambda turn, call=call: call()
        times = timing.measure(calls, timing.clock(where), TURNS, WARMUP) if where.type == "cuda" else {}
        card = card_of(device.name(where), device.processors(where)) if times else None
        for name, took in times.items():
            config = configs[name]
            row = {"operation": operation, "kind": kind, "shape": list(shape), "name": name, "seconds": took.median}
            if config is not None and card is not None:
                row |= {"config": config[:-1], "predicted": predicted.seconds(operation, config, shape, card)}
            found.append(row | {"correct": True, "spread": round(took.spread, 3)})
        runner.forget()
    return found
