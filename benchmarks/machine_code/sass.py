"""A kernel's main loop and memory accesses, read from nvdisasm's text and from PTX.

The main loop is the innermost one with the most Tensor Core instructions: beside it there may be one for what is left
of K.  Where two partitions of warps have a loop each (Gluon), it is the longer one, and both are taken to be like it.
A block of it that a pass can jump over, and that has no such instruction, is left out: in a flattened loop
(`tl.range(..., flatten=True)`) the epilogue and the coordinates of the next tile.  Of one pass, in clocks:

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
STORES = ("UTMASTG", "STG")
LOADS = ("LDG", "LDGSTS")
WGMMA_SHAPE = re.compile(r"[QH]GMMA\.(\d+)x(\d+)x(\d+)")  # of a warpgroup: "QGMMA.64x256x32"
MMA_SHAPE = re.compile(r"[QH]MMA\.(16)(8)(\d+)")  # of a warp: "QMMA.16832"
GROUPS = re.compile(r"DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
# A conversion to a pair of FP8 codes, in PTX; 16-bit registers; a word made of two pairs.
PAIR = re.compile(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32\s+(%rs\d+),")
REGISTER_16, WORD = re.compile(r"%rs\d+"), re.compile(r"\s*mov\.b32\s+%r\d+, \{")
ACCESS = re.compile(r"\b((?:ld|st)\.global\S*|cp\.async\.bulk\.tensor\S*|cp\.async\.c[ag]\S*)")


@dataclass(frozen=True)
class Loop:
    """A main loop: its length, how many of its instructions are of which kind, and how many products of which shape.

    exposed: instructions at which no product of their warp is in flight; 0 where products are not asynchronous.
    loaded: bytes that a thread loads in a pass without TMA, 16 at a time: tiles, not scales.
    ahead: the loop holds the epilogue too, and every load by TMA stands before its first store: when the pass of a
    tile's last product comes to the epilogue, the loads of the next tile's first blocks are under way.
    """

    length: int
    kinds: Counter[str]
    of_shape: Counter[str]
    exposed: int = 0
    ahead: bool = False
    loaded: int = 0

    @property
    def products(self) -> int:
        """Tensor Core instructions of one pass."""
        return self.of_shape.total()

    @property
    def shapes(self) -> tuple[str, ...]:
        """Their shapes."""
        return tuple(self.of_shape)

    def tensor_cycles(self, warps: int, rate_8_bits: float, rate_16_bits: float) -> float:
        """Clocks that the products of one pass of that many warps take at these multiply-adds a clock.

        0 where there are none, or some whose size the instruction does not say (tcgen05).

        >>> loop = Loop(100, Counter(QGMMA=4, HGMMA=2), Counter({"QGMMA.64x128x32": 4, "HGMMA.64x128x16": 2}))
        >>> loop.tensor_cycles(4, 4096, 2048)
        384.0
        """
        clocks = 0.0
        for shape, count in self.of_shape.items():
            if found := WGMMA_SHAPE.match(shape):
                together = 4
            elif found := MMA_SHAPE.match(shape):
                together = 1
            else:
                return 0.0
            m, n, k = map(int, found.groups())
            rate = rate_8_bits if shape.startswith("Q") else rate_16_bits
            clocks += count * m * n * k * warps / together / rate
        return clocks

    def ceiling(self, tensor: float, warps: int) -> float:
        """The share of the Tensor Core's rate that the loop allows.  tensor: clocks of one pass at full rate.

        >>> alone = Loop(100, Counter(QGMMA=4, BAR=2), Counter({"QGMMA.64x128x32": 4}), exposed=64)
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
    >>> loop = main_loop(text)
    >>> loop.length, loop.kinds, loop.of_shape
    (2, Counter({'QGMMA': 1, 'BRA': 1}), Counter({'QGMMA.64x256x32': 1}))
    """
    found = [_loop(*each) for each in _innermost(*read(sass))]
    return max(found, key=lambda loop: (loop.products, loop.length), default=_loop([], []))


def _innermost(instructions: list[str], jumps: dict[int, int]) -> Iterator[tuple[list[str], list[str]]]:
    """(instructions of a pass, of the whole loop) of loops with products, shortest first, that share nothing.

    A jump back from a block that is laid behind the program's end is no loop: it passes that end, or it holds or
    crosses a loop that is shorter (a wait for an mbarrier).
    """
    taken: list[tuple[int, int]] = []
    passes = [([*_pass(instructions, jumps, start, end)], start, end) for end, start in jumps.items() if start <= end]
    for places, start, end in sorted(passes, key=lambda found: len(found[0])):
        body = [instructions[place] for place in places]
        apart = all(end < first or last < start for first, last in taken)
        ends = any(text.strip() == "EXIT" for text in body)
        if apart and not ends and any(kind(text) in TENSOR_CORE for text in body):
            taken.append((start, end))
            yield body, instructions[start : end + 1]


def _loop(body: list[str], whole: list[str]) -> Loop:
    products = [PREDICATE.sub("", text) for text in body if kind(text) in TENSOR_CORE]
    shapes = Counter(sorted(".".join(text.split()[0].split(".")[:2]) for text in products))
    loaded = 16 * sum(kind(text) in LOADS and ".128" in text for text in body)
    return Loop(len(body), Counter(map(kind, body)), shapes, _exposed(body), _ahead(whole), loaded)


def _exposed(body: list[str]) -> int:
    """Instructions of a pass at which no product is in flight, in a loop that has turned before."""
    groups, begun, exposed = 0, False, 0
    if not any(kind(text) in ASYNCHRONOUS for text in body):
        return 0
    for _ in range(2):  # the first pass finds what is in flight when the second begins
        exposed = 0
        for text in body:
            if kind(text) in ASYNCHRONOUS:
                begun = "gsb0" not in text
                groups += not begun
            elif most := GROUPS.search(text):
                groups = min(groups, int(most[1], 16))
            exposed += not groups and not begun
    return exposed


def _ahead(body: list[str]) -> bool:
    """Whether a loop's body has loads by TMA and stores, and the last load stands before the first store."""
    kinds = [kind(text) for text in body]
    stores = [place for place, found in enumerate(kinds) if found in STORES]
    loads = [place for place, found in enumerate(kinds) if found == "UTMALDG"]
    return bool(stores and loads) and max(loads) < min(stores)


def accesses(ptx: str) -> tuple[str, ...]:
    """Kinds of access to global memory, widest vector and all: "ld.global.v4.b32", "cp.async.bulk.tensor.2d..."."""
    return tuple(sorted(set(ACCESS.findall(ptx))))


def taken_apart(ptx: str) -> int:
    """Pairs of FP8 codes that are stored in words and used otherwise too.

    ptxas 12.8 is wrong there: the other use gets the pair of the loop's pass before (kernels/scaling.py).

    >>> taken_apart("cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2; mov.b32 %r3, {%rs1, %rs2}; shr.u16 %rs3, %rs1, 8;")
    1
    """
    made = set(PAIR.findall(ptx))
    words, others = set[str](), set[str]()
    for text in re.split(r"[;\n]", ptx):
        used = set(REGISTER_16.findall(text)) & made
        if used and not PAIR.search(text):
            (words if WORD.match(text) else others).update(used)
    return len(words & others)


def _pass(instructions: list[str], jumps: dict[int, int], start: int, end: int) -> Iterator[int]:
    """Places of the instructions of one pass of the loop [start, end], without what it can jump over."""
    place = start
    while place <= end:
        yield place
        target = jumps.get(place, 0)
        inside = place < target <= end and instructions[place].startswith("@")
        over = inside and not any(kind(text) in TENSOR_CORE for text in instructions[place:target])
        place = target if over else place + 1


def read(sass: str) -> tuple[list[str], dict[int, int]]:
    """Instructions in order, and the place of every jump with that of its target."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    targets: dict[int, str] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            places[label[1]] = len(instructions)
        elif found := INSTRUCTION.match(line):
            bare = PREDICATE.sub("", found[1])
            if bare.startswith(("BRA", "UBRA")) and (target := re.search(r"\((\.L_\w+)\)", bare)):
                targets[len(instructions)] = target[1]
            instructions.append(found[1])
    return instructions, {place: places[name] for place, name in targets.items() if name in places}


def kind(text: str) -> str:
    """The instruction's name without predicate and suffixes.

    >>> kind("@!P1 LDG.E.128 R8, desc[UR10][R22.64]")
    'LDG'
    """
    return PREDICATE.sub("", text).split()[0].split(".")[0]
