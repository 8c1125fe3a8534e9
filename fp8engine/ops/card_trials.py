"""A card that was never measured measures itself: each shape once, when a model's second FP8 training step begins.

In a model's first step every FP8 matmul is noted for which neither kernels/tuning.json nor this card has a measurement.
When its second begins, cuBLASLt and three of our configurations are timed for each, and the fastest runs from then on.
What is not timed follows the rule of `choose`; results differ in the order of sums alone.  How long a step may wait,
what is kept and what ranks do: docs/performance.md, "A card that was never measured measures itself".
"""

from __future__ import annotations

import functools
import importlib
import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from fp8engine import _torch, environment
from fp8engine.errors import BackendError, StateError
from fp8engine.numerics.cards import card_of
from fp8engine.numerics.cast import Cast
from fp8engine.ops import choice_file, device, predicted, ranks, scaled_mm, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.choice_file import Choice, Job
from fp8engine.ops.fingerprint import capturing
from fp8engine.ops.reference import Epilogue, Operand, operand

BUDGET = 2.0  # seconds of timed launches, for a model
PAUSE = 10.0  # seconds that a step may wait: a kernel takes about half of one to compile, on a quiet core
CONFIGURATIONS = 3  # of ours, for each shape
REPEATS = 5
# Cycles that the card spins for before a timed launch: 0.5 ms at the 1.98 GHz of an H100 or H200.
HEAD_START = 1_000_000
WAIT = timedelta(seconds=30)  # for rank 0's choices: a step has brought the ranks together, and PAUSE is shorter
STORE_KEY = "fp8engine/choices"
DIFFERENT = 0.02  # relative difference from cuBLASLt's result that no order of sums explains (bench/gemm.py: 2.7e-3)
BLOCK = 128
KINDS = {"tensor": "-1x-1 -1x-1", "row": "1x-1 1x-1", "block": "1x128 128x128", "block by block": "1x128 1x128"}
log = logging.getLogger(__name__)


class CardTrials:
    """What one card has measured of itself, and what it still has to.  runner: as CardRunner.  key: of `key_of`."""

    def __init__(self, runner: Any, key: Mapping[str, Any], now: Callable[[], float] = time.monotonic):
        self.runner, self.key, self.now = runner, key, now
        self.shared_key = {**key, "driver": None}  # of what rank 0 tells the others, who may have another driver
        self.noting: WeakSet[object] = WeakSet()  # models whose first step has begun, and whose trials have not ended
        self.done: WeakSet[object] = WeakSet()
        self.wanted: Counter[Job] = Counter()
        self.took: list[float] = []  # seconds of each trial, since a model's trials ended
        self.deadline: float | None = None  # until when rank 0 is asked for what this rank wants
        self.alone = False  # another rank than 0 that has nothing to expect from it
        self.lock = threading.Lock()  # models may train in threads
        self.failed: dict[Job, str] = {}
        self.choices = {} if _ranks() else choice_file.read(key)  # ranks have rank 0's, from the second step on

    def look(self, job: Job) -> Choice | None:
        """What was measured for a matmul; None where nothing was, which is noted in a model's first step."""
        if (found := self.choices.get(job)) is None and self.noting:
            self.wanted[job] += 1
        return found

    def step_begins(self, model: object, came: bool) -> None:
        """A training step of a model begins.  came: after a backward, so that its first step is over."""
        if model in self.done:
            return
        with self.lock:
            if not came or model not in self.noting:
                self.noting.add(model)
            elif self._decide():
                self.done.add(model)
                self.noting.discard(model)
                self.took, self.deadline = [], None
                if not self.noting:
                    self.wanted.clear()

    def _decide(self) -> bool:
        """Measure what is wanted, or take it from rank 0.  Returns whether nothing is left to the steps that follow."""
        if not _ranks():
            return self._measure()
        if dist.get_rank() > 0:
            return self.alone or self._take()
        try:
            self.choices = choice_file.read(self.key) | self.choices
            return self._measure()
        finally:  # the others wait
            _torch.default_store().set(STORE_KEY, choice_file.pack(self.shared_key, self.choices))

    def _take(self) -> bool:
        """Rank 0's choices, for a card like its own.  Returns whether nothing is missing, or WAIT is over."""
        self.deadline = self.deadline or self.now() + WAIT.total_seconds()
        try:
            store = _torch.default_store()
            store.wait([STORE_KEY], WAIT)
            self.choices = choice_file.unpack(store.get(STORE_KEY), self.shared_key)
        except (RuntimeError, ValueError) as error:  # none came, or they are another card's
            log.warning("no choice of kernels from rank 0, and this rank follows the committed rule: %s", error)
            self.alone = True
        return self.alone or not self._missing() or self.now() > self.deadline

    def _missing(self) -> list[Job]:
        """What is wanted and was not tried, the most work first."""
        missing = [job for job in list(self.wanted) if job not in self.choices and job not in self.failed]
        return sorted(missing, key=lambda job: -self.wanted[job] * job.m * job.n * job.k)

    def _spent(self) -> bool:
        """Whether one more trial might pass the budget."""
        return sum(self.took) + max(self.took, default=0.0) > BUDGET

    def _measure(self) -> bool:
        """Time what is wanted, keep it and say so.  Returns whether nothing is left to the steps that follow."""
        begin, missing = self.now(), self._missing()
        left = missing.copy()
        while left and not self._spent() and self.now() - begin < PAUSE:
            self._try(left.pop(0))
            self.runner.forget()
        if self._spent():
            left.clear()  # they follow the rule
        if missing:
            self._tell(missing, self.now() - begin, len(left))
        return not left

    def _try(self, job: Job) -> None:
        """Time cuBLASLt and the configurations for a shape, and choose."""
        us: dict[str, float] = {}
        tried = {"cublas": None, **{f"triton {config}": config for config in self.runner.configs(job)}}
        for name, config in tried.items():
            if self._spent():
                break
            try:
                call = self.runner.ready(job, config)
                began = self.now()
                us[name] = 1e6 * self.runner.time(call)
                self.took.append(self.now() - began)
            except Exception as error:  # any: out of memory, a compiler, a driver, a wrong result
                self.failed[job] = f"{name} failed: {error!r}"
        # Where torch has no scales in blocks ours are compared with each other; else never without cuBLASLt's time.
        if us.keys() - {"cublas"} and ("cublas" in us or "block" in job.kind):
            self.choices[job] = Choice(tried[min(us, key=us.__getitem__)], us)

    def _tell(self, missing: list[Job], seconds: float, left: int) -> None:
        timed = [self.choices[job].backend for job in missing if job in self.choices]
        failed = sum(job in self.failed for job in missing)
        more = f"; {failed} with a trial that failed" if failed else ""
        more += f"; {left} are left to the steps that follow" if left else ""
        try:
            where = f"kept in {choice_file.write(self.key, self.choices)}"
        except (OSError, StateError) as error:
            where = f"not kept: {error}"
        log.warning(
            "fp8engine measured %d of %d matmul shapes on this card in %.1f s, compiling included (once for each; %s=0 "
            "switches it off): our kernels run %d, cuBLASLt the others%s; %s",
            *(len(timed), len(missing), seconds, environment.MEASURE, timed.count("triton"), more, where),
        )


class CardRunner:
    """Times matmuls of random operands on a CUDA card, on an empty L2 cache."""

    def __init__(self, where: torch.device):
        self.where = where
        self.forget()

    def forget(self) -> None:
        """Give back the memory of what was timed: each shape has its own."""
        self._operands: tuple[Operand, ...] = ()
        self._exact: torch.Tensor | None = None  # cuBLASLt's result, in FP32
        torch.cuda.empty_cache()

    def configs(self, job: Job) -> list[Any]:
        """Committed configurations that are predicted to be the fastest; their machine code is checked in CI."""
        tuning = importlib.import_module("fp8engine.kernels.tuning")
        rows, (major, minor) = tuning.table()[job.operation], device.capability(self.where)
        known = {**rows.get(f"sm_{major}{minor}", rows["sm_89"])}
        known.pop(tuning.UNALIGNED)
        found = [row._replace(group_m=by * row.group_m, ratio=None) for by in (1, 2) for row in known.values()]
        card = card_of(device.name(self.where), device.processors(self.where))
        seconds = functools.partial(predicted.seconds, job.operation, shape=job[2:], card=card)
        return sorted(dict.fromkeys(found), key=seconds)[:CONFIGURATIONS]

    def ready(self, job: Job, config: Any | None) -> Callable[[], torch.Tensor]:
        """The matmul under a configuration, None: cuBLASLt's, called once.  Raises what fails, a wrong result too."""
        self._operands = self._operands or operands(job, self.where)
        fast = job.operation == "matmul_fp8"
        call = functools.partial(scaled_mm.matmul, *self._operands, fast=fast)
        if config is not None:
            call = functools.partial(triton_backend.matmul, *self._operands, Epilogue(), fast, config)
        y_MN = call().float()
        if config is None:
            self._exact = y_MN
        elif self._exact is not None:
            error = float((y_MN - self._exact).norm() / self._exact.norm())
            if not error <= DIFFERENT:
                raise BackendError(f"{config} is {error:.1e} from cuBLASLt's result for {job}")
        return call

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the median of REPEATS."""
        flush = torch.empty(1 << 27, dtype=torch.uint8, device=self.where)  # more than twice the L2 cache
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for start, end in events:
            flush.zero_()
            _torch.spin(HEAD_START)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.where)
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def operands(job: Job, where: torch.device) -> tuple[Operand, ...]:
    """Random E4M3 codes [M, K] and [N, K] with scales of 1, of the job's kind.  torch's own random state stays."""
    made, draw = [], torch.Generator(where).manual_seed(0)
    for size, groups in zip((job.m, job.n), KINDS[job.kind].split(), strict=True):
        cast = Cast.parse(f"e4m3 {groups}")
        codes = torch.randn(size, job.k, generator=draw, dtype=torch.bfloat16, device=where).to(cast.dtype)
        shape, turned = cast.scale_shape(size, job.k), job.kind == "block by block"
        # wgrad's operands are transposes, whose scales lie the other way round in memory (quantize_groups.py)
        scale = torch.ones(shape[::-1], device=where).t() if turned else torch.ones(shape, device=where)
        made.append(operand(codes, scale, cast))
    return tuple(made)


def kind_of(a: Any, b: Any) -> str | None:
    """The kind of scales of two operands, or of two ways to cast them: by their `rows` and `cols`.

    None for blocks other than 1x128 and 128x128, which are not measured.
    """
    if a.cols != -1 or b.cols != -1:
        if a.cols != BLOCK or b.cols != BLOCK or not {a.rows, b.rows} <= {1, BLOCK}:
            return None
        return "block by block" if a.rows == b.rows == 1 else "block"
    return "tensor" if a.rows == b.rows == -1 else "row"


def look(where: torch.device, operation: str, kind: str, shape: Sequence[int]) -> Choice | None:
    """What this card measured for a matmul of shape M, N, K; None where it has not, or does not measure."""
    found = trials_of(where)
    return found and found.look(Job(operation, kind, *shape))


def step_begins(where: torch.device, model: object, came: bool) -> None:
    """A model's step begins on a device, after a backward if it `came`.  Captures and `fe.backend` are left alone."""
    found = trials_of(where) if asked() is None else None
    if found is not None and not capturing(where):
        found.step_begins(model, came)


@functools.cache
def trials_of(where: torch.device) -> CardTrials | None:
    """The trials of a card; None where there is nothing to choose between, or the setting switches it off."""
    chooses = device.has_fp8(where) and device.capability(where)[0] not in triton_backend.TCGEN05
    if not (chooses and environment.measures() and triton_backend.usable()):
        return None
    return CardTrials(CardRunner(where), choice_file.key_of(where))


def _ranks() -> bool:
    return ranks.running() and dist.get_world_size() > 1
