"""Three parts of all tests: the short one for `make test`, the rest for `make test-all`, and the nightly one.

    short    of each test function MOST cases, spread over its parameters, but of one of the emulated card or the
             interpreter one; of a function marked slow one where it is marked `short` as well, else none
    rest     all others but
    nightly  cases marked so, and of functions marked `few` all but so many: products of parameters whose values the
             other parts have, in other combinations; what differs by a recipe or a size that laws/ goes through

Functions begin at different cases, so that together they have all values of a parameter.  The short part has to hold a
case of every room, of every recipe, and of every file of the emulated card and of the interpreter, which are the
kernels': `divide` notes what it has not, and a test in each of pytest's two runs fails then.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from fp8engine.numerics.recipe import RECIPES

MOST = 2
PARTS = ("short", "rest", "nightly")
KERNELS = ("emulated", "interpreted")  # folders whose files are each of a kernel, or of a family of them
LACKS = pytest.StashKey[list[str]]()  # what the short part of the collected tests has no case of


def short(items: Sequence[pytest.Item]) -> set[str]:
    """Names (node ids) of the cases in the short part."""
    return _some(items, _in_short)


def _in_short(item: pytest.Item) -> int:
    if _is(item, "slow", "nightly"):
        return 1 if _is(item, "short") else 0
    return 1 if item.path.parent.name in KERNELS else MOST


def nightly(items: Sequence[pytest.Item]) -> set[str]:
    """Names of the cases, of those that the short part has not, in the nightly part."""
    few = {item.nodeid: mark.args[0] for item in items if (mark := item.get_closest_marker("few"))}
    kept = _some(items, lambda item: few.get(item.nodeid, 0))
    return {item.nodeid for item in items if _is(item, "nightly")} | few.keys() - kept


def _some(items: Sequence[pytest.Item], most: Callable[[pytest.Item], int]) -> set[str]:
    """Names of so many cases of each function, spread over its parameters."""
    functions: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if most(item):
            functions[str(item.path), getattr(item, "originalname", item.name)].append(item)
    kept: set[str] = set()
    for (_, function), cases in functions.items():
        first = zlib.crc32(function.encode()) % len(cases)
        few = min(most(cases[0]), len(cases))
        kept |= {cases[(first + i * len(cases) // few) % len(cases)].nodeid for i in range(few)}
    return kept


def _is(item: pytest.Item, *marks: str) -> bool:
    return any(item.get_closest_marker(mark) for mark in marks)


def missing(kept: Iterable[pytest.Item], every: Iterable[pytest.Item]) -> list[str]:
    """What the kept cases do not have and all have: rooms and files of the tests, recipes among the parameters."""
    return sorted(_covered(every) - _covered(kept))


def _covered(items: Iterable[pytest.Item]) -> set[str]:
    found = set()
    for item in items:
        room = item.path.parent.name if "tests" in item.path.parts else "doctests"
        found.add(f"room {room}")
        if room in KERNELS:
            found.add(f"file {Path(room, item.path.name)}")
            continue
        values = getattr(getattr(item, "callspec", None), "params", {}).values()
        found |= {f"recipe {name}" for name in RECIPES if name in values}
    return found


def divide(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the part that `--part` names."""
    part, names = config.getoption("--part"), short(items)
    late = nightly([item for item in items if item.nodeid not in names])
    parts = ["short" if each.nodeid in names else "nightly" if each.nodeid in late else "rest" for each in items]
    kept = [item for item, its in zip(items, parts, strict=True) if its == part]
    config.stash[LACKS] = missing(kept, items) if part == "short" else []
    config.hook.pytest_deselected(items=[item for item, its in zip(items, parts, strict=True) if its != part])
    items[:] = kept
