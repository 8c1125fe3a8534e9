"""The file of results: one JSON object a line, each on disk before the next measurement begins.

A process that is killed loses the line it was writing and nothing else: whoever writes next begins a new line, and
a line that is no JSON object is counted and left out.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Sink:
    """Appends the records of one group to the file.

    kinds: "begin" what is measured next; "check" a check's result; "row" a benchmark's; "note" anything else.
    """

    def __init__(self, path: Path, group: str):
        self.path, self.group = path, group

    def write(self, kind: str, **fields: Any) -> None:
        """One record, on disk when this returns."""
        line = json.dumps({"kind": kind, "group": self.group, "at": time.time(), **fields}, default=str)
        append(self.path, line)

    def begin(self, what: object) -> None:
        """What is measured from now on: where a hang or a crash is looked for."""
        self.write("begin", what=str(what))

    def rows(self, bench: str, rows: list[Record]) -> None:
        """A benchmark's rows.  bench: the benchmark, which knows how to print them."""
        for row in rows:
            self.write("row", bench=bench, row=row)


def append(path: Path, line: str) -> None:
    """Write one line at the end, after whatever a killed process left unfinished there."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[list[Record], int]:
    """(the records, how many lines are none)."""
    found, broken = [], 0
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            found.append({"group": record["group"], "at": float(record["at"]), **record, "kind": str(record["kind"])})
        except (ValueError, TypeError, KeyError):
            broken += bool(line.strip())
    return found, broken
