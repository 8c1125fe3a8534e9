"""A kernel's main loop and memory accesses, read from nvdisasm's text and from PTX.

The main loop is the shortest one that holds a Tensor Core instruction.  From it:

    Tensor Core cycles   multiply-adds of one pass / the multiprocessor's rate: 4096 a clock in FP8, 2048 in 16 bits
    issue cycles         instructions * warps / 4 schedulers: over the cycles above, the loop is bound by issue
    bytes per clock      operand bytes of one pass / Tensor Core cycles: what L2 has to deliver

Source of the rates: NVIDIA H100 Tensor Core GPU architecture, table 2 (dense; both are per multiprocessor and clock).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

TENSOR_CORE = ("QGMMA", "HGMMA", "QMMA", "HMMA")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
LABEL = re.compile(r"^(\.L_\w+):")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
ACCESS = re.compile(r"\b((?:ld|st)\.global\S*|cp\.async\.bulk\.tensor\S*|cp\.async\.c[ag]\S*)")


@dataclass(frozen=True)
class Loop:
    """A main loop: its length, how many of its instructions are of which kind, and which Tensor Core shapes it uses."""

    length: int
    kinds: Counter[str]
    shapes: tuple[str, ...]

    @property
    def products(self) -> int:
        """Tensor Core instructions of one pass."""
        return sum(self.kinds[kind] for kind in TENSOR_CORE)


def main_loop(sass: str) -> Loop:
    """The shortest loop with a Tensor Core instruction; an empty one where there is none.

    >>> text = '''
    ... .L_x_1:
    ...         /*0100*/                   QGMMA.64x256x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
    ...         /*0110*/              @P0 BRA `(.L_x_1) ;
    ... '''
    >>> main_loop(text)
    Loop(length=2, kinds=Counter({'QGMMA': 1, 'BRA': 1}), shapes=('QGMMA.64x256x32',))
    """
    operations, loops = _read(sass)
    best: list[str] = []
    for start, end in loops:
        body = operations[start : end + 1]
        if (not best or len(body) < len(best)) and any(_kind(operation) in TENSOR_CORE for operation in body):
            best = body
    kinds = Counter(_kind(operation) for operation in best)
    shapes = {".".join(operation.split(".")[:2]) for operation in best if _kind(operation) in TENSOR_CORE}
    return Loop(len(best), kinds, tuple(sorted(shapes)))


def accesses(ptx: str) -> tuple[str, ...]:
    """Kinds of access to global memory, widest vector and all: "ld.global.v4.b32", "cp.async.bulk.tensor.2d..."."""
    return tuple(sorted(set(ACCESS.findall(ptx))))


def _read(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Operations in order, and (first, last) of every backward jump."""
    operations: list[str] = []
    places: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            places[label[1]] = len(operations)
        elif found := INSTRUCTION.match(line):
            text = PREDICATE.sub("", found[1])
            operation = text.split()[0]
            if operation.startswith(("BRA", "UBRA")) and (target := re.search(r"\((\.L_\w+)\)", text)):
                start = places.get(target[1])
                if start is not None:
                    loops.append((start, len(operations)))
            operations.append(operation)
    return operations, loops


def _kind(operation: str) -> str:
    return operation.split(".")[0]
