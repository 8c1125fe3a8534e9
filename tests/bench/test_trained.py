"""Fine-tuning under each recipe (benchmarks/trained.py): what is paired with what, and which text a step has."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "trained.py")))


def row(recipe: str, seed: int, *losses: float) -> dict:
    return {"recipe": recipe, "seed": seed, "step": 100, "losses": list(losses), "fp8_flops_share": 0.75}


def test_a_recipe_is_paired_with_the_training_of_its_own_seed(trained):
    rows = [row("plain", 0, 1.0, 3.0), row("plain", 1, 4.0), row("plain", 2, 9.0)]
    rows += [row("current", 1, 4.4), row("current", 0, 2.02), row("rowwise", 3, 5.0)]  # no plain one has seed 3
    plain, current = trained.summary(rows, 100)
    assert (plain["recipe"], plain["seeds"], plain["percent"], plain["error"]) == ("plain", 3, 0.0, 0.0)
    assert (current["recipe"], current["seeds"]) == ("current", 2)
    assert current["percent"] == pytest.approx((1 + 10) / 2)
    assert current["error"] == pytest.approx(4.5)  # the standard deviation of 1 and 10 is 9 / sqrt(2)
    assert trained.summary(rows, 200) == []


def test_every_window_is_trained_on_once_in_each_epoch_in_the_order_of_the_seed(trained):
    text = trained.Text(torch.arange(5)[:, None], torch.empty(0, 1))
    first, again, other = (torch.cat(list(text.batches(seed, 2, 5))).flatten() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for epoch in first.split(5):
        assert epoch.sort().values.tolist() == list(range(5))


def test_files_of_other_trainings_are_not_joined(trained, tmp_path):
    for name, steps in (("a", 100), ("b", 200)):
        (tmp_path / name).write_text(f'{{"machine": "{name}", "steps": {steps}}}\n{{"recipe": "plain"}}\n')
    assert trained.read([tmp_path / "a", tmp_path / "a"])[1] == [{"recipe": "plain"}] * 2
    with pytest.raises(SystemExit, match="not alike"):
        trained.read([tmp_path / "a", tmp_path / "b"])
