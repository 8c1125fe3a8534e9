"""`make gpu`'s own script on the emulated card: the first hour on a real one is not lost to our own code.

Each test starts the script (tests/helpers/emulated_gpu.py), which starts its groups; our kernels are launched by Triton
and executed from their PTX, and the script's own checks judge them.  All smoke checks run as they stand; of every other
group one check or one shape, as small as the kernels' tiles allow.
"""

from __future__ import annotations

import os
import subprocess
import sys
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
SMOKE = {
    (0, 15): "_matmul_fp8_kernel",
    (15, 17): "_norm_quantize_kernel",
    (17, 19): "_matmul_fp8_kernel",
    (19, 20): "_matmul_block_kernel",
}


class Others(NamedTuple):
    """Groups that one run has; what of each; a kernel that each launches."""

    places: dict[str, str]
    kernels: dict[str, str]


OTHERS = (Others({"gluon": "0:1"}, {"gluon": "_matmul_gluon_kernel"}),)


class Ran(NamedTuple):
    """What a run left behind."""

    status: int
    printed: str
    found: list[Record]

    def of(self, group: str, kind: str) -> list[Record]:
        """Records of a group."""
        return [record for record in self.found if (record["group"], record["kind"]) == (group, kind)]


def run(folder: Path, places: dict[str, str]) -> Ran:
    """The script on these groups, in one process after another."""
    command = [sys.executable, str(SCRIPT), "--groups", ",".join(places), "--out", str(folder), "--minutes", "600"]
    before = set(RESULTS.rglob("*"))
    done = subprocess.run(
        [*command, "--jobs", "0", "--cache", knobs.cache.dir],  # kernels that another test has compiled are found again
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"EMULATED_PLACES": ",".join(f"{group}={place}" for group, place in places.items())},
    )
    assert set(RESULTS.rglob("*")) == before, "an emulated card wrote a result"
    files = list(folder.glob("*-gpu.jsonl"))
    assert len(files) == 1, done.stdout + done.stderr
    found, broken = records.read(files[0])
    assert broken == 0
    return Ran(done.returncode, done.stdout, found)


def test_every_smoke_check_has_its_place():
    names = [name for name, _ in smoke.checks(torch.device("cpu"))]
    assert [place for first, last in SMOKE for place in range(first, last)] == list(range(len(names)))
    assert len(names) == 20


@pytest.mark.slow
@pytest.mark.parametrize("place", SMOKE, ids=str)
def test_smoke_checks_are_right_on_the_emulated_card(place: tuple[int, int], tmp_path: Path):
    ran = run(tmp_path, {"smoke": "{}:{}".format(*place)})
    names = [name for name, _ in smoke.checks(torch.device("cpu"))][slice(*place)]
    assert {check["name"]: check["wrong"] for check in ran.of("smoke", "check")} == dict.fromkeys(names)
    assert ran.status == 0, ran.printed
    (launched,) = ran.of("smoke", "emulated")
    assert launched["launches"] >= len(names)  # every check launches
    assert SMOKE[place] in launched["kernels"]
    assert f"smoke      done, {ran.of('smoke', 'end')[0]['seconds']:.0f} s" in ran.printed
    assert f"{len(names)} checks" in ran.printed
