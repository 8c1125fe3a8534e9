"""The bugs that are planted: read from the .txt files of this folder, one block a mutant.

# kernels/tile.py                 the file that the blocks below belong to

One column beyond the last ...    what is wrong: one sentence
- (across < N - column)           the old text, which occurs once in the file; its next lines as they are there
+ (across <= N - column)          the new text
= All tiles of a line ...         only where no test can see it: why the mutant is equal to the kernel
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?P<wrong>[^\n]+)\n- (?P<old>.+?)\n\+ (?P<new>.+?)(?:\n= (?P<equal>[^\n]+))?", re.DOTALL)


class Mutant(NamedTuple):
    """One bug.  file: from the repository's root.  equal: why no test can see it, or None."""

    file: str
    wrong: str
    old: str
    new: str
    equal: str | None

    def plant(self, root: Path) -> str:
        """Write the file under `root` with the bug in it; return its text before."""
        text = (root / self.file).read_text()
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
            elif match := BLOCK.fullmatch(block):
                found.append(Mutant(file, match["wrong"], match["old"], match["new"], match["equal"]))
            else:
                raise ValueError(f"{path}: not a sentence, '- old text', '+ new text':\n{block}")
    return found
