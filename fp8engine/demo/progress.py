"""Progress on screen: on a terminal a bar for each recipe, with every layer live; a line now and then anywhere else.

The layers live: formats now, amax, SQNR, warnings; below them what was decided last.  The model is inspected twice a
second at most, because reading its counters waits for the device; loss and speed are those of every step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fp8engine.auto import Alarm
from fp8engine.report.collect import inspect
from fp8engine.report.table import Report
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from fp8engine.demo.trainer import Trainer

EVERY = 0.5  # seconds between two inspections of the model
AROUND = 13  # lines of a screen that are no layers and no bars
LAST = 5  # decisions and warnings shown
COLOURS = {"E4M3": "bright_blue", "E5M2": "yellow"}
SHORT = {"tensor": "", "row": " row", "block": " block"}


class Silent:
    """No output; the base of every screen, and the one that a session uses by default."""

    def begins(self, recipe: str, trainer: Trainer) -> None:
        """A recipe begins; the trainer's model may be inspected while it is trained."""

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        """Step `step` of a recipe is done."""

    def done(self, recipe: str, steps: int, loss: float) -> None:
        """A recipe is done, with this validation loss."""


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
            recipe: progress.add_task(recipe, total=steps, start=False, note="[dim]waiting") for recipe in recipes
        }
        self.last: dict[str, float] = {}

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        task = self.tasks[recipe]
        if recipe not in self.last:
            self.progress.start_task(task)
        rate = self.last[recipe] = 0.9 * self.last.get(recipe, tokens_per_second) + 0.1 * tokens_per_second
        self.progress.update(task, completed=step, note=f"loss {loss:6.4f}  [dim]{rate:>9,.0f} tokens/s")

    def done(self, recipe: str, steps: int, loss: float) -> None:
        rate = self.last.get(recipe, 0.0)
        self.progress.update(
            self.tasks[recipe], completed=steps, note=f"[green]loss {loss:6.4f}[/]  [dim]{rate:>9,.0f} tokens/s"
        )
        self.progress.stop_task(self.tasks[recipe])


class Watch(Bars):
    """The bars, and below them every layer of the recipe that is trained now."""

    def __init__(self, live: Live, progress: Progress, recipes: Sequence[str], steps: int):
        super().__init__(progress, recipes, steps)
        self.live, self.steps = live, steps
        self.report: Report | None = None
        self.trainer: Trainer | None = None
        self.next = 0.0

    def begins(self, recipe: str, trainer: Trainer) -> None:
        self.trainer, self.report, self.next = trainer, None, 0.0

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        super().step(recipe, step, loss, tokens_per_second)
        now = time.monotonic()
        if self.trainer is not None and (now >= self.next or step == self.steps):
            self.report = inspect(self.trainer.model)
            self.next = now + EVERY
            self.live.update(self.drawn(), refresh=True)

    def done(self, recipe: str, steps: int, loss: float) -> None:
        super().done(recipe, steps, loss)
        self.live.update(self.drawn(), refresh=True)

    def drawn(self) -> RenderableType:
        """The whole screen."""
        parts: list[RenderableType] = [self.progress]
        if self.report is not None and (rows := rows_of(self.report)):
            parts.append(layers(rows, max(self.live.console.height - AROUND - len(self.tasks), 4)))
            parts += [Text(line, style, no_wrap=True, overflow="ellipsis") for line, style in last(self.report)]
        return Group(*parts)


def rows_of(report: Report) -> list[dict]:
    """A dict for each layer in FP8: name, casts, amax and SQNR by role (None where not known), warnings."""
    samples = {slot: seen[-1] for slot, seen in report.auto.samples.items()}
    warned = [alarm["slot"] for alarm in report.alarms]
    rows = []
    for layer in report.layers:
        if layer["recipe"] == "none":
            continue
        slots = {role: f"{layer['name']}.{role}" for role in ROLES}
        known = {role: samples.get(slot) for role, slot in slots.items()}
        rows.append(
            {
                "name": layer["name"],
                "casts": [layer[role]["cast"] if newest is None else newest.cast for role, newest in known.items()],
                "amax": [layer[role].get("amax") for role in ROLES],
                "sqnr": [None if newest is None else newest.sqnr_db for newest in known.values()],
                "warnings": sum(warned.count(slot) for slot in slots.values()),
            }
        )
    return rows


def layers(rows: Sequence[dict], most: int) -> Table:
    """The table; of more than `most` layers those whose SQNR is least."""
    shown = sorted(rows, key=_least)[:most] if len(rows) > most else rows
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    if len(rows) > len(shown):
        table.caption, table.caption_justify = f"the {len(shown)} of {len(rows)} layers with the least SQNR", "left"
    table.add_column("layer", no_wrap=True, overflow="ellipsis")
    for heading in ROLES:
        table.add_column(heading, no_wrap=True)
    for heading in ("amax", "SQNR, dB", "warnings"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in shown:
        sqnr = " ".join("  – " if each is None else f"{each:4.1f}" for each in row["sqnr"])
        amax = " ".join("–" if each is None else f"{each:.1e}" for each in row["amax"])
        warnings = Text(str(row["warnings"]), "bold red") if row["warnings"] else Text("")
        table.add_row(Text(row["name"]), *map(_cast, row["casts"]), amax, sqnr, warnings)
    return table


def last(report: Report) -> list[tuple[str, str]]:
    """(line, style) of the latest changes and warnings, oldest first."""
    found = [(alarm["step"], f"⚠ {Alarm(**alarm)}", "red") for alarm in report.alarms[-LAST:]]
    for each in report.decisions[-LAST:]:
        text = f"step {each['step']} {each['slot']} {each['before']} -> {each['after']}: {each['why']}"
        found.append((each["step"], text, "dim"))
    return [(text, style) for _, text, style in sorted(found, key=lambda each: each[0])[-LAST:]]


def _cast(label: str) -> Text:
    format, _, rest = label.partition("/")
    granularity, _, margin = rest.partition(" ")
    return Text(
        format + SHORT.get(granularity, f" {granularity}") + (f" {margin}" if margin else ""),
        COLOURS.get(format[:4], ""),
    )


def _least(row: dict) -> float:
    known = [each for each in row["sqnr"] if each is not None]
    return min(known, default=math.inf)


@contextlib.contextmanager
def shown(console: Console, recipes: Sequence[str], steps: int, watch: bool = False) -> Iterator[Silent]:
    """A screen for these recipes: where `console` is a terminal bars, or the layers live; lines elsewhere."""
    if not console.is_terminal:
        yield Lines(console, steps)
        return
    columns = (
        TextColumn("[bold]{task.description:<13}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console)
    if watch:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield Watch(live, progress, recipes, steps)  # what it showed last stays on the terminal
    else:
        with progress:
            yield Bars(progress, recipes, steps)
