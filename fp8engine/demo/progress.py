"""Progress on screen: on a terminal a bar for each recipe, with every layer live; a line now and then anywhere else.

The layers live: formats now, amax, SQNR, warnings; below them what was decided last.  The model is inspected twice a
second at most, because reading its counters waits for the device; loss and speed are those of every step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
        self.progress, self.steps = progress, steps
        self.tasks = {
            recipe: progress.add_task(recipe, total=steps, start=False, note="[dim]waiting") for recipe in recipes
        }
        self.rates: dict[str, float] = {}

    def begins(self, recipe: str, trainer: Trainer) -> None:
        self.progress.start_task(self.tasks[recipe])

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        self.rates[recipe] = 0.9 * self.rates.get(recipe, tokens_per_second) + 0.1 * tokens_per_second
        self._show(recipe, step, f"loss {loss:6.4f}")

    def done(self, recipe: str, steps: int, loss: float) -> None:
        self._show(recipe, steps, f"[green]loss {loss:6.4f}[/]")
        self.progress.stop_task(self.tasks[recipe])

    def _show(self, recipe: str, step: int, loss: str) -> None:
        note = f"{loss}  [dim]{self.rates.get(recipe, 0.0):>9,.0f} tokens/s"
        self.progress.update(self.tasks[recipe], completed=step, note=note)


class Watch(Bars):
    """The bars, and below them every layer of the recipe that is trained now."""

    def __init__(self, live: Live, progress: Progress, recipes: Sequence[str], steps: int):
        super().__init__(progress, recipes, steps)
        self.live = live
        self.report: Report | None = None
        self.trainer: Trainer | None = None
        self.next = 0.0

    def begins(self, recipe: str, trainer: Trainer) -> None:
        super().begins(recipe, trainer)
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
        most = max(self.live.console.height - AROUND - len(self.tasks), 4)
        if self.report is not None and (table := layers(self.report, most)) is not None:
            parts.append(table)
            parts += [Text(line, style, no_wrap=True, overflow="ellipsis") for line, style in last(self.report)]
        return Group(*parts)


def layers(report: Report, most: int) -> Table | None:
    """A row for each layer in FP8, those with the least SQNR where there are more than `most`; None where none is."""
    newest = {slot: seen[-1] for slot, seen in report.auto.samples.items()}
    warned = Counter(alarm["slot"] for alarm in report.alarms)
    rows: list[tuple[float, list[Text | str]]] = []
    for layer in report.layers:
        if layer["recipe"] != "none":
            slots = {role: f"{layer['name']}.{role}" for role in ROLES}
            seen = {role: newest.get(slot) for role, slot in slots.items()}
            casts = [layer[role]["cast"] if one is None else one.cast for role, one in seen.items()]
            sqnr = " ".join("  – " if one is None else f"{one.sqnr_db:4.1f}" for one in seen.values())
            amaxes = [layer[role].get("amax") for role in ROLES]
            amax = " ".join("–" if each is None else f"{each:.1e}" for each in amaxes)
            least = min((one.sqnr_db for one in seen.values() if one is not None), default=math.inf)
            warnings = Text(str(sum(warned[slot] for slot in slots.values()) or ""), "bold red")
            rows.append((least, [Text(layer["name"]), *map(_cast, casts), amax, sqnr, warnings]))
    if not rows:
        return None
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", no_wrap=True, overflow="ellipsis")
    for heading in (*ROLES, "amax", "SQNR, dB", "warnings"):
        table.add_column(heading, justify="left" if heading in ROLES else "right", no_wrap=True)
    if len(rows) > most:
        table.caption, table.caption_justify = f"the {most} of {len(rows)} layers with the least SQNR", "left"
        rows = sorted(rows, key=lambda row: row[0])[:most]
    for _, cells in rows:
        table.add_row(*cells)
    return table


def told(decision: Mapping[str, Any]) -> str:
    """One change of format as text."""
    return "step {step} {slot} {before} -> {after}: {why}".format(**decision)


def last(report: Report) -> list[tuple[str, str]]:
    """(line, style) of the latest changes and warnings, oldest first."""
    found = [(alarm["step"], f"⚠ {Alarm(**alarm)}", "red") for alarm in report.alarms[-LAST:]]
    found += [(change["step"], told(change), "dim") for change in report.decisions[-LAST:]]
    return [(text, style) for _, text, style in sorted(found, key=lambda each: each[0])[-LAST:]]


def _cast(label: str) -> Text:
    return Text(label.replace("/tensor", "").replace("/", " "), COLOURS.get(label[:4], ""))


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
