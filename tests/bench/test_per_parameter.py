"""The table of docs/performance.md: the committed result, which a block counted now repeats."""

import pytest
import torch

from benchmarks import per_parameter
from benchmarks.per_parameter import LAYERS, PAGE, PARTS, TABLE, counted, newest, table


def test_the_page_has_what_was_counted():
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found.group() == table(newest()["rows"]), "python -m benchmarks.per_parameter --write"


def test_weights_gradients_and_states_are_what_their_dtypes_say():
    for model, row in newest()["rows"].items():
        size = 4 if model.startswith("FP32") else 2
        for name, part in row.items():
            assert (part["weights"], part["gradients"]) == (size, size)
            # A byte and 4 for 256 of them, twice; norms (3 parameters of 10,000) in their own dtype, and step counts.
            assert part["states"] == pytest.approx(2 + 8 / 256 if "states" in name else 2 * size, rel=2e-3)
            assert part["copies"] == pytest.approx(float(name != "BF16"), rel=1e-3)


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_a_block_counted_now_is_the_committed_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(per_parameter.SIZES, "intermediate_size", 512)  # of the same parts, and faster
    one, two = (counted(layers, 16, torch.bfloat16, "FP8, FP8 states") for layers in (1, 2))
    block = {name: two[name] - one[name] for name in two}
    kept = newest()["rows"]["BF16 weights"]["FP8, FP8 states"]
    assert set(kept) == {*PARTS, "saved"}
    assert set(newest()["rows"]["BF16 weights"]) == set(LAYERS)
    for name in ("weights", "gradients", "states", "copies"):
        assert block[name] / block["parameters"] == pytest.approx(kept[name], rel=2e-3)
