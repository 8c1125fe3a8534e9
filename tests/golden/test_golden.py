"""The same bits as recorded: losses, gradients and scaling states of short trainings (tests/golden/record.py).

For changes that are meant to change no number: a move of files, another name.  What differs is named by run and step.
"""

import platform
import re
from pathlib import Path

import pytest
from golden import record, trainings

from fp8engine.numerics.recipe import RECIPES

GOLDEN = record.read(Path(record.__file__).with_name("golden.json"))

# Sums of another architecture, or of other kernels of torch, are rounded elsewhere; every x86-64 CPU gives these bits.
recorded_here = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or record.versions() != GOLDEN["versions"],
    reason=f"recorded on x86-64 with {GOLDEN['versions']}; here {platform.machine()} with {record.versions()}",
)


def test_the_versions_recorded_with_are_those_that_ci_installs():
    """Else the comparison below would be skipped everywhere, and CI would stay green."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (record.ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert {name: pins[name] for name in GOLDEN["versions"]} == GOLDEN["versions"]


@pytest.mark.slow
@recorded_here
@pytest.mark.parametrize("group", record.GROUPS)
def test_not_a_bit_has_changed(group: str, tmp_path: Path):
    record.start(group, tmp_path / "found.json")
    found = record.read(tmp_path / "found.json")["runs"]
    wanted = {name: run for name, run in GOLDEN["runs"].items() if run["group"] == group}
    lines = list(record.differences(wanted, found))
    assert not lines, "\n".join(lines)


def test_every_training_is_recorded_and_auto_decides_in_its_own():
    made = {name for group in trainings.groups().values() for name in group}
    assert made == GOLDEN["runs"].keys() >= {f"gpt/{recipe}" for recipe in RECIPES}
    assert all(run["decisions"] for name, run in GOLDEN["runs"].items() if name.endswith("/auto"))
