"""Several recipes, one after another, on the same bytes; stopped at any moment it leaves whole files and a report.

Ctrl-C (or SIGTERM) lets the step under way finish, saves the run, measures it as it is and writes the report up to
there; a second Ctrl-C ends it at once, and what is on the disk is still whole.
"""

from __future__ import annotations

import contextlib
import difflib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8engine.demo import files
from fp8engine.demo.config import Config, DemoError
from fp8engine.demo.plot import draw
from fp8engine.demo.precision import DEFAULT
from fp8engine.demo.progress import Screen, Silent
from fp8engine.demo.summary import Summary, about
from fp8engine.demo.train import Keeping, Result, run
from fp8engine.demo.trainer import Trainer
from fp8engine.errors import UnknownName
from fp8engine.numerics.recipe import RECIPES
from fp8engine.report import inspect
from fp8engine.report.page import page

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Session:
    """What to train in, and where to keep it.  Raises UnknownName for a recipe, DemoError for a number out of range."""

    recipes: tuple[str, ...] = DEFAULT
    seed: int = 0
    out: Path = Path("report")
    checkpoint_every: int = 100
    resume: bool = False

    def __post_init__(self):
        for recipe in self.recipes:
            if recipe not in RECIPES:
                raise UnknownName("recipe", recipe, RECIPES)
        if len(set(self.recipes)) < len(self.recipes) or not self.recipes:
            raise DemoError(f"recipes {', '.join(self.recipes)}: want each once, and at least one")
        if self.checkpoint_every < 1:
            raise DemoError(f"checkpoint_every={self.checkpoint_every}: steps between checkpoints, at least 1")

    @property
    def keeping(self) -> Keeping:
        """Where its checkpoints are."""
        return Keeping(self.out / "checkpoints", self.checkpoint_every, self.resume)


@dataclass(frozen=True)
class Outcome:
    """The report of a session, the files that hold it, and the signal that ended it early, if one did."""

    summary: Summary
    files: list[Path]
    signal: int | None = None


def train(config: Config, session: Session, screen: Screen | None = None) -> Outcome:
    """Train under each recipe in turn; the report is written after each, of `auto` also its page and its plan.

    Raises DemoError (nothing to resume, or a folder that cannot be written, before training; a full disk, with the last
    checkpoint and report whole) and StateError (a checkpoint to resume that is not this run's).
    """
    if session.resume:
        _check_resumable(session)
    files.check_writable(session.out)
    screen = screen or Silent()
    results: list[Result] = []
    common = about(config, session.seed)
    written: list[Path] = []
    pages: list[Path] = []
    with _listening() as received:
        for recipe in session.recipes:
            trainers: list[Trainer] = []

            def on_start(trainer: Trainer, recipe: str = recipe, trainers: list[Trainer] = trainers) -> None:
                trainers.append(trainer)
                screen.begins(recipe, trainer)

            def on_step(step: int, loss: float, tokens_per_second: float, recipe: str = recipe) -> bool:
                screen.step(recipe, step, loss, tokens_per_second)
                return not received

            result = run(config, recipe, session.seed, on_start=on_start, on_step=on_step, keeping=session.keeping)
            results.append(result)
            screen.done(recipe, results[-1].steps, results[-1].validation_loss)
            written = Summary(common, results).write(session.out)
            pages += _explain(trainers[0], session.out)
            if received:
                break
    summary = Summary(common, results)
    picture = draw(summary, session.out / "loss.png")
    written += [*([picture] if picture else []), *pages]
    return Outcome(summary, written, received[0] if received else None)


def _check_resumable(session: Session) -> None:
    """Raise DemoError where none of the recipes has a checkpoint, naming what is there and the folders beside it."""
    keeping = session.keeping
    if any(keeping.path(recipe, session.seed).exists() for recipe in session.recipes):
        return
    wanted = " or ".join(keeping.path(recipe, session.seed).name for recipe in session.recipes)
    there = sorted(path.name for path in keeping.folder.glob("*.pt"))
    told = f"{keeping.folder} holds {', '.join(there) or 'no checkpoint'}, and --resume needs {wanted}"
    beside = [path.parent.parent for path in session.out.resolve().parent.glob("*/checkpoints/*.pt")]
    names = sorted({folder.name for folder in beside} - {session.out.resolve().name})
    if names:
        near = difflib.get_close_matches(session.out.name, names, n=1, cutoff=0.5)
        told += f"; folders beside it with checkpoints: {', '.join(names[:8])}"
        told += f" (did you mean {near[0]!r}?)" if near else ""
    raise DemoError(f"nothing to resume: {told}. Name the folder with --out, or leave out --resume to start afresh")


def _explain(trainer: Trainer, folder: Path) -> list[Path]:
    """The page and the plan of a run whose formats were decided on the way; nothing under a fixed recipe."""
    report = inspect(trainer.model)
    if not report.controllers:
        return []
    html, plan = folder / f"{trainer.recipe}.html", folder / f"{trainer.recipe}-plan.json"
    files.write(html, page(report, trainer.curve.losses or None).encode(errors="replace"))
    report.save_plan(plan)
    return [html, plan]


@contextlib.contextmanager
def _listening() -> Iterator[list[int]]:
    """The signals received so far; the first of a kind is only noted, the second acts as it always does."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may listen
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: object) -> None:
        received.append(number)
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, usual)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
