"""A card that was never measured measures itself: each shape once, when a model's second FP8 training step begins.

In a model's first step every FP8 matmul is noted for which neither kernels/tuning.json nor this card has a measurement.
When its second begins, cuBLASLt and the three of our configurations that are predicted to be the fastest (predicted.py)
are timed for the shapes that occurred, the most work first; the fastest runs from then on.  So with every model of the
process.  What was measured is kept (choice_file.py), and the next process has it from its first step on.

- The timed launches of a model take at most BUDGET seconds.  What they need beforehand, to be compiled above all, does
  not count: after PAUSE seconds of both, the rest is left to the steps that follow.
- Nothing is timed during CUDA-graph capture, in a compiled graph, inside `with fe.backend(...)`, without gradients, or
  where the environment variable FP8ENGINE_MEASURE is 0.  A shape that was not timed follows the rule of `choose`.
- Results do not depend on it beyond the order of sums: every configuration is the same arithmetic.
- Of several ranks, rank 0 times and decides; the others take all that it has measured so far from torch's store, and
  none waits in a collective.  They wait for rank 0's first model alone; what they want beyond it they look for as their
  steps begin, for at most WAIT.  Until it is there they follow the rule of `choose`.
- A trial that fails (out of memory, a compile error, a wrong result) is left out, and the rest goes on.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from fp8engine import _torch, environment
from fp8engine.errors import BackendError, StateError
from fp8engine.numerics.cards import card_of
from fp8engine.numerics.cast import Cast
from fp8engine.ops import choice_file, device, predicted, scaled_mm, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.choice_file import Choice, Job
from fp8engine.ops.reference import Epilogue, Operand, operand

BUDGET = 2.0  # seconds of timed launches, for a model
PAUSE = 10.0  # seconds that a step may wait: a kernel takes about half of one to compile, on a quiet core
CONFIGURATIONS = 3  # of ours, for each shape
CUBLAS = "cublas"
REPEATS = 5
WAIT = timedelta(seconds=30)  # for rank 0's choices: a step has brought the ranks together, and PAUSE is shorter
STORE_KEY = "fp8engine/choices"
DIFFERENT = 0.02  # relative difference from cuBLASLt's result that no order of sums explains (bench/gemm.py: 2.7e-3)
BLOCK = 128
log = logging.getLogger(__name__)


class CardTrials:
    """What one card has measured of itself, and what it still has to.

    runner: has the methods of CardRunner.  key: choice_file.key_of; None: nothing is kept.  now: the clock, in seconds.
    """

    def __init__(self, runner: Any, key: dict[str, Any] | None, now: Callable[[], float] = time.monotonic):
        self.runner, self.key, self.now = runner, key, now
        self.noting: WeakSet[object] = WeakSet()  # models whose first step has begun, and whose trials have not ended
        self.done: WeakSet[object] = WeakSet()
        self.wanted: Counter[Job] = Counter()
        self.took: list[float] = []  # seconds of each trial, since a model's trials ended
        self.deadline: float | None = None  # until when rank 0 is asked for what this rank wants
        self.alone = False  # another rank than 0 that has nothing to expect from it
        self.lock = threading.Lock()  # models may train in threads
        self.failed: dict[Job, str] = {}
        self.choices = {} if _ranks() else self._kept()  # of ranks, rank 0's are everybody's, from the second step on

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
            return self.measure()
        if dist.get_rank() > 0:
            return self.alone or self._take()
        try:
            self.choices = self._kept() | self.choices
            return self.measure()
        finally:  # the others wait
            message = {"card": self._card(), "choices": choice_file.to_rows(self.choices)}
            _torch.default_store().set(STORE_KEY, json.dumps(message))

    def _missing(self) -> list[Job]:
        """What is wanted and was not tried, the most work first."""
        missing = [job for job in list(self.wanted) if job not in self.choices and job not in self.failed]
        return sorted(missing, key=lambda job: -self.wanted[job] * job.m * job.n * job.k)

    def _spent(self) -> bool:
        """Whether one more trial might pass the budget."""
        return sum(self.took) + max(self.took, default=0.0) > BUDGET

    def measure(self) -> bool:
        """Time what is wanted, keep it and say so.  Returns whether nothing is left to the steps that follow."""
        begin, missing, tried = self.now(), self._missing(), 0
        while tried < len(missing) and not self._spent() and self.now() - begin < PAUSE:
            self._try(missing[tried])
            tried += 1
        over = tried == len(missing) or self._spent()
        if missing:
            self.runner.forget()
            self._tell(missing, self.now() - begin, 0 if over else len(missing) - tried)
        return over

    def _try(self, job: Job) -> None:
        """Time cuBLASLt and the configurations for a shape, and choose."""
        us: dict[str, float] = {}
        tried = {CUBLAS: None, **{f"triton {config}": config for config in self.runner.configs(job)}}
        for name, config in tried.items():
            if self._spent():
                break
            try:
                call = self.runner.ready(job, config)
                began = self.now()
                us[name] = 1e6 * self.runner.time(call)
                self.took.append(self.now() - began)
            except Exception as error:  # any: out of memory, a compiler, a driver, a wrong result
                self.failed[job] = f"{name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        # Where torch has no scales in blocks ours are compared with each other; else never without cuBLASLt's time.
        if us.keys() - {CUBLAS} and (CUBLAS in us or "block" in job.kind):
            best = min(us, key=us.__getitem__)
            config = tried[best]
            self.choices[job] = Choice("triton" if config else CUBLAS, config and config._asdict(), us)

    def _tell(self, missing: list[Job], seconds: float, left: int) -> None:
        timed = [self.choices[job].backend for job in missing if job in self.choices]
        where = "not kept: this system does not tell its driver's version"
        if self.key is not None:
            try:
                where = f"kept in {choice_file.write(self.key, self.choices)}"
            except OSError as error:
                where = f"not kept: {error}"
        failed = sum(job in self.failed for job in missing)
        more = f"; {failed} with a trial that failed" if failed else ""
        more += f"; {left} are left to the steps that follow" if left else ""
        log.warning(
            "fp8engine measured %d of %d matmul shapes on this card in %.1f s, compiling included (once for each; %s=0 "
            "switches it off): our kernels run %d, cuBLASLt the others%s; %s",
            *(len(timed), len(missing), seconds, environment.MEASURE, timed.count("triton"), more, where),
        )

    def _kept(self) -> dict[Job, Choice]:
        if self.key is None:
            return {}
        try:
            return choice_file.read(self.key)
        except StateError as error:
            log.warning("%s", error)
            return {}

    def _card(self) -> list[Any]:
        return [self.key and self.key[name] for name in ("card", "capability", "triton", "kernels")]

    def _take(self) -> bool:
        """Rank 0's choices, for a card like its own.  Returns whether nothing is missing, or WAIT is over."""
        self.deadline = self.deadline or self.now() + WAIT.total_seconds()
        why = ""
        try:
            store = _torch.default_store()
            store.wait([STORE_KEY], WAIT)
            message = json.loads(store.get(STORE_KEY))
            if message["card"] == self._card():
                self.choices = choice_file.from_rows(message["choices"])
            else:
                why = f"rank 0 measured another card, {message['card'][0]}"
        except (RuntimeError, ValueError) as error:
            why = f"no choice of kernels came from rank 0 ({error})"
        if why:
            log.warning("%s: this rank follows the committed rule", why)
            self.alone = True
        return self.alone or not self._missing() or self.now() > self.deadline


class CardRunner:
    """Times matmuls of random operands on a CUDA card, on an empty L2 cache."""

    def __init__(self, where: torch.device):
        self.where = where
        self.forget()

    def forget(self) -> None:
        """Give back the memory of what was timed."""
        self._job: Job | None = None
        self._operands: tuple = ()
        self._exact: torch.Tensor | None = None  # cuBLASLt's result
        torch.cuda.empty_cache()

    def configs(self, job: Job) -> list[Any]:
        """Committed configurations that are predicted to be the fastest; their machine code is checked in CI."""
        tuning = importlib.import_module("fp8engine.kernels.tuning")
        rows = tuning.table()[job.operation]
        major, minor = device.capability(self.where)
        known = rows.get(f"sm_{major}{minor}") or rows[f"sm_{device.FP8_CAPABILITY[0]}{device.FP8_CAPABILITY[1]}"]
        found = [row._replace(ratio=None) for name, row in known.items() if name != tuning.UNALIGNED]
        more = [row._replace(group_m=2 * row.group_m) for row in found]
        card = card_of(device.name(self.where), device.processors(self.where))
        seconds = functools.partial(predicted.seconds, job.operation, shape=job[2:], card=card)
        return sorted(dict.fromkeys([*found, *more]), key=seconds)[:CONFIGURATIONS]

    def ready(self, job: Job, config: Any | None) -> Callable[[], torch.Tensor]:
        """The matmul under a configuration, None: cuBLASLt's, called once: it is compiled, and its result right.

        Raises whatever fails, and BackendError where our result is not cuBLASLt's but for the order of sums.
        """
        if self._job != job:
            self.forget()  # the last job's memory first
            self._job, self._operands = job, operands(job, self.where)
        end, fast = Epilogue(None, torch.bfloat16), job.operation == "matmul_fp8"
        call = functools.partial(scaled_mm.matmul, *self._operands, fast=fast)
        if config is not None:
            call = functools.partial(triton_backend.matmul, *self._operands, end, fast, config)
        with torch.no_grad():
            y_MN = call()
            if config is None:
                self._exact = y_MN
            elif self._exact is not None:
                wanted = self._exact.float()
                error = float((y_MN.float() - wanted).norm() / wanted.norm())
                if not error <= DIFFERENT:
                    raise BackendError(f"{config} is {error:.1e} from cuBLASLt's result for {job}")
        return call

    @torch.no_grad()
    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call, the median of REPEATS."""
        flush = torch.empty(1 << 27, dtype=torch.uint8, device=self.where)  # more than twice the L2 cache
        pairs = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.where)
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


def operands(job: Job, where: torch.device) -> tuple[Operand, Operand]:
    """Random E4M3 codes [M, K] and [N, K] with scales of 1, of the job's kind.  torch's own random state stays.

    >>> a, b = operands(Job("matmul_block", "block", 4, 130, 256), torch.device("cpu"))
    >>> list(a.scale.shape), list(b.scale.shape)
    ([4, 2], [2, 2])
    """
    whole, row, line = "-1x-1", "1x-1", "1x128"
    kinds = {"tensor": (whole, whole), "row": (row, row), "block": (line, "128x128"), "block by block": (line, line)}
    made, draw = [], torch.Generator(where).manual_seed(0)
    for size, groups in zip((job.m, job.n), kinds[job.kind], strict=True):
        cast = Cast.parse(f"e4m3 {groups}")
        codes = torch.randn(size, job.k, generator=draw, dtype=torch.bfloat16, device=where).to(cast.dtype)
        made.append(operand(codes, torch.ones(cast.scale_shape(size, job.k), device=where), cast))
    return made[0], made[1]


def kind_of(a: Any, b: Any) -> str | None:
    """The kind of scales of two operands, or of two ways to cast them: by their `rows` and `cols`.

    None for blocks other than 1x128 and 128x128, which are not measured.

    >>> row, line, square = (Cast.parse(f"e4m3 {groups}") for groups in ("1x-1", "1x128", "128x128"))
    >>> kind_of(row, row), kind_of(line, square), kind_of(line, line)
    ('row', 'block', 'block by block')
    """
    if a.cols != -1 or b.cols != -1:
        if a.cols != BLOCK or b.cols != BLOCK or not {a.rows, b.rows} <= {1, BLOCK}:
            return None
        return "block by block" if a.rows == b.rows == 1 else "block"
    return "tensor" if a.rows == b.rows == -1 else "row"


def look(where: torch.device, operation: str, kind: str, shape: Sequence[int]) -> Choice | None:
    """What this card measured for a matmul of shape M, N, K; None where it has not, or does not measure."""
    found = trials_of(where)
    return None if found is None else found.look(Job(operation, kind, *shape))


def step_begins(where: torch.device, model: object, came: bool) -> None:
    """A model's training step begins on a device; came: after a backward.

    Nothing is noted or measured in a capture, or under `fe.backend`; eager code alone calls it.
    """
    if where.type != "cuda" or asked() is not None:
        return
    if (found := trials_of(where)) is not None and not torch.cuda.is_current_stream_capturing():
        found.step_begins(model, came)


@functools.cache
def trials_of(where: torch.device) -> CardTrials | None:
    """The trials of a card; None where there is nothing to choose between, or the setting switches it off."""
    if not device.has_fp8(where) or device.capability(where)[0] in triton_backend.TCGEN05:
        return None
    if not environment.measures() or not triton_backend.usable():
        return None
    return CardTrials(CardRunner(where), choice_file.key_of(where))


def _ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
