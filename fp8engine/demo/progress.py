"""What a person sees while it trains: a bar for each recipe on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8engine.demo.watch import live

if TYPE_CHECKING:
    from fp8engine.demo.trainer import Trainer


class Screen(Protocol):
    """Where a session tells how far it is."""

    def begins(self, recipe: str, trainer: Trainer) -> None:
        """A recipe begins; the trainer's model may be looked at while it is trained."""

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        """Step `step` of a recipe is done."""

    def done(self, recipe: str, steps: int, loss: float) -> None:
        """A recipe is done, with this validation loss."""


class Silent:
    """Says nothing; what a session uses unless told otherwise."""

    def begins(self, recipe: str, trainer: Trainer) -> None:
        pass

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        pass

    def done(self, recipe: str, steps: int, loss: float) -> None:
        pass


class Lines(Silent):
    """Ten lines a recipe: for a log file, a pipe, CI."""

    def __init__(self, console: Console, steps: int):
        self.console, self.steps, self.every = console, steps, max(steps // 10, 1)

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        if step % self.every == 0 or step == self.steps:
            text = f"{recipe:<13} step {step}/{self.steps}  loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            self.console.print(text, highlight=False, soft_wrap=True)

    def done(self, recipe: str, steps: int, loss: float) -> None:
        self.console.print(f"{recipe:<13} done: validation loss {loss:.4f}", highlight=False, soft_wrap=True)


class Bars(Silent):
    """One live bar a recipe."""

    def __init__(self, progress: Progress, recipes: Sequence[str], steps: int):
        self.progress = progress
        self.tasks = {
            recipe: progress.add_task(recipe, total=steps, start=False, told="[dim]waiting") for recipe in recipes
        }
        self.last: dict[str, float] = {}

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        task = self.tasks[recipe]
        if recipe not in self.last:
            self.progress.start_task(task)
        rate = self.last[recipe] = 0.9 * self.last.get(recipe, tokens_per_second) + 0.1 * tokens_per_second
        self.progress.update(task, completed=step, told=f"loss {loss:6.4f}  [dim]{rate:>9,.0f} tokens/s")

    def done(self, recipe: str, steps: int, loss: float) -> None:
        rate = self.last.get(recipe, 0.0)
        self.progress.update(
            self.tasks[recipe], completed=steps, told=f"[green]loss {loss:6.4f}[/]  [dim]{rate:>9,.0f} tokens/s"
        )
        self.progress.stop_task(self.tasks[recipe])


@contextlib.contextmanager
def shown(console: Console, recipes: Sequence[str], steps: int, watch: bool = False) -> Iterator[Screen]:
    """A screen for these recipes: where `console` is a terminal bars, or the layers live; lines elsewhere."""
    if not console.is_terminal:
        yield Lines(console, steps)
        return
    if watch:
        with live(console, recipes, steps) as screen:
            yield screen
        return
    columns = (
        TextColumn("[bold]{task.description:<13}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress, recipes, steps)
