"""The same bits as recorded: losses, gradients and scaling states of short trainings (tests/golden/record.py).

For changes that are meant to change no number: a move of files, another name.  What differs is named by run and step.
"""

import platform
import re
from pathlib import Path

import pytest
from golden import record

from fp8engine.demo.precision import RECIPES

FUSED = ("current", "delayed", "rowwise", "blockwise", "auto")
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


def test_every_recipe_is_recorded_for_every_model():
    models = {"gpt": set(RECIPES), "llama": set(RECIPES) - {"fp32"}, "gpt2": set(RECIPES) - {"fp32"}}
    assert {f"{model}/{recipe}" for model, names in models.items() for recipe in names} <= GOLDEN["runs"].keys()
    assert all(len(GOLDEN["runs"][f"{m}/{r}"]["losses"]) == 20 for m, names in models.items() for r in names)
    fused = [GOLDEN["runs"][f"fused_{model}/{r}"] for model in ("llama", "gpt2") for r in FUSED]
    assert all(GOLDEN["runs"][f"{model}/auto"]["decisions"] for model in (*models, "fused_llama", "fused_gpt2"))
    assert all(len(run["losses"]) == 5 for run in fused)


def test_blocks_computed_again_train_alike():
    """Gradient checkpointing runs the same forward twice: no gradient may differ, fused or not."""
    runs = GOLDEN["runs"]
    for fused in ("", "fused_"):
        stored, again = runs[f"{fused}llama/delayed"], runs[f"{fused}checkpointed_llama/delayed"]
        assert stored["gradients"][:5] == again["gradients"]
        assert stored["losses"][:5] == again["losses"]


def test_the_first_difference_is_named():
    run = {"losses": ["0x1p+0", "0x1p+1"], "gradients": ["a", "b"], "state": "s", "decisions": ["3 x.input A -> B"]}
    changes = {
        "loss": {"losses": ["0x1p+0", "0x1.8p+1"]},
        "gradient": {"gradients": ["c", "b"], "losses": ["0x1p+0", "0x1.8p+1"]},
        "decision": {"decisions": ["3 x.input A -> C"]},
        "state": {"state": "t"},
        "same": {},
    }
    lines = list(record.differences(dict.fromkeys(changes, run), {name: run | new for name, new in changes.items()}))
    assert lines == [
        "decision: decisions differ first at step 3: '3 x.input A -> B' -> '3 x.input A -> C'",
        "gradient: gradients differ first at step 1: a -> c",
        "loss: losses differ first at step 2: 2.0 -> 3.0",
        "state: the scaling state at the end differs, after equal losses, gradients and decisions",
    ]
    assert list(record.differences({"a": run}, {})) == ["a: only recorded before"]
