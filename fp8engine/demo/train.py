"""One run from its first step, or its last checkpoint, to a Result: the function that the demo and benchmarks share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fp8engine.demo import checkpoint, measure
from fp8engine.demo.config import Config
from fp8engine.demo.data import read
from fp8engine.demo.trainer import Curve, Trainer
from fp8engine.report import inspect

# the run's trainer, before its first step
OnStart = Callable[[Trainer], object]
# step, its loss, tokens a second -> False to stop after this step
OnStep = Callable[[int, float, float], bool]


@dataclass(frozen=True)
class Keeping:
    """Where and how often a run is saved, and whether one found there is continued."""

    folder: Path
    every: int = 100
    resume: bool = False

    def path(self, recipe: str, seed: int) -> Path:
        """The checkpoint of one recipe and seed.

        >>> print(Keeping(Path("report")).path("current", 0))
        report/current-seed0.pt
        """
        return self.folder / f"{recipe}-seed{seed}.pt"


@dataclass(frozen=True)
class Result:
    """What one run cost and gained.

    steps: taken; fewer than asked for where the run was stopped.  Losses in nats a byte: train_loss the mean of the
    last 20 steps, validation_loss over the validation windows.  tokens_per_second from the median step.
    activation_bytes: saved for one backward.  fp8_flops_share: of the linear layers' FLOPs.  saturated, underflowed:
    shares of the elements cast to FP8 (None where none was).  skipped: steps lost to overflow under the loss scale.
    decisions: changes of format under auto, as in fe.inspect(model).decisions.
    """

    recipe: str
    seed: int
    steps: int
    train_loss: float
    validation_loss: float
    tokens_per_second: float
    seconds: float
    activation_bytes: int
    fp8_flops_share: float
    saturated: float | None
    underflowed: float | None
    skipped: int
    ran_on: str
    sample: str
    curve: Curve
    decisions: list[dict] = field(default_factory=list)


def run(
    config: Config,
    recipe: str,
    seed: int = 0,
    *,
    on_start: OnStart | None = None,
    on_step: OnStep | None = None,
    keeping: Keeping | None = None,
) -> Result:
    """Train one GPT under one recipe.

    on_start is given what trains it, before its first step; on_step is called after every step, and when it returns
    False the run is saved (where `keeping` says) and measured as it is.  Raises DemoError (text, folder), UnknownName
    (recipe), StateError (a checkpoint that is not this run's).

    >>> result = run(Config(size="tiny", steps=2, batch=2), "rowwise")
    >>> result.steps, result.fp8_flops_share > 0.8, result.ran_on
    (2, True, 'reference (emulated)')
    """
    trainer = Trainer(config, recipe, seed, read(config.text, config.shape.context))
    if keeping is not None and keeping.resume and (path := keeping.path(recipe, seed)).exists():
        checkpoint.load(path, trainer)
    if on_start is not None:
        on_start(trainer)
    _train(trainer, on_step, keeping)
    return _result(trainer)


def _train(trainer: Trainer, on_step: OnStep | None, keeping: Keeping | None) -> None:
    config, curve = trainer.config, trainer.curve
    path = keeping.path(trainer.recipe, trainer.seed) if keeping else None
    every = keeping.every if keeping else config.steps
    judged = {config.steps * quarter // 4 for quarter in (1, 2, 3)}  # and the end, by _result
    go_on, saved = True, trainer.steps_done
    while trainer.steps_done < config.steps and go_on:
        if trainer.steps_done in judged and trainer.steps_done not in dict(curve.validation):
            trainer.validate()
        loss = trainer.step()
        if on_step is not None:
            go_on = on_step(trainer.steps_done, loss, config.tokens_per_step / curve.seconds[-1])
        if path is not None and trainer.steps_done % every == 0:
            checkpoint.save(path, trainer)
            saved = trainer.steps_done
    if path is not None and saved != trainer.steps_done:
        checkpoint.save(path, trainer)


def _result(trainer: Trainer) -> Result:
    config, curve = trainer.config, trainer.curve
    known = dict(curve.validation)
    report = inspect(trainer.model)
    totals = report.totals
    converted = totals["converted"] > 0
    return Result(
        recipe=trainer.recipe,
        seed=trainer.seed,
        steps=trainer.steps_done,
        train_loss=statistics.fmean(curve.losses[-20:]) if curve.losses else math.nan,
        validation_loss=known[trainer.steps_done] if trainer.steps_done in known else trainer.validate(),
        tokens_per_second=config.tokens_per_step / statistics.median(curve.seconds) if curve.seconds else math.nan,
        seconds=sum(curve.seconds),
        activation_bytes=measure.activation_bytes(trainer),
        fp8_flops_share=totals["fp8_flops_share"],
        saturated=totals["saturated"] if converted else None,
        underflowed=totals["underflowed"] if converted else None,
        skipped=curve.skipped,
        ran_on=trainer.precision.ran(trainer.model),
        sample=measure.sample(trainer),
        curve=curve,
        decisions=report.decisions,
    )
