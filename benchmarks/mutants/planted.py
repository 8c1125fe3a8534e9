"""The bugs that are planted: read from the .txt files of this folder, one block a mutant.

# kernels/tile.py                        the file that the blocks below belong to

[mask] One column beyond the last ...    the kind of bug, of KINDS, and what is wrong: one sentence
- (across < N - column)                  the old text, which occurs once in the file; its next lines as they are there
+ (across <= N - column)                 the new text
= All tiles of a line ...                only where the mutant is equal to the kernel: why
! The card rounds ...                    only where it is a bug that no test catches: why

In the place of "- old text" a block may have "~ _kernel: pattern": of that kernel's compiled code (PTX), in which each
match of the pattern becomes the new text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"\[(?P<kind>\w+)\] (?P<wrong>[^\n]+)\n(?:- |~ (?P<kernel>\w+): )(?P<old>.+?)\n\+ (?P<new>.+?)"
    r"(?:\n= (?P<equal>[^\n]+)|\n! (?P<missed>[^\n]+))?",
    re.DOTALL,
)
KINDS = {
    "mask": "off by one at a ragged edge of M, N or K, or no mask",
    "offset": "a wrong stride, offset, head or expert",
    "transposed": "a wrong layout of what is turned",
    "overflow": "offsets of 32 bits",
    "scale": "a scale lost, used twice, or of another",
    "rounding": "saturation, NaN or Inf lost, or rounded otherwise",
    "amax": "the amax of the wrong thing, not masked, or lost for one program",
    "count": "a wrong count",
    "sum": "an accumulator lost, not promoted, or added to in another order",
    "value": "another function of the values",
    "dtype": "a store in another dtype",
    "unwritten": "memory that nobody wrote is read, or is left as it is",
    "race": "two programs write one place",
    "barrier": "no barrier, fence or wait",
    "ring": "a wrong slot, phase or number of arrivals of a ring",
    "atomics": "the memory order of atomics, and the last program to be done",
    "registers": "registers that other warps do not leave",
    "launch": "a wrong grid, tile or way on the host",
}
FAMILIES = {
    "casts": ("scaling", "rounding", "quantize", "quantize_groups", "quantize_lines", "column_sums"),
    "norms": ("norm_quantize", "act_quantize", "activations", "produce"),
    "matmuls": ("tile", "epilogue", "matmul"),
    "Gluon": ("gluon_ring", "matmul_gluon"),
    "split-K": ("split_k",),
    "grouped": ("matmul_grouped", "walk", "quantize_experts", "expert_rows"),
    "attention": ("attention", "attention_cast", "attention_backward"),
    "scale update": ("scale_update",),
}


class Mutant(NamedTuple):
    """One bug.  file: from the repository's root.  equal, missed: why no test sees it, or None.

    kernel: in whose compiled code `old` is a pattern; None where it is a text of the file.
    """

    file: str
    kind: str
    wrong: str
    old: str
    new: str
    equal: str | None = None
    missed: str | None = None
    kernel: str | None = None

    @property
    def family(self) -> str:
        """The family of kernels that the file belongs to."""
        return next(name for name, files in FAMILIES.items() if Path(self.file).stem in files)

    def plant(self, root: Path) -> str:
        """Write the file under `root` with the bug in it; return its text before."""
        text = (root / self.file).read_text()
        if self.kernel is None:
            if text.count(self.old) != 1:
                raise ValueError(f"{self.file} has {text.count(self.old)} times, not once: {self.old!r} ({self.wrong})")
            (root / self.file).write_text(text.replace(self.old, self.new))
        return text


def mutants(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """Every mutant of the .txt files of a folder, in their order."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.txt")):
        file = ""
        for block in path.read_text().rstrip("\n").split("\n\n"):
            if block.startswith("# "):
                file = block[2:]
            elif (match := BLOCK.fullmatch(block)) and match["kind"] in KINDS:
                found.append(Mutant(file, **match.groupdict()))
            else:
                raise ValueError(f"{path}: not '[kind] a sentence', '- old text', '+ new text':\n{block}")
    return found
