"""Comparison of the baselines of all Tritons: where one gives worse machine code than another, and why that is allowed.

What is compared, of each row that two baselines have, with the best of them:

    spills     any is worse
    ceiling    per cent of the Tensor Core's rate that the main loop allows: worse by more than CEILING points
    programs   how many fit on a multiprocessor, which is what registers cost: worse below PROGRAMS of the most

Registers alone are no loss: a kernel with more of them runs as fast while as many programs fit.  Differences below the
limits are scheduling: each version is some points better in some kernels and worse in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.machine_code.reasons import REASONS, Reason, of

CEILING = 5
PROGRAMS = 2 / 3
UNITS = {"spills": "bytes spilled", "ceiling": "% of the Tensor Core's rate", "programs": "programs a multiprocessor"}
Baselines = Mapping[str, Mapping[str, Any]]  # version -> what baselines.load gives


class Worse(NamedTuple):
    """One row where a version is worse than another."""

    row: str
    what: str
    version: str
    value: int
    best: int
    of_version: str
    registers: int

    def __str__(self) -> str:
        unit = UNITS[self.what]
        return (
            f"{self.row}: Triton {self.version} has {self.value} {unit} ({self.registers} registers), "
            f"{self.of_version} has {self.best}"
        )

    def reason(self) -> Reason | None:
        """The reason that is written down for it."""
        return of(self.version, self.row, self.what, self.value)


def worse(baselines: Baselines) -> Iterator[Worse]:
    """Every row and version that is worse than the best by more than the limits."""
    kernels = {version: baseline["kernels"] for version, baseline in baselines.items()}
    for name in dict.fromkeys(name for rows in kernels.values() for name in rows):
        found = {version: rows[name] for version, rows in kernels.items() if name in rows}
        for what in UNITS:
            by_goodness = (min if what == "spills" else max)(found, key=lambda version: found[version][what])
            best = found[by_goodness][what]
            for version, row in found.items():
                if _is_worse(what, row[what], best):
                    yield Worse(name, what, version, row[what], best, by_goodness, row["registers"])


def _is_worse(what: str, value: int, best: int) -> bool:
    if what == "spills":
        return value > 0
    return value < best - CEILING if what == "ceiling" else value < PROGRAMS * best


def unused(baselines: Baselines) -> list[Reason]:
    """Reasons that nothing in these baselines needs."""
    needed = {one.reason() for one in worse(baselines)}
    return [reason for reason in REASONS if reason not in needed and set(reason.versions) <= set(baselines)]
