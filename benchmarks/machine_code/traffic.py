"""What a kernel that is limited by memory moves in a pass, and what it has on its way: read from nvdisasm's text.

A pass is one way through the innermost loop that loads the most, or through the whole kernel where no loop loads.  Of
the ways that its branches allow it is the shortest of those that move the most bytes: the least that a kernel issues.
Loops after each other that load the same (a tile cast for both orientations) are one pass; what the second reads is in
the first-level cache, and counts once.  What one loop reads twice, and weights that each row reads, count each time.

    loaded, stored    bytes a thread, 16 at a time where any access is so wide: a tensor, not its scales and counts
    in_flight         bytes a thread that are loaded and not yet used, at most.  A load is on its way until an
                      instruction names one of its registers; that waits for all loads before it, too

A compiler that reuses registers has fewer loads on their way than the tile has: it shows here, and in nothing that a
launch says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.machine_code import offline, sass

ITEMS = {"*bf16": 2, "*fp16": 2, "*fp32": 4, "*fp8e4nv": 1, "*fp8e5": 1}  # bytes of an element
REGISTER = re.compile(r"\bR(\d+)\b")
WIDEST = 16  # bytes a thread of one access
BITS = re.compile(r"\.(?:[US])?(8|16|64|128)\b")


class Traffic(NamedTuple):
    """Of a pass and a thread: bytes; instructions."""

    loaded: int
    stored: int
    instructions: int
    in_flight: int


def of_launch(launch: offline.Launch, made: offline.Compiled) -> Traffic:
    """The Traffic of a launch.

    A kernel with tiles of BLOCK_M x BLOCK_K reads one tensor, and what it loads beyond a tile is a table of scales.
    """
    found, given = of(made.sass), launch.by_name
    if "BLOCK_N" in given or not {"BLOCK_M", "BLOCK_K"} <= set(given):
        return found
    item = ITEMS[launch.signature[launch.kernel.arg_names[0]]]
    tile = given["BLOCK_M"] * given["BLOCK_K"] * item // (32 * made.warps)
    return found._replace(loaded=min(found.loaded, tile), in_flight=min(found.in_flight, tile))


def of(text: str) -> Traffic:
    """The Traffic of a kernel.

    >>> lines = '''
    ... .L_x_1:
    ...         /*0100*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
    ...         /*0110*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
    ...         /*0120*/                   FADD R4, R5, R9 ;
    ...         /*0130*/                   STG.E.64 desc[UR4][R2.64], R4 ;
    ...         /*0140*/              @P0 BRA `(.L_x_1) ;
    ...         /*0150*/                   EXIT ;
    ... '''
    >>> of(lines)
    Traffic(loaded=32, stored=8, instructions=5, in_flight=32)
    """
    instructions, jumps = sass.read(text)
    passes = [found for body in _bodies(instructions, jumps) if (found := _pass(instructions, jumps, *body)).loaded]
    if not passes:
        return _pass(instructions, jumps, 0, _end(instructions))
    most = max(one.loaded for one in passes)
    alike = [one for one in passes if one.loaded == most]
    return Traffic(
        most,
        sum(one.stored for one in alike),
        sum(one.instructions for one in alike),
        max(one.in_flight for one in alike),
    )


def _end(instructions: list[str]) -> int:
    """Place of the last way out: what lies behind it is called, or retried."""
    return max((place for place, text in enumerate(instructions) if sass.kind(text) == "EXIT"), default=-1)


def _bodies(instructions: list[str], jumps: dict[int, int]) -> list[tuple[int, int]]:
    """(first, last place) of the innermost loops that load."""
    last = _end(instructions)
    loops = [(start, end) for end, start in jumps.items() if start <= end <= last]
    loops = [(start, end) for start, end in loops if any(sass.kind(text) == "LDG" for text in instructions[start:end])]
    return [one for one in loops if not any(one != other and _inside(other, one) for other in loops)]


def _inside(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def _pass(instructions: list[str], jumps: dict[int, int], start: int, end: int) -> Traffic:
    """The shortest of the ways from start to end that move the most bytes."""
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {start: (0, 0, ())}  # place -> bytes, -instructions, the way
    for place in range(start, end + 1):
        if place not in best:
            continue
        text = instructions[place]
        moved, length, way = best.pop(place)
        found = (moved + _moved(text), length - 1, (*way, place))
        if place == end:
            best[place] = found
            break
        after = [place + 1] if text.startswith("@") or sass.kind(text) not in ("BRA", "EXIT", "RET") else []
        target = jumps.get(place, -1)
        after += [target] if place < target <= end else []
        for following in after:
            best[following] = max(best.get(following, found), found, key=lambda way: way[:2])
    if end not in best:
        return Traffic(0, 0, 0, 0)
    body = [instructions[place] for place in best[end][2]]
    return Traffic(_sum(body, "LDG"), _sum(body, "STG"), len(body), in_flight(body))


def _moved(text: str) -> int:
    return _width(text) if sass.kind(text) in ("LDG", "STG") else 0


def _width(text: str) -> int:
    """Bytes a thread of an access."""
    found = BITS.search(text.partition("desc")[0])
    return int(found[1]) // 8 if found else 4


def _of_the_tensor(by_width: Counter[int]) -> int:
    """Bytes of the widest vectors; of elements, if there are none, those of the width with the most."""
    return by_width[WIDEST] or max(by_width.values(), default=0)


def _sum(body: Iterable[str], kind: str) -> int:
    by_width: Counter[int] = Counter()
    for text in body:
        if sass.kind(text) == kind:
            by_width[_width(text)] += _width(text)
    return _of_the_tensor(by_width)


def in_flight(body: Iterable[str]) -> int:
    """Bytes a thread that are loaded and not yet used, at most.

    >>> loads = ["LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R2.64]"]
    >>> in_flight(loads), in_flight([loads[0], "FADD R1, R6, R7", loads[1]])
    (32, 16)
    """
    waiting: list[tuple[range, int]] = []  # registers, bytes
    most: Counter[int] = Counter()
    for text in body:
        named = {int(number) for number in REGISTER.findall(text)}
        loads = sass.kind(text) == "LDG"
        target = int(found[1]) if loads and (found := REGISTER.search(text)) else None
        used = [place for place, (registers, _) in enumerate(waiting) if named & set(registers)]
        if used:
            waiting = waiting[max(used) + 1 :]
        if target is not None:
            size = _width(text)
            waiting.append((range(target, target + max(size // 4, 1)), size))
            now: Counter[int] = Counter()
            for _, width in waiting:
                now[width] += width
            most |= now
    return _of_the_tensor(most)
