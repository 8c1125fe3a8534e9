"""Sessions of several runs on the same bytes: each trained from its first step or last checkpoint, then measured.

Ctrl-C (or SIGTERM) lets the step under way finish, saves the run, measures it as it is and writes the report up to
there; a second Ctrl-C ends it at once, and what is on the disk is still whole.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import signal
import statistics
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8engine.bench.steps import saved_bytes
from fp8engine.demo import disk
from fp8engine.demo.config import Config, DemoError, check_seed, read
from fp8engine.demo.model import loss_of
from fp8engine.demo.picture import draw
from fp8engine.demo.precision import DEFAULT, PLAIN
from fp8engine.demo.progress import Silent
from fp8engine.demo.report import TABLE, Result, Summary, about
from fp8engine.demo.trainer import Keeping, OnStep, Trainer
from fp8engine.numerics.recipe import resolve
from fp8engine.report.collect import inspect
from fp8engine.report.folded import measured as measured_share

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROMPT = b"The "
TEMPERATURE = 0.7
LENGTH = 200  # bytes of a sample


def run(
    config: Config, recipe: str, seed: int = 0, *, on_step: OnStep | None = None, keeping: Keeping | None = None
) -> Result:
    """Train one GPT under one recipe.

    on_step is called after every step; when it returns False the run is saved (where `keeping` says) and measured as it
    is.  Raises DemoError (text, folder, seed), UnknownName (recipe), StateError (a checkpoint that is not this run's).

    >>> result = run(Config(size="tiny", steps=2, batch=2), "rowwise")
    >>> result.steps, result.fp8_flops_share > 0.8, result.ran_on
    (2, True, 'reference (emulated)')
    """
    trainer = start(config, recipe, seed, keeping)
    trainer.run(on_step, keeping)
    return measured(trainer)


def start(config: Config, recipe: str, seed: int, keeping: Keeping | None) -> Trainer:
    """The trainer of a run, before its first step or where its checkpoint ends."""
    check_seed(seed)
    trainer = Trainer(config, recipe, seed, read(config.text, config.shape.context))
    if keeping is not None and keeping.resume and (path := keeping.path(recipe, seed)).exists():
        trainer.load(path)
    return trainer


def measured(trainer: Trainer, sampled: bool = True) -> Result:
    """The result of a run as far as it has come.  sampled: with a text that it writes, which takes seconds."""
    config, curve = trainer.config, trainer.curve
    known = dict(curve.validation)
    report = inspect(trainer.model)
    totals = report.totals
    return Result(
        recipe=trainer.recipe,
        seed=trainer.seed,
        steps=trainer.steps_done,
        train_loss=statistics.fmean(curve.losses[-20:]) if curve.losses else math.nan,
        validation_loss=known[trainer.steps_done] if trainer.steps_done in known else trainer.validate(),
        tokens_per_second=config.tokens_per_step / statistics.median(curve.seconds) if curve.seconds else math.nan,
        activation_bytes=activation_bytes(trainer),
        fp8_flops_share=totals["fp8_flops_share"],
        saturated=measured_share(totals, "saturated"),
        underflowed=measured_share(totals, "underflowed"),
        skipped=curve.skipped,
        ran_on=trainer.precision.ran(trainer.model),
        sample=sample(trainer) if sampled else "",
        curve=curve,
        decisions=report.decisions,
        formats={slot: samples[-1].cast for slot, samples in report.auto.samples.items()},
    )


def activation_bytes(trainer: Trainer) -> int:
    """Bytes of activations that one step keeps for its backward.

    Counted where autograd saves them, each storage once, at the run's batch and at twice that; the difference is what
    belongs to a batch: parameters and autocast's 16-bit copies of them fall out.  What is around FP8 layers is in BF16,
    as it is on a card.  The model's copy does the work, so its counters and scales stand still.
    """
    model, config = copy.deepcopy(trainer.model), trainer.config

    def saved(batch: int) -> int:
        ids = trainer.text.batch(trainer.seed, 0, batch, config.shape.context).to(trainer.device)
        with trainer.precision.step(), trainer.precision.usual():
            return saved_bytes(model, lambda: loss_of(model, ids))

    return saved(2 * config.batch) - saved(config.batch)


@torch.no_grad()
def sample(trainer: Trainer) -> str:
    """Text that the model writes after PROMPT, the same for the same weights."""
    generator = torch.Generator().manual_seed(trainer.seed)
    written = list(PROMPT)
    for _ in range(LENGTH):
        ids = torch.tensor([written[-trainer.config.shape.context :]], device=trainer.device)
        with trainer.precision.step(), trainer.precision.forward():
            logits = trainer.model(ids)[0, -1].float().cpu()
        chances = torch.softmax(logits / TEMPERATURE, 0).nan_to_num(0.0) + 1e-9  # a diverged model writes noise
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(written).decode("utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class Session:
    """Recipes, and where results are kept.  Raises UnknownName for a recipe, DemoError for a number out of range."""

    recipes: tuple[str, ...] = DEFAULT
    seed: int = 0
    out: Path = Path("report")
    checkpoint_every: int = 100
    resume: bool = False

    def __post_init__(self):
        for recipe in self.recipes:
            resolve(recipe)
        if len(set(self.recipes)) < len(self.recipes) or not self.recipes:
            raise DemoError(f"recipes {', '.join(self.recipes)}: want each once, and at least one")
        check_seed(self.seed)
        if self.checkpoint_every < 1:
            raise DemoError(f"checkpoint_every={self.checkpoint_every}: steps between checkpoints, at least 1")

    @property
    def keeping(self) -> Keeping:
        """Where its checkpoints are."""
        return Keeping(self.out / "checkpoints", self.checkpoint_every, self.resume)

    def held(self) -> list[str]:
        """The names of an earlier run's checkpoints and report that this session would write over."""
        paths = [self.keeping.path(recipe, self.seed) for recipe in self.recipes]
        return [path.name for path in (*paths, self.out / TABLE) if path.exists()]


@dataclass(frozen=True)
class Outcome:
    """The report of a session, the files that hold it, and the signal that ended it early, if one did."""

    summary: Summary
    files: list[Path]
    signal: int | None = None


def train(config: Config, session: Session, screen: Silent | None = None) -> Outcome:
    """Train under each recipe in turn; the report is written after each, of `auto` also its page and its plan.

    Raises DemoError (nothing to resume, or a folder that cannot be written, before training; a full disk, with the last
    checkpoint and report whole) and StateError (a checkpoint to resume that is not this run's).
    """
    if session.resume:
        _check_resumable(session)
    disk.check_writable(session.out)
    screen = screen or Silent()
    summary = Summary(about(config, session.seed), [])
    written: list[Path] = []
    pages: list[Path] = []
    sampled = {session.recipes[0], *[recipe for recipe in session.recipes if recipe not in PLAIN][-1:]}
    with _signals() as received:
        for recipe in session.recipes:
            trainer = start(config, recipe, session.seed, session.keeping)
            screen.begins(recipe, trainer)

            def on_step(step: int, loss: float, tokens_per_second: float, recipe: str = recipe) -> bool:
                screen.step(recipe, step, loss, tokens_per_second)
                return not received

            trainer.run(on_step, session.keeping)
            result = measured(trainer, sampled=recipe in sampled or bool(received))
            summary.results.append(result)
            screen.done(recipe, result.steps, result.validation_loss)
            written = summary.write(session.out)
            pages += _explain(trainer, session.out)
            if received:
                break
    picture = draw(summary, session.out / "loss.png")
    files = [*written, *([picture] if picture else []), *pages]
    return Outcome(summary, files, received[0] if received else None)


def _check_resumable(session: Session) -> None:
    """Raise DemoError where none of the recipes has a checkpoint, naming what is there and the folders beside it."""
    keeping = session.keeping
    if any(keeping.path(recipe, session.seed).exists() for recipe in session.recipes):
        return
    wanted = " or ".join(keeping.path(recipe, session.seed).name for recipe in session.recipes)
    there = sorted(path.name for path in keeping.folder.glob("*.pt"))
    found = f"{keeping.folder} holds {', '.join(there) or 'no checkpoint'}, and --resume needs {wanted}"
    beside = [path.parent.parent for path in session.out.resolve().parent.glob("*/checkpoints/*.pt")]
    names = sorted({folder.name for folder in beside} - {session.out.resolve().name})
    if names:
        near = difflib.get_close_matches(session.out.name, names, n=1, cutoff=0.5)
        found += f"; folders beside it with checkpoints: {', '.join(names[:8])}"
        found += f" (did you mean {near[0]!r}?)" if near else ""
    raise DemoError(f"nothing to resume: {found}. Name the folder with --out, or leave out --resume to start afresh")


def _explain(trainer: Trainer, folder: Path) -> list[Path]:
    """The page and the plan of a run whose formats were decided on the way; nothing under a fixed recipe."""
    report = inspect(trainer.model)
    if not report.auto.plans:
        return []
    html, plan = folder / f"{trainer.recipe}.html", folder / f"{trainer.recipe}-plan.json"
    report.to_html(html, trainer.curve.losses or None)
    report.save_plan(plan)
    return [html, plan]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals received so far: the first of a kind is only recorded, the second acts as it always does."""
    received: list[int] = []

    def record(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    ours = threading.current_thread() is threading.main_thread()  # no other thread may handle signals
    before = {number: signal.signal(number, record) for number in SIGNALS} if ours else {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
