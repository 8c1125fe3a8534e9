"""The layers live, while they train: formats now, amax, SQNR, warnings; below them what was decided last.

Drawn where there is a terminal.  The model is looked at twice a second at most, because reading its counters waits for
the device; loss and speed are those of every step.
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
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fp8engine.auto import Alarm
from fp8engine.report import inspect
from fp8engine.report.table import Report
from fp8engine.scaling.table import ROLES

if TYPE_CHECKING:
    from fp8engine.demo.trainer import Trainer

EVERY = 0.5  # seconds between two looks at the model
AROUND = 14  # lines of a screen that are no layers
LAST = 5  # decisions and warnings shown
COLOURS = {"E4M3": "bright_blue", "E5M2": "yellow"}
SHORT = {"tensor": "", "row": " row", "block": " block"}


class Watch:
    """A screen of one recipe at a time; the finished ones are a line each."""

    def __init__(self, live: Live, recipes: Sequence[str], steps: int):
        self.live, self.recipes, self.steps = live, recipes, steps
        self.finished: list[str] = []
        self.report: Report | None = None
        self.trainer: Trainer | None = None
        self.now = ("", 0, math.nan, 0.0)
        self.next = 0.0

    def begins(self, recipe: str, trainer: Trainer) -> None:
        """A recipe begins."""
        self.trainer, self.report, self.next = trainer, None, 0.0
        self.now = (recipe, trainer.steps_done, math.nan, 0.0)

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        """A step is done."""
        self.now = (recipe, step, loss, tokens_per_second)
        clock = time.monotonic()
        if self.trainer is not None and (clock >= self.next or step == self.steps):
            self.report = inspect(self.trainer.model)
            self.next = clock + EVERY
            self.live.update(self.drawn(), refresh=True)

    def done(self, recipe: str, steps: int, loss: float) -> None:
        """A recipe is done."""
        self.finished.append(f"{recipe:<13} {steps} steps, validation loss {loss:.4f}")
        self.live.update(self.drawn(), refresh=True)

    def drawn(self) -> RenderableType:
        """The whole screen."""
        recipe, step, loss, rate = self.now
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.steps, completed=step, width=24)
        head.add_row(
            Text(recipe, "bold"), bar, f"{step}/{self.steps}", f"loss {loss:.4f}", Text(f"{rate:,.0f} tokens/s", "dim")
        )
        parts: list[RenderableType] = [Text(line, "dim") for line in self.finished]
        parts.append(head)
        if self.report is not None and (rows := rows_of(self.report)):
            parts.append(layers(rows, max(self.live.console.height - AROUND - len(self.finished), 4)))
            parts += [Text(line, style, no_wrap=True, overflow="ellipsis") for line, style in last(self.report)]
        return Group(*parts)


def rows_of(report: Report) -> list[dict]:
    """A dict for each layer in FP8: name, casts, amax and SQNR by role (None where not known), warnings."""
    looks = {slot: seen[-1] for each in report.controllers for slot, seen in each.history.looks.items() if seen}
    warned = [alarm["slot"] for alarm in report.alarms]
    rows = []
    for layer in report.layers:
        if layer["recipe"] == "none":
            continue
        slots = [f"{layer['name']}.{role}" for role in ROLES]
        rows.append(
            {
                "name": layer["name"],
                "casts": [looks[s].cast if s in looks else layer[r]["cast"] for s, r in zip(slots, ROLES, strict=True)],
                "amax": [layer[role].get("amax") for role in ROLES],
                "sqnr": [looks[slot].sqnr_db if slot in looks else None for slot in slots],
                "warnings": sum(warned.count(slot) for slot in slots),
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
    told = [(alarm["step"], f"⚠ {Alarm(**alarm)}", "red") for alarm in report.alarms[-LAST:]]
    for each in report.decisions[-LAST:]:
        text = f"step {each['step']} {each['slot']} {each['before']} -> {each['after']}: {each['why']}"
        told.append((each["step"], text, "dim"))
    return [(text, style) for _, text, style in sorted(told, key=lambda each: each[0])[-LAST:]]


def _cast(label: str) -> Text:
    format, _, rest = label.partition("/")
    grain, _, margin = rest.partition(" ")
    return Text(format + SHORT.get(grain, f" {grain}") + (f" {margin}" if margin else ""), COLOURS.get(format[:4], ""))


def _least(row: dict) -> float:
    known = [each for each in row["sqnr"] if each is not None]
    return min(known, default=math.inf)


@contextlib.contextmanager
def live(console: Console, recipes: Sequence[str], steps: int) -> Iterator[Watch]:
    """The screen while it is shown; what it showed last stays on the terminal."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as shown:
        yield Watch(shown, recipes, steps)
