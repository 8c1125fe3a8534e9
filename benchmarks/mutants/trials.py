"""Trials of mutants: a copy of the checkout gets one bug, and its tests run until one fails.

Each trial is a fork of its own with a time limit (forked.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutants.planted import ROOT, Mutant

COPIED = ("kernels", "fp8engine", "tests", "benchmarks", "examples", "pyproject.toml")
LIMIT = 1200  # seconds; the slowest run without a bug takes a tenth of it
PLANTED = "tests/emulated/test_planted_bugs.py"
ON_CARD = "tests/on_card"  # of a copy: the interpreter's tests and a conftest.py that starts the emulated card


class Suite(NamedTuple):
    """Files of tests, the most telling first, and pytest's -k."""

    paths: tuple[str, ...]
    chosen: str


def interpreted(*names: str) -> Suite:
    """In the interpreter, without 30 s of 2 GiB, and without what hypothesis draws and then makes smaller for long."""
    drawn = "not any_shape and not any_value and not casts_of_what_was and not ragged_edges and not beyond_2_gib"
    files = (name.partition("::") for name in names)
    return Suite(tuple(f"tests/interpreted/test_interpreted_{name}.py{''.join(case)}" for name, *case in files), drawn)


def on_card(chosen: str, *names: str) -> Suite:
    """The same files on the emulated card, and its own tests of planted bugs: some tests, for each compiles kernels."""
    return Suite((*(f"{ON_CARD}/test_interpreted_{name}.py" for name in names), PLANTED), chosen)


SCALES = "every_granularity or whole_tile or passes_fp32 or at_the_ends or second_call or one_that_one_program_sees"
STORES = (
    "nothing_predicted or without_a_slot or group_that_begins or several_tiles or not_finite "
    "or own_rounding or rows_beyond or nothing_gives"
)


def emulated(name: str, *cases: str) -> tuple[str, ...]:
    """Tests of tests/emulated/test_emulated_<name>.py: few, for each compiles its kernels."""
    return tuple(f"tests/emulated/test_emulated_{name}.py::test_{case}" for case in cases)


TWIN = "a_cast_is_its_twin_bit_for_bit"
OF_TENSORS = emulated(
    "memory",
    f"{TWIN}[(-1, -1, False)-torch.bfloat16-not finite]",
    f"{TWIN}[(-1, -1, True)-torch.float16-not finite]",
    f"{TWIN}[(-1, -1, True)-torch.bfloat16-finite]",
)
OF_GROUPS = emulated(
    "memory",
    f"{TWIN}[(1, -1, False)-torch.bfloat16-not finite]",
    f"{TWIN}[(128, 128, False)-torch.bfloat16-not finite]",
    f"{TWIN}[(1, 128, False)-torch.bfloat16-finite]",
    f"{TWIN}[(-1, 1, False)-torch.bfloat16-finite]",
)
OF_NORMS = emulated(
    "memory", *(f"a_norm_is_its_twin[layer-{store}]" for store in ("16 bits", "backward", "1x128", "predicted"))
)
OF_ACTIVATIONS = emulated(
    "memory",
    "an_activation_is_its_twin[swiglu-16 bits-backward]",
    "an_activation_is_its_twin[clamped_swiglu-16 bits-backward]",
    "an_activation_is_its_twin[swiglu-1x128-forward]",
    "a_gate_and_an_up_that_are_two_matrices[clamped_swiglu]",
)
FAR_BATCHES = emulated("memory", "batches_of_attention_far_apart")
OF_EPILOGUES = emulated("gluon", "every_epilogue_is_the_twins", "nan_in_a_row_stays_in_it")
OF_EXPERTS = emulated("grouped", "hoppers_kernel_multiplies_every_division_of_rows")
LAUNCHES = "norm_act::test_which_launches_make_the_codes"
# way -> file -> the tests that concern it
WAYS = {
    "interpreter": {
        "kernels/scaling.py": interpreted("quantize", "act"),
        "kernels/produce.py": interpreted("produce", LAUNCHES, "act", "norm"),
        "kernels/matmul.py": interpreted("split_k", "matmul", "epilogue", "grouped"),
        "kernels/walk.py": interpreted("grouped", "split_k"),
        "kernels/split_k.py": interpreted("split_k"),
        "kernels/epilogue.py": interpreted("epilogue", "matmul"),
        "kernels/activations.py": interpreted("epilogue", "act"),
        "kernels/tile.py": interpreted("tile", "epilogue", "matmul", "split_k"),
        "kernels/rounding.py": interpreted("rounding", "quantize"),
        "kernels/quantize.py": interpreted("column_sums", "quantize"),
        "kernels/quantize_groups.py": interpreted("quantize", "column_sums", "grouped"),
        "kernels/quantize_lines.py": interpreted("quantize", "column_sums"),
        "kernels/column_sums.py": interpreted("column_sums"),
        "kernels/norm_quantize.py": interpreted("norm", LAUNCHES),
        "kernels/act_quantize.py": interpreted("act", LAUNCHES),
        "kernels/matmul_grouped.py": interpreted("grouped"),
        "kernels/quantize_experts.py": interpreted("grouped"),
        "kernels/expert_rows.py": interpreted("grouped"),
        "kernels/attention.py": interpreted("attention"),
        "kernels/attention_cast.py": interpreted("attention"),
        "kernels/attention_backward.py": interpreted("attention"),
        "kernels/scale_update.py": interpreted("scale_update"),
    },
    "emulated": {
        "kernels/scaling.py": on_card(SCALES, "quantize"),
        "kernels/produce.py": Suite(
            (*emulated("memory", "a_norm_far_apart"), *on_card("", "produce", "act", "norm").paths),
            f"far_apart or {STORES}",
        ),
        "kernels/matmul.py": Suite(
            (
                "tests/emulated/test_hopper_sums.py",
                *emulated("split_k", "parts_are_exact_and_added_as_the_twin_adds_them"),
                "tests/emulated/test_emulated_matmuls.py",
            ),
            "bits_of_an_h100 or parts_are_exact or flattened",
        ),
        "kernels/epilogue.py": on_card("alone or saturation_begins or nan_and_inf or activations_of", "epilogue"),
        "kernels/tile.py": on_card("visited_once or pieces_are or number_of_programs or an_offset", "tile", "matmul"),
        "kernels/rounding.py": Suite((*OF_GROUPS[:2], *OF_TENSORS[2:]), "twin"),
        "kernels/quantize.py": Suite(OF_TENSORS, "twin"),
        "kernels/quantize_groups.py": Suite(OF_GROUPS, "twin"),
        "kernels/quantize_lines.py": Suite(OF_GROUPS, "twin"),
        "kernels/column_sums.py": Suite(emulated("memory", "sums_of_columns_stay_within_their_bound[(3, 7)]"), "sums"),
        "kernels/norm_quantize.py": Suite((*OF_NORMS, *emulated("memory", "a_norm_far_apart")), "norm"),
        "kernels/act_quantize.py": Suite((*OF_ACTIVATIONS, *emulated("memory", "an_activation_far_apart")), "test"),
        "kernels/matmul_grouped.py": Suite(
            (*emulated("grouped", "every_division_of_rows"), "tests/emulated/test_hopper_sums.py"),
            "division or expert and positive",
        ),
        "kernels/quantize_experts.py": Suite(emulated("grouped", TWIN, "codes_are_transposed_and_rows_summed"), "test"),
        "kernels/expert_rows.py": Suite(emulated("grouped", TWIN, "every_division_of_rows"), "test"),
        "kernels/attention.py": Suite(("tests/emulated/test_emulated_attention.py",), "forward"),
        "kernels/attention_cast.py": Suite(
            emulated("attention", TWIN)
            + emulated("memory", "rows_of_attention_far_apart", "batches_of_attention_far_apart"),
            "attention and not 96 and not float16 and not float32 or 128 and bfloat16",
        ),
        "kernels/attention_backward.py": Suite(
            (*FAR_BATCHES, "tests/emulated/test_emulated_attention.py"),
            "backward or batches",
        ),
        "kernels/scale_update.py": Suite(emulated("memory", "the_update_of_scales_is_its_twin_bit_for_bit"), "90"),
        "kernels/split_k.py": Suite(("tests/emulated/test_emulated_split_k.py",), "part or split"),
        "kernels/gluon_ring.py": Suite(
            (PLANTED, *OF_EPILOGUES, *OF_EXPERTS), "without_a_bug or epilogue or nan or hoppers"
        ),
        "kernels/walk.py": Suite((PLANTED, *OF_EXPERTS), "consumers_is_right or hoppers"),
        "kernels/matmul_gluon.py": Suite((PLANTED, *OF_EPILOGUES), "consumers_is_right or epilogue or nan"),
    },
}


def ways_of(mutant: Mutant) -> list[str]:
    """The ways in which there are tests of a mutant."""
    return [way for way, files in WAYS.items() if mutant.file in files and (way == "emulated" or not mutant.kernel)]


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
        self.collected: tuple[Suite, subprocess.Popen[str]] | None = None
        self.said = folder / "pytest.txt"

    def unmutated(self, file: str) -> Outcome:
        """The tests of a file that is read again without a bug, which must pass."""
        outcome = self._run(file)
        if outcome.test:
            raise RuntimeError(f"{outcome.test} fails without a mutant: {outcome.why}")
        return outcome

    def trial(self, mutant: Mutant) -> Outcome:
        """The tests of a mutant's file with the bug in it."""
        if mutant.kernel:
            return self._run(mutant.file, [mutant.kernel, mutant.old, mutant.new])
        path = self.root / mutant.file
        before = mutant.plant(self.root)
        try:
            return self._run(mutant.file)
        finally:
            path.write_text(before)

    def close(self) -> None:
        """End the process that has collected tests."""
        if self.collected:
            self.collected[1].communicate()
            self.collected = None

    def _run(self, file: str, code: list[str] | None = None) -> Outcome:
        process = self._collect(WAYS[self.way][file])
        assert process.stdin is not None
        assert process.stdout is not None
        start = time.perf_counter()
        module = None if code else f"fp8engine.kernels.{Path(file).stem}"
        process.stdin.write(json.dumps([module, code, LIMIT]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        if not line:
            raise RuntimeError(f"pytest collects nothing of {WAYS[self.way][file]}:\n{self.said.read_text()}")
        if (answer := json.loads(line)) is None:
            return Outcome("time limit", f"{LIMIT} s", LIMIT)
        test, why, edited = answer
        if code and not edited:
            raise RuntimeError(f"not in the machine code: {code}")
        if test == "import":  # nothing was tested: a bug that no import survives proves nothing
            raise RuntimeError(f"{file} cannot be imported: {why}")
        return Outcome(test, why, seconds)

    def _collect(self, suite: Suite) -> subprocess.Popen[str]:
        """The process that has collected these tests."""
        if self.collected and self.collected[0] == suite:
            return self.collected[1]
        self.close()
        environment = {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["TRITON_CACHE_DIR"] = str(self.root / "triton_cache")  # its keys are of the sources
        environment["TRITON_INTERPRET"] = "1" if self.way == "interpreter" else "0"
        with self.said.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.mutants.forked", *suite.paths, "-k", suite.chosen],
                cwd=self.root,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self.collected = suite, process
        return process
