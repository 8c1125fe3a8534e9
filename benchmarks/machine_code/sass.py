"""A kernel's main loop and memory accesses, read from nvdisasm's text and from PTX.

The main loop is the innermost one with the most Tensor Core instructions: beside it there may be one for what is left
of K.  Where two partitions of warps have a loop each (Gluon), it is the longer one, and both are taken to be like it.
Of one pass of it, in clocks:

    tensor    multiply-adds / the multiprocessor's rate: 4096 a clock in FP8, 2048 in 16 bits on Hopper
    issue     instructions * warps / 4 schedulers, each of which issues one a clock
    exposed   the part of `issue` during which no product of a warp is in flight

A warpgroup's products (wgmma) are asynchronous: QGMMA begins one, the last of a group is marked gsb0, and
WARPGROUP.DEPBAR.LE gsb0, n waits until at most n groups are in flight.  What is issued after a wait for all of them and
before the next product has the Tensor Core idle, if every warp is there at the same time; and they are where the loop
has a barrier of all warps (BAR), which none passes a turn ahead of another.  Then the clocks add up:

    ceiling   tensor / (max(tensor, issue - exposed) + exposed)     with wgmma and a barrier in the loop
              min(1, tensor / issue)                                else: other warps' products fill the gap

of the Tensor Core's rate, with one program on a multiprocessor, as the matmuls are launched.  The latency of memory
and barriers comes on top: a loop reaches its ceiling at best.

Two partitions have a barrier each, of their own warps, and meet at mbarriers alone: nothing makes them promote their
sums at the same moment.  The ceiling assumes that they do, which is the worst case; if they take turns, the products of
one fill the gap of the other, and the ceiling is min(1, tensor / issue).

Sources: PTX ISA, wgmma.wait_group and wgmma.commit_group, for what a wait says; NVIDIA H100 Tensor Core GPU
architecture, table 2, for the rates (dense, per multiprocessor and clock), and four schedulers a multiprocessor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

ASYNCHRONOUS = ("QGMMA", "HGMMA")
TENSOR_CORE = (*ASYNCHRONOUS, "QMMA", "HMMA", "UTCQMMA", "UTCHMMA")  # the last two: tcgen05, whose ceiling is not known
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
LABEL = re.compile(r"^(\.L_\w+):")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
WGMMA_SHAPE = re.compile(r"[QH]GMMA\.(\d+)x(\d+)x(\d+)")  # of a warpgroup: "QGMMA.64x256x32"
MMA_SHAPE = re.compile(r"[QH]MMA\.(16)(8)(\d+)")  # of a warp: "QMMA.16832"
GROUPS = re.compile(r"DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
ACCESS = re.compile(r"\b((?:ld|st)\.global\S*|cp\.async\.bulk\.tensor\S*|cp\.async\.c[ag]\S*)")


@dataclass(frozen=True)
class Loop:
    """A main loop: its length, how many of its instructions are of which kind, and which Tensor Core shapes it uses.

    exposed: instructions at which no product of their warp is in flight; 0 where products are not asynchronous.
    """

    length: int
    kinds: Counter[str]
    shapes: tuple[str, ...]
    exposed: int = 0

    @property
    def products(self) -> int:
        """Tensor Core instructions of one pass."""
        return sum(self.kinds[kind] for kind in TENSOR_CORE)

    def multiply_adds(self, warps: int) -> int:
        """Multiply-adds of one pass of that many warps.  0 where instructions of several shapes are mixed."""
        found = [(shape, 4) for shape in map(WGMMA_SHAPE.match, self.shapes) if shape]
        found += [(shape, 1) for shape in map(MMA_SHAPE.match, self.shapes) if shape]
        if len(found) != 1:
            return 0
        (shape, together), *_ = found
        m, n, k = map(int, shape.groups())
        return self.products * m * n * k * warps // together

    def ceiling(self, tensor: float, warps: int) -> float:
        """The share of the Tensor Core's rate that the loop allows.  tensor: clocks of one pass at full rate.

        >>> alone = Loop(100, Counter(QGMMA=4, BAR=2), ("QGMMA.64x128x32",), exposed=64)
        >>> alone.ceiling(512, warps=8)
        0.8
        """
        issue, exposed = self.length * warps / 4, self.exposed * warps / 4
        if not self.kinds["BAR"]:
            exposed = 0.0
        return tensor / (max(tensor, issue - exposed) + exposed)


def main_loop(sass: str) -> Loop:
    """The innermost loop with the most Tensor Core instructions, the longest of these; an empty one if there is none.

    >>> text = '''
    ... .L_x_1:
    ...         /*0100*/                   QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0 ;
    ...         /*0110*/              @P0 BRA `(.L_x_1) ;
    ... '''
    >>> main_loop(text)
    Loop(length=2, kinds=Counter({'QGMMA': 1, 'BRA': 1}), shapes=('QGMMA.64x256x32',), exposed=0)
    """
    found = [_loop(body) for body in _innermost(*_read(sass))]
    return max(found, key=lambda loop: (loop.products, loop.length), default=_loop([]))


def _innermost(instructions: list[str], loops: list[tuple[int, int]]) -> Iterator[list[str]]:
    """Loops with a Tensor Core instruction, shortest first, that share nothing with a shorter one.

    A wait for an mbarrier that is laid behind the program's end jumps back into the middle of a loop: that is none, and
    it holds or crosses one that is shorter.
    """
    taken: list[tuple[int, int]] = []
    for start, end in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        body = instructions[start : end + 1]
        apart = all(end < first or last < start for first, last in taken)
        if apart and any(_kind(text) in TENSOR_CORE for text in body):
            taken.append((start, end))
            yield body


def _loop(body: list[str]) -> Loop:
    shapes = {".".join(text.split()[0].split(".")[:2]) for text in body if _kind(text) in TENSOR_CORE}
    return Loop(len(body), Counter(_kind(text) for text in body), tuple(sorted(shapes)), _exposed(body))


def _exposed(body: list[str]) -> int:
    """Instructions of a pass at which no product is in flight, in a loop that has turned before."""
    groups, begun, exposed = 0, False, 0
    if not any(_kind(text) in ASYNCHRONOUS for text in body):
        return 0
    for _ in range(2):  # the first pass finds what is in flight when the second begins
        exposed = 0
        for text in body:
            if _kind(text) in ASYNCHRONOUS:
                begun = "gsb0" not in text
                groups += not begun
            elif most := GROUPS.search(text):
                groups = min(groups, int(most[1], 16))
            exposed += not groups and not begun
    return exposed


def accesses(ptx: str) -> tuple[str, ...]:
    """Kinds of access to global memory, widest vector and all: "ld.global.v4.b32", "cp.async.bulk.tensor.2d..."."""
    return tuple(sorted(set(ACCESS.findall(ptx))))


def _read(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Instructions in order, without their predicates, and (first, last) of every backward jump."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            places[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            text = PREDICATE.sub("", found[1])
            if text.startswith(("BRA", "UBRA")) and (target := re.search(r"\((\.L_\w+)\)", text)):
                start = places.get(target[1])
                if start is not None:
                    loops.append((start, len(instructions)))
            instructions.append(text)
    return instructions, loops


def _kind(text: str) -> str:
    return text.split()[0].split(".")[0]
