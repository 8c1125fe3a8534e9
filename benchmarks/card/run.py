"""The run: group after group, each in a process of its own; the file of results; the table at its marks.

A group that hangs, crashes or runs out of memory costs its own time and results and nothing else: its process is
killed, what it had written stays, and the table says how it ended, with its last lines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.card import table
from benchmarks.card.plan import MARKS, MEASURE_SETTING, Group
from benchmarks.card.records import Sink

SCRIPT = Path(__file__).parents[1] / "gpu.py"
LEAST = 15.0  # seconds: with fewer left a group is not begun
POLL = 0.1
LAST_LINES, LONGEST = 12, 300  # of a group's output, kept where it ended badly


class Process(Protocol):
    """A group that runs."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        ...

    def kill(self) -> None:
        """End it and all that it started."""
        ...

    def lines(self) -> list[str]:
        """The last lines that it printed."""
        ...


class World(NamedTuple):
    """What a test replaces: clock, sleep, the start of a group, where text goes, variables of later groups."""

    now: Callable[[], float]
    sleep: Callable[[float], None]
    start: Callable[[Group, float], Process]
    show: Callable[[str], None]
    set: Callable[[str, str], None] = lambda name, value: None


def run(plan: Sequence[Group], file: Path, seconds: float, world: World) -> int:
    """Every group that there is time for.  The exit status: 1 where a check failed or a group ended badly."""
    begun = world.now()
    marks = [mark for mark in MARKS if mark < seconds]

    def show_at_marks() -> None:
        while marks and world.now() - begun >= marks[0]:
            world.show(f"after {marks.pop(0) / 60:.0f} minutes\n{table.text(file, plan)}")

    for group in plan:
        sink, left = Sink(file, group.name), seconds - (world.now() - begun)
        if left < LEAST:
            sink.write("end", status="not begun", why="no time was left", seconds=0.0, last=[])
            continue
        limit = min(group.seconds, left)
        sink.write("start", limit=round(limit, 1))
        start = world.now()
        try:
            process = world.start(group, limit)
        except OSError as error:
            sink.write("end", status="failed", why=f"could not be started: {error}", seconds=0.0, last=[])
            continue
        try:
            while (status := process.poll()) is None and world.now() - start < limit:
                world.sleep(POLL)
                show_at_marks()
        except BaseException:  # the run is interrupted: a group has a session of its own, and would go on
            process.kill()
            raise
        if status is None:
            process.kill()
        ended, why = ending(status, limit)
        last = [line[:LONGEST] for line in process.lines()[-LAST_LINES:]] if ended != "done" else []
        sink.write("end", status=ended, why=why, seconds=round(world.now() - start, 1), last=last)
        if group.else_set and (ended != "done" or table.failed(file)):
            world.set(*group.else_set)
            sink.write("note", text=f"it went wrong: the groups after it run with {'='.join(group.else_set)}")
        world.show(table.line_of(group.name, file))
        show_at_marks()
    world.show(table.text(file, plan))
    return int(table.failed(file))


def ending(status: int | None, limit: float) -> tuple[str, str]:
    """How a group ended, in a word and in a sentence.  status: its exit status, None where it had to be killed.

    >>> ending(0, 9.0), ending(-11, 9.0)
    (('done', ''), ('failed', 'ended by signal 11 (SIGSEGV)'))
    """
    if status == 0:
        return "done", ""
    if status is None:
        return "failed", f"killed: it was not done after {limit:.0f} s"
    if status < 0:
        with contextlib.suppress(ValueError):
            return "failed", f"ended by signal {-status} ({signal.Signals(-status).name})"
        return "failed", f"ended by signal {-status}"
    return "failed", f"exit status {status}"


class Spawned:
    """A group in a process, with all that it starts in one session; what it prints goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]):
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it.  One that a driver holds cannot be waited for: it is left behind after a while."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)

    def lines(self) -> list[str]:
        """The last lines that it printed; bytes that are no text are shown as such."""
        text = self.log.read_bytes()[-20_000:].decode(errors="backslashreplace")
        return ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines() if line.strip()]


class Processes:
    """Starts groups and the pool, with one cache of kernels among them."""

    def __init__(self, file: Path, cache: Path):
        self.file, self.cache = file, cache
        self._logs = Path(tempfile.mkdtemp(prefix="fp8engine-gpu-"))
        self._environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
        self._pool: list[Spawned] = []

    def group(self, group: Group, seconds: float) -> Spawned:
        """A group's process."""
        self._environment[MEASURE_SETTING] = "1" if group.trials else "0"
        return self._spawn(group.name, "--group", group.name, "--seconds", str(seconds))

    def start_pool(self, count: int, groups: Sequence[str]) -> None:
        """Processes that compile, each its share of all kernels of these groups."""
        for index in range(count):
            share = ("--warm", f"{index}/{count}", "--groups", ",".join(groups))
            self._pool.append(self._spawn(f"warm-{index}", *share))

    def wait_for_pool(self) -> list[str]:
        """Until all are done; what went wrong, a line a process."""
        wrong = []
        for index, process in enumerate(self._pool):
            while (status := process.poll()) is None:
                time.sleep(POLL)
            if status:
                wrong.append(f"process {index} of the pool: {ending(status, 0.0)[1]}; {process.lines()[-1:]}")
        return wrong

    def stop_pool(self) -> None:
        """End those that still compile."""
        for process in self._pool:
            if process.poll() is None:
                process.kill()

    def world(self, show: Callable[[str], None]) -> World:
        """The real one."""
        return World(time.monotonic, time.sleep, self.group, show, self._environment.__setitem__)

    def _spawn(self, name: str, *arguments: str) -> Spawned:
        command = [sys.executable, str(SCRIPT), "--file", str(self.file), "--cache", str(self.cache), *arguments]
        return Spawned(command, self._logs / f"{name}.log", self._environment)
