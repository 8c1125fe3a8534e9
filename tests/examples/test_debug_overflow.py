"""examples/debug_overflow.py: each broken model is found, named, pinned, and then learns."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "debug_overflow.py"


@pytest.fixture(scope="module")
def example():
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.mark.parametrize(
    ("index", "layer", "operand", "ops", "bound"),
    [
        # Chance is ln 4 = 1.39 for four answers; distances in hundreds have a variance of 0.6^2 / 12 = 0.03.
        (0, "attend", "output", {"bmm"}, 0.3),
        (1, "project", "output", {"bmm"}, 0.015),
        (2, "block.norm", "grad_input", {"SqrtBackward0"}, 1.0),
    ],
    ids=["linear attention", "camera matrices", "pre-norm ViT"],
)
def test_a_broken_model_is_found_pinned_and_trained(example, capsys, index, layer, operand, ops, bound):
    outcome = example.debug(example.STORIES[index])
    assert outcome.finding is not None
    assert (outcome.finding.layer, outcome.finding.operand, outcome.finding.step) == (layer, operand, 0)
    assert outcome.finding.op in ops
    assert outcome.pinned == [layer]
    assert len(outcome.after) == example.TRAINED
    assert all(math.isfinite(loss) for loss in outcome.after)
    assert sum(outcome.after[-10:]) / 10 < bound
    assert outcome.skipped < example.TRAINED // 8
    told = capsys.readouterr().out
    assert f"pinned: {layer}" in told
    assert f"of {layer!r} is" in told
    if operand == "output":
        assert all(math.isnan(loss) for loss in outcome.before), "broken from the first step"
