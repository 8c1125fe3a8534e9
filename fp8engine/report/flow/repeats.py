"""Names of repeated blocks told as one: `model.layers.0.mlp` to `model.layers.29.mlp` as `model.layers.0-29.mlp`."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
SPANS = 4  # of numbers that a name lists; of more it shows the first two and the last
Parts = tuple[str | tuple[int, ...], ...]  # of a name, between its dots; numbers of blocks are tuples


def fold(named: Iterable[tuple[str, Hashable]]) -> list[tuple[str, list[int]]]:
    """(one name for all, places of its members in `named`) of each group of members that are equal but for numbers.

    named: (name, what makes two members equal).  A number that ends a name is no block's and stays.  Groups come in
    the order of their first member; those whose names differ in numbers alone stand together, the largest first.

    >>> fold([("h.0.up", "a"), ("h.0.down", "a"), ("h.1.up", "a"), ("h.1.down", "b"), ("h.2.up", "a")])
    [('h.0-2.up × 3', [0, 2, 4]), ('h.0.down', [1]), ('h.1.down', [3])]
    """
    rows = {(_parts(name), key, i): [i] for i, (name, key) in enumerate(named)}
    for depth in reversed(range(max((len(_numbers(parts)) for parts, *_ in rows), default=0))):
        groups: dict[Hashable, list[tuple[Parts, Hashable, list[int]]]] = {}
        for (parts, key, i), members in rows.items():
            at = next(iter(_numbers(parts)[depth:]), None)
            apart = (parts, i) if at is None else (*parts[:at], None, *parts[at + 1 :])
            groups.setdefault((apart, key), []).append((parts, key, members))
        rows = {}
        for group in groups.values():
            parts, key, _ = group[0]
            if len(group) > 1:
                at = _numbers(parts)[depth]
                numbers = tuple(sorted({number for each, *_ in group for number in each[at]}))
                parts = (*parts[:at], numbers, *parts[at + 1 :])
            members = sorted(i for *_, those in group for i in those)
            rows[parts, key, members[0]] = members
    return [(_name(parts, len(members)), members) for (parts, *_), members in _beside(rows)]


def shared(names: Iterable[str]) -> str:
    """The beginning that all names share: whole parts with their dots, but never a name's last part.

    >>> shared(["h.0.mlp.up", "h.0.mlp.down"])
    'h.0.mlp.'
    """
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{part}." for part, *_ in itertools.takewhile(lambda those: len(set(those)) == 1, parts))


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, keys and values in the order in which they come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbours.

    >>> spans([7, 0, 1, 2, 5])
    [(0, 2), (5, 5), (7, 7)]
    """
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def _parts(name: str) -> Parts:
    *blocks, last = name.split(".")
    return (*((int(part),) if part.isdecimal() else part for part in blocks), last)


def _numbers(parts: Parts) -> list[int]:
    return [at for at, part in enumerate(parts) if isinstance(part, tuple)]


def _beside(rows: dict[tuple[Parts, Hashable, int], list[int]]) -> Iterator[tuple[tuple, list[int]]]:
    """Groups in their order, the largest of one family first."""
    in_order = sorted(rows.items(), key=lambda row: row[0][2])
    families = grouped((tuple("" if isinstance(part, tuple) else part for part in row[0][0]), row) for row in in_order)
    for family in families.values():
        yield from sorted(family, key=lambda row: -len(row[1]))


def _name(parts: Parts, times: int) -> str:
    name = ".".join(part if isinstance(part, str) else _told(part) for part in parts)
    return f"{name} × {times}" if times > 1 else name


def _told(numbers: Sequence[int]) -> str:
    told = [str(first) if first == last else f"{first}-{last}" for first, last in spans(numbers)]
    return ",".join(told if len(told) <= SPANS else [*told[:2], "…", told[-1]])
