"""`make gpu`'s own script on the emulated card: the first hour on a real one is not lost to our own code.

Each test starts the script (tests/helpers/emulated_gpu.py), which starts its groups; our kernels are launched by Triton
and executed from their PTX, and the script's own checks judge them.  All smoke checks run as they stand; of every other
group one check or one shape, as small as the kernels' tiles allow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from triton import knobs

from benchmarks.card import records
from benchmarks.card.plan import NAMES
from benchmarks.card.records import Record
from benchmarks.checks import smoke

SCRIPT = Path(__file__).parents[1] / "helpers" / "emulated_gpu.py"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# (first, last) of the smoke checks, about the same work each, and a kernel that they launch.
SMOKE = {(0, 15): "_matmul_kernel", (15, 17): "_norm_kernel", (17, 20): "_matmul_kernel"}


class Others(NamedTuple):
    """place: what a group begins, as first and last or by the end of a name.  kernels: some that it launches.

    rows: how many of its benchmark it times at least; 0 for a group of checks.
    """

    place: list[int] | str
    kernels: set[str]
    rows: int = 0


FIRST = [0, 1]
CASTS = {"_measure_kernel", "_cast_kernel", "_matmul_kernel"}
TRAINING = CASTS | {"_scale_update_kernel"}
# What one run of the script has: groups whose work takes about the same time together.
OTHERS = (
    {"gluon": Others(FIRST, {"_matmul_gluon_kernel"}, 8), "few": Others(FIRST, {"_matmul_kernel"}, 12)},
    {
        "gemm": Others(FIRST, {"_matmul_kernel"}, 14),
        "casts": Others(FIRST, {"_cast_kernel", "_short_kernel"}, 9),
        "experts": Others(FIRST, {"_matmul_kernel"}, 7),
    },
    {
        "linear": Others(FIRST, TRAINING, 5),
        "host": Others(FIRST, CASTS, 1),
        "compiled": Others(FIRST, {"_cast_kernel"}, 3),  # torch.compile itself finds no card, and its rows say so
    },
    {"tuned": Others(FIRST, TRAINING, 5), "generate": Others(FIRST, CASTS, 6)},
    {"block": Others(FIRST, TRAINING | {"_norm_kernel", "_act_kernel"}, 9)},
    {"model": Others(FIRST, CASTS | {"_norm_kernel", "_act_kernel"}, 2)},
    {
        "checks-1": Others("rounded to E4M3", {"_matmul_kernel"}),
        "checks-2": Others("matmul_block 16x16x16, integers", {"_matmul_kernel"}),
        "checks-5": Others("casts 3x7, bit for bit", {"_cast_kernel"}),
        "checks-6": Others("sums of columns 3x7", {"_column_sums_kernel"}),
        "checks-7": Others([0, 2], {"_matmul_kernel", "_attention_kernel", "_by_queries_kernel", "_by_keys_kernel"}),
    },
)
# checks-3 and checks-4 are other shapes of checks-2's; checks-8 captures CUDA graphs; the sweep is 100 configurations
# of each matmul that gemm has.
LEFT_OUT = {"checks-3", "checks-4", "checks-8", "sweep"}


class Ran(NamedTuple):
    """What a run left behind."""

    status: int
    printed: str
    found: list[Record]

    def of(self, group: str, kind: str) -> list[Record]:
        """Records of a group."""
        return [record for record in self.found if (record["group"], record["kind"]) == (group, kind)]


def run(folder: Path, places: Mapping[str, list[int] | str]) -> Ran:
    """The script on these groups, in one process after another."""
    command = [sys.executable, str(SCRIPT), "--groups", ",".join(places), "--out", str(folder), "--minutes", "600"]
    before = set(RESULTS.rglob("*"))
    done = subprocess.run(
        [*command, "--jobs", "0", "--cache", knobs.cache.dir],  # kernels that another test has compiled are found again
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"EMULATED_PLACES": json.dumps(places)},
    )
    assert set(RESULTS.rglob("*")) == before, "an emulated card wrote a result"
    files = list(folder.glob("*-gpu.jsonl"))
    assert len(files) == 1, done.stdout + done.stderr
    found, broken = records.read(files[0])
    assert broken == 0
    return Ran(done.returncode, done.stdout, found)


def test_every_smoke_check_and_every_group_has_its_place():
    assert [place for first, last in SMOKE for place in range(first, last)] == list(range(20))
    assert len([*smoke.checks(torch.device("cpu"))]) == 20
    assert sorted(["smoke", *LEFT_OUT, *(name for run in OTHERS for name in run)]) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("place", SMOKE, ids=str)
def test_smoke_checks_are_right_on_the_emulated_card(place: tuple[int, int], tmp_path: Path):
    ran = run(tmp_path, {"smoke": list(place)})
    names = [name for name, _ in smoke.checks(torch.device("cpu"))][slice(*place)]
    assert {check["name"]: check["wrong"] for check in ran.of("smoke", "check")} == dict.fromkeys(names)
    assert ran.status == 0, ran.printed
    (launched,) = ran.of("smoke", "emulated")
    assert launched["launches"] >= len(names)  # every check launches
    assert SMOKE[place] in launched["kernels"]
    assert f"smoke      done, {ran.of('smoke', 'end')[0]['seconds']:.0f} s" in ran.printed
    assert f"{len(names)} checks" in ran.printed


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("groups", OTHERS, ids=" ".join)
def test_a_case_of_every_other_group(groups: dict[str, Others], tmp_path: Path):
    ran = run(tmp_path, {name: group.place for name, group in groups.items()})
    assert ran.status == 0, ran.printed
    assert ran.found[0]["kind"] == "pack"
    (machine,) = [record for record in ran.found if record["kind"] == "machine"]
    assert machine["card"] == "emulated card"
    for name, group in groups.items():
        (end,) = ran.of(name, "end")
        assert (end["status"], end["why"]) == ("done", "")
        assert {check["name"]: check["wrong"] for check in ran.of(name, "check") if check["wrong"]} == {}
        rows = [record["row"] for record in ran.of(name, "row")]
        assert {row["name"]: row["why"] for row in rows if row["correct"] is False} == {}
        assert sum(row["correct"] is True and row["seconds"] > 0 for row in rows) >= group.rows
        assert all(row["time"] == "emulated" for row in rows)
        assert ran.of(name, "check") or rows
        (launched,) = ran.of(name, "emulated")
        assert group.kernels <= set(launched["kernels"])
        assert f"{name:10s} done, {end['seconds']:.0f} s" in ran.printed
