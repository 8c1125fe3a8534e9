"""The sweep of a card: what it tries, and the tuning table that is made of its rows."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import sweep, tuning_table
from benchmarks.card import records
from benchmarks.card import sweep as card_sweep
from fp8engine.kernels import tuning
from fp8engine.kernels.tuning import Config
from fp8engine.numerics.cards import H200
from fp8engine.numerics.matmul_time import REACHED

FILE = next((Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200").glob("*-sweep.jsonl"))
FAST, LARGE = Config(128, 128, 128), (8192, 8192, 4096)


def row(shape: tuple[int, ...], seconds: float, config: Config | None, kind: str = "tensor") -> dict:
    """One measurement, predicted to take a second."""
    found = {"operation": "matmul_fp8", "kind": kind, "shape": list(shape), "seconds": seconds}
    if config is None:
        return {**found, "name": "cublas"}
    return {**found, "name": str(config), "config": list(config[:-1]), "predicted": 1.0}


@pytest.mark.parametrize("operation", dict(card_sweep.OPERATIONS))
def test_what_is_tried_fits_and_has_the_committed_configurations(operation: str):
    tried = card_sweep.configurations(operation)
    assert len(set(tried)) == len(tried) > 20
    committed = {name: one._replace(ratio=None) for name, one in card_sweep.rows(operation).items()}
    assert {one for name, one in committed.items() if name != "unaligned"} <= set(tried)
    assert max(tuning.shared_memory(operation, one) for one in tried) <= 232_448  # of a program on Hopper


def test_the_best_mean_of_a_class_comes_first_and_the_committed_one_has_its_least_ratio():
    committed = tuning.table()["matmul_fp8"]["sm_90"]["large"]._replace(ratio=None)
    rows = []
    for kind, fast, ours in (("tensor", 1.0, 4.0), ("row", 2.0, 1.6)):
        rows += [row(LARGE, 2.0, None, kind), row(LARGE, fast, FAST, kind), row(LARGE, ours, committed, kind)]
    rows.append(row(LARGE, 0.1, Config(64, 64, 128)))  # it ran under one kind of scales alone
    found = sweep.classes(rows)
    (configs,) = found.values()
    assert [(one.config, one.ratios) for one in configs] == [(FAST, [2.0, 1.0]), (committed, [0.5, 1.25])]
    assert configs[0].predicted == [1.0, 0.5]
    assert sweep.rows(found)["matmul_fp8", "large"] == committed._replace(ratio=0.5)._asdict()


def test_a_mean_above_cublaslt_that_is_not_so_everywhere_is_left_to_the_cards_trials():
    committed = tuning.table()["matmul_fp8"]["sm_90"]["large"]._replace(ratio=None)
    for other, ratio in ((0.9, None), (1.0, 1.0)):
        rows = [row(LARGE, 2.0, None), row(LARGE, 1.0, committed)]
        rows += [row(LARGE, other, None, "row"), row(LARGE, 1.0, committed, "row")]
        assert sweep.rows(sweep.classes(rows))["matmul_fp8", "large"]["ratio"] == ratio


def test_the_committed_table_is_that_of_the_committed_sweep(monkeypatch, tmp_path: Path, capsys):
    old, copy = tuning.TABLE.read_text(), tmp_path / "tuning.json"
    copy.write_text(old)
    monkeypatch.setattr(tuning, "TABLE", copy)
    monkeypatch.setattr(sys, "argv", ["sweep", str(FILE), "--write"])
    sweep.main()
    assert tuning_table.difference(old, copy.read_text()) == ""
    said = capsys.readouterr().out
    assert "matmul_fp8 large: 13 matmuls" in said
    assert "128x256x128 g8 w8 s3 p2 tma flat (committed)" in said
    assert json.loads(copy.read_text())["source"]["matmul_block sm_90 large"]["card"] == "NVIDIA H200"


def test_what_the_model_says_is_reached_is_what_the_committed_sweep_gives():
    """Fitted to half of the shapes, Gluon's kernels are nearer on the other half."""
    every, _ = records.read(FILE)
    found = sweep.reached(sweep.timed(every), H200)
    assert {key: fit.share for key, fit in found.items()} == {
        (family, sums): REACHED[family][sums] for family, sums in found
    }
    assert set(found) == {(family, sums) for family in ("triton", "gluon") for sums in REACHED[family]}
    assert all(fit.after < fit.before for (family, _), fit in found.items() if family.startswith("gluon"))
