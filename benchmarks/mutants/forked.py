"""Tests collected once and run in a fork for each bug: python -m benchmarks.mutants.forked PATH ... -k WORDS

A trial imports nothing and collects nothing but reads the file of kernels again that has the bug in it, and compiles
what differs.  Requests are lines of standard input, JSON [module, code, seconds]: a module to be read again or null,
[kernel, pattern, new text] of a bug in machine code or null, and a limit.  Each is answered by a line of JSON: the
first test that failed and why ("" twice if none did), and how often the machine code was edited; null at the limit.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import select
import signal
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from typing import IO, Any

import pytest


class Trials:
    """A plugin of pytest that runs what was collected once a request, each time in a fork."""

    def __init__(self, requests: Iterable[str], answers: IO[str]):
        self.requests, self.answers = requests, answers
        self.pipe = self.edited = 0  # of a fork

    def pytest_collection(self) -> None:
        """Hypothesis does not make smaller what failed: it takes minutes."""
        from hypothesis import Phase, settings  # not before pytest has looked which of its modules to rewrite

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("trial", settings.default, phases=phases, derandomize=True)
        settings.load_profile("trial")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer requests until there are no more."""
        if session.testsfailed or not session.items:
            raise session.Failed(f"{session.testsfailed} errors, {len(session.items)} tests")
        for line in self.requests:
            module, code, seconds = json.loads(line)
            reads, self.pipe = os.pipe()
            child = os.fork()
            if child == 0:
                self._run(session, module, code)
            os.close(self.pipe)
            ready, _, _ = select.select([reads], [], [], seconds)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(reads) as answer:
                print((answer.read() if ready else "") or "null", file=self.answers, flush=True)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The first failure is the answer."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._answer(report.nodeid, crash.message if crash else str(report.longrepr))

    def _run(self, session: pytest.Session, module: str | None, code: list[str] | None) -> None:
        try:
            if module:
                read_again(module)
        except Exception as error:  # a bug that no import survives
            self._answer("import", repr(error))
        if code:
            self._edit(*code)
        for item, after in zip(session.items, [*session.items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        self._answer("", "")

    def _answer(self, test: str, why: str) -> None:
        with os.fdopen(self.pipe, "w") as pipe:
            pipe.write(json.dumps([test, why.split("\n")[0][:300], self.edited]))
        signal.pause()  # until it is ended: nothing of pytest's own end is wanted

    def _edit(self, kernel: str, pattern: str, new: str) -> None:
        """Let the emulated card read every compiled kernel of that name with the bug in it."""
        card: Any = importlib.import_module("emulator.card")
        read = card._program

        def edited(ptx: bytes) -> tuple:
            text = ptx.decode()
            if re.search(rf"\.entry {kernel}\b", text):
                text, times = re.subn(pattern, new, text)
                self.edited += times
            return read(text.encode())

        card._program = edited


def read_again(name: str) -> None:
    """Read a module of kernels from its file, and let those who have imported of it what it was have what it is."""
    module = importlib.import_module(name)
    before = dict(vars(module))
    importlib.reload(module)
    for key, old in before.items():
        new = vars(module).get(key)
        if new is old or getattr(old, "__module__", None) != name:
            continue
        if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
        elif isinstance(old, type):
            for attribute, value in vars(new).items():
                if isinstance(value, types.FunctionType):
                    setattr(old, attribute, value)
        elif hasattr(old, "fn"):  # of triton.jit, interpreted or compiled
            vars(old).clear()
            vars(old).update(vars(new))
            if "device_caches" in vars(old):  # made by a method of the new one
                old.device_caches = defaultdict(old.create_binder)
        else:
            continue
        vars(module)[key] = old
    for key, old in before.items():
        if type(old).__name__ == "constexpr" and type(vars(module)[key]) is type(old):
            old.value = vars(module)[key].value


if __name__ == "__main__":
    given, told = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    words = [*sys.argv[1:], "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    sys.exit(pytest.main(words, plugins=[Trials(given, told)]))
