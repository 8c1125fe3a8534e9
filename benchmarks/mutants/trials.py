"""Trials of mutants: a copy of the checkout gets one bug, and pytest runs over it until a test fails.

Each trial is a process of its own with a time limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.planted import ROOT, Mutant

COPIED = ("kernels", "fp8engine", "tests", "benchmarks", "examples", "pyproject.toml")
LIMIT = 300  # seconds; the slowest run without a bug takes a tenth of it
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?$", re.MULTILINE)
PLANTED = "tests/emulated/test_planted_bugs.py"
ON_CARD = "tests/on_card"  # of a copy: the interpreter's tests and a conftest.py that starts the emulated card


class Suite(NamedTuple):
    """Files of tests, the most telling first, and pytest's -k."""

    paths: tuple[str, ...]
    chosen: str


def interpreted(*names: str) -> Suite:
    """In the interpreter, without 30 s of 2 GiB, and without what hypothesis draws and then makes smaller for long."""
    drawn = "not any_shape and not any_value and not casts_of_what_was and not ragged_edges and not beyond_2_gib"
    return Suite(tuple(f"tests/interpreted/test_interpreted_{name}.py" for name in names), drawn)


def on_card(chosen: str, *names: str) -> Suite:
    """The same files on the emulated card, and its own tests of planted bugs: some tests, for each compiles kernels."""
    return Suite((*(f"{ON_CARD}/test_interpreted_{name}.py" for name in names), PLANTED), chosen)


SCALES = "every_granularity or whole_tile or passes_fp32 or at_the_ends or second_call or single_element"
STORES = (
    "nothing_predicted or without_a_slot or group_that_begins or several_tiles or not_finite "
    "or own_rounding or rows_beyond or nothing_gives"
)
# way -> file -> the tests that concern it
WAYS = {
    "interpreter": {
        "kernels/scaling.py": interpreted("quantize", "act", "cast_transpose"),
        "kernels/produce.py": interpreted("produce", "act", "norm"),
        "kernels/matmul_fp8.py": interpreted("matmul_fp8", "epilogue"),
        "kernels/matmul_block.py": interpreted("matmul_block", "epilogue"),
        "kernels/matmul_fp16.py": interpreted("matmul_fp16", "epilogue"),
        "kernels/split_k.py": interpreted("split_k"),
        "kernels/epilogue.py": interpreted("epilogue", "matmul_fp8"),
        "kernels/activations.py": interpreted("epilogue", "act"),
        "kernels/tile.py": interpreted("tile", "matmul_fp8", "matmul_fp16"),
    },
    "emulated": {
        "kernels/scaling.py": on_card(SCALES, "quantize"),
        "kernels/produce.py": on_card(STORES, "produce", "act", "norm"),
        "kernels/matmul_fp8.py": on_card("number_of_programs or formats_and_scales or alone", "matmul_fp8", "epilogue"),
        "kernels/matmul_block.py": on_card("number_of_programs or formats_and_scales or any_strides", "matmul_block"),
        "kernels/matmul_fp16.py": on_card("number_of_programs or layouts", "matmul_fp16"),
        "kernels/epilogue.py": on_card("alone or saturation_begins or nan_and_inf or activations_of", "epilogue"),
        "kernels/tile.py": on_card(
            "visited_once or pieces_are or number_of_programs or an_offset", "tile", "matmul_fp8"
        ),
        "kernels/gluon_ring.py": Suite((PLANTED,), "without_a_bug"),
        "kernels/matmul_gluon.py": Suite((PLANTED,), "without_a_bug and specialised"),
        "kernels/matmul_gluon_scaled.py": Suite((PLANTED,), "without_a_bug and consumers"),
    },
}


class Outcome(NamedTuple):
    """What a run of pytest found.  test: the first that failed, "" if none did; why: its error; seconds: of the run."""

    test: str
    why: str
    seconds: float


class Copy:
    """A copy of the checkout in a folder, in which bugs are planted and taken out again."""

    def __init__(self, folder: Path, way: str):
        self.root, self.way = folder, way
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        if way == "emulated":
            shutil.copytree(folder / "tests" / "interpreted", folder / ON_CARD)
            shutil.copy2(folder / "benchmarks" / "mutants" / "on_card.py", folder / ON_CARD / "conftest.py")

    def unmutated(self, file: str) -> Outcome:
        """The tests of a file without a bug, which must pass."""
        outcome = self._run(file)
        if outcome.test:
            raise RuntimeError(f"{outcome.test} fails without a mutant: {outcome.why}")
        return outcome

    def trial(self, mutant: Mutant) -> Outcome:
        """The tests of a mutant's file with the bug in it."""
        path = self.root / mutant.file
        status = path.stat()
        before = mutant.plant(self.root)
        try:
            return self._run(mutant.file, PYTHONDONTWRITEBYTECODE="1")
        finally:
            path.write_text(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its byte code is valid again

    def _run(self, file: str, **environment: str) -> Outcome:
        cache = self.root / "triton_cache"
        shutil.rmtree(cache, ignore_errors=True)
        environment |= {"PYTHONPATH": str(self.root), "TRITON_CACHE_DIR": str(cache), "COLUMNS": "400"}
        environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if self.way == "interpreter" else "0"}
        suite = WAYS[self.way][file]
        words = [sys.executable, "-m", "pytest", *suite.paths, "-k", suite.chosen, "-x", "-q", "--tb=no"]
        words += ["-p", "no:cacheprovider"]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                words, cwd=self.root, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return Outcome("time limit", f"{LIMIT} s", LIMIT)
        seconds = time.perf_counter() - start
        if done.returncode == 0:
            return Outcome("", "", seconds)
        first = FAILED.search(done.stdout)
        if first is None:  # nothing was tested: a bug that no import survives proves nothing
            raise RuntimeError(f"pytest ended with {done.returncode} and no test:\n{done.stdout}{done.stderr}")
        return Outcome(first[1], first[2] or "", seconds)
