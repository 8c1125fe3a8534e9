"""benchmarks/amp.py: what is trained, what is judged, what is shown; and the committed result."""

import json
import sys
from pathlib import Path
from typing import Any

import digits
import pytest
import torch

from benchmarks import amp
from benchmarks.amp import LAUNCHERS, VARIANTS, Cell, Part

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def outcome(accuracy: float = 97.0, seconds: float = 1.0, **other: Any) -> dict[str, Any]:
    found = {"accuracy": accuracy, "seconds": [seconds] * 4, "steps": 40, "loss": 0.1, "ranks_apart": 0.0}
    return {**found, "loss_scale": 1.0, "skipped": 0, **other}


def test_every_variant_under_every_launcher_takes_its_turn():
    asked = amp.cells(1, [0, 1])
    assert len(asked) == len(set(asked)) == 2 * 4 * (2 * 3 + 1)
    healthy = {(cell.launcher, cell.model, cell.variant) for cell in asked if cell.weight == 1.0}
    assert healthy == {(one, model, way) for one in LAUNCHERS for model in ("cnn", "vit") for way in VARIANTS}
    for start in range(0, len(asked), 4):
        assert tuple(cell.variant for cell in asked[start : start + 4]) == VARIANTS
    assert [cell.seed for cell in asked] == sorted(cell.seed for cell in asked)


def test_the_digits_are_split_and_shared_out_without_a_loss():
    learned, held_out = digits.load()
    assert (learned.images.shape, len(held_out.labels)) == ((1280, 1, 8, 8), 517)
    assert (learned.images.min(), learned.images.max()) == (-1.0, 1.0)
    assert set(held_out.labels.tolist()) == set(range(10))
    marked = digits.Digits(learned.images, torch.arange(1280))  # labels that tell which digit it is
    whole, other = ([batch.labels for batch in marked.batches(32, seed)] for seed in (3, 4))
    assert sorted(torch.cat(whole).tolist()) == list(range(1280))
    assert not torch.equal(whole[0], other[0])
    shares = [marked.batches(32, 3, slice(rank, None, 2)) for rank in range(2)]
    for batch, mine, yours in zip(whole, *shares, strict=True):
        assert len(mine.labels) == len(yours.labels) == 16
        assert {*mine.labels.tolist(), *yours.labels.tolist()} == set(batch.tolist())


def test_accuracy_counts_without_dropout_and_puts_it_back():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.Dropout(0.9))
    some = digits.Digits(torch.randn(100, 1, 8, 8), torch.zeros(100, dtype=torch.long))
    right = (model[:2](some.images).argmax(-1) == 0).double().mean().item()
    assert digits.accuracy(model, some) == pytest.approx(right, abs=1e-6)
    assert model.training


def alone(model: str, variant: str, epochs: int = 2, weight: float = 1.0) -> dict[str, Any]:
    return amp.train(Cell("single", model, variant, 0, epochs=epochs, weight=weight), Part(CPU))


@pytest.mark.slow
def test_the_faint_model_learns_with_a_scaler_only():
    state = torch.random.get_rng_state()
    plain, scaled = (alone("cnn", variant, weight=amp.FAINT) for variant in ("autocast", "scaler"))
    assert plain["accuracy"] < amp.LOST < 75 < scaled["accuracy"]  # chance is 10
    assert (len(plain["seconds"]), plain["steps"], plain["loss_scale"]) == (2, 40, 1.0)
    assert scaled["loss_scale"] > 1
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random numbers are its own"


@pytest.mark.slow
def test_two_processes_train_as_one_does():
    """The same batches, shared out: DDP's mean of two halves' means is the whole's, but for the order of the sums."""
    asked = [Cell("ddp", "vit", variant, 0, epochs=1) for variant in ("fp32", "o2")]
    for cell, found in zip(asked, amp._processes(asked, CPU), strict=True):
        wanted = alone("vit", cell.variant, epochs=1)
        assert found["ranks_apart"] == 0.0
        assert found["loss"] != wanted["loss"], "the loss of half a batch"
        # No dropout in it; 40 steps of Adam let rounding grow to a few of the 517 digits.
        assert abs(found["accuracy"] - wanted["accuracy"]) < 3.0


def test_rows_join_seeds_and_judge_against_fp32_of_the_same_launcher():
    found = {}
    for seed, (plain, scaled) in enumerate([(97.0, 96.5), (96.0, 95.0), (98.0, 97.4)]):
        found[Cell("single", "cnn", "fp32", seed)] = outcome(plain, 1.0)
        found[Cell("single", "cnn", "autocast", seed)] = outcome(plain - 1.1, 2.0)
        found[Cell("single", "cnn", "scaler", seed)] = outcome(scaled, 2.0 + seed, skipped=seed, loss_scale=2.0**15)
        found[Cell("ddp", "cnn", "fp32", seed)] = outcome(90.0)
        found[Cell("ddp", "cnn", "autocast", seed)] = outcome(90.4)
        found[Cell("ddp", "cnn", "o2", seed)] = outcome(90.0 + 1.1)
        found[Cell("ddp", "cnn", "scaler", seed)] = outcome(90.0, ranks_apart=1e-3 * (seed == 1))
    rows = {(row["launcher"], row["variant"]): row for row in amp.rows(found)}
    right, near = rows["single", "scaler"], rows["ddp", "autocast"]
    assert right["accuracy"] == pytest.approx((96.5 + 95.0 + 97.4) / 3)
    assert (right["correct"], right["points"], right["skipped"]) == (True, -0.7, [0, 1, 2])
    assert right["over_fp32"] == pytest.approx(1 / 3)  # 1 s over the median of 2, 3 and 4 s
    assert right["step_seconds"] == pytest.approx(3.0 / 40)
    assert (near["correct"], near["points"]) == (True, 0.4)
    over, apart = "over 1 point", "weights differ by 1.0e-03"
    for key, why in {("single", "autocast"): over, ("ddp", "o2"): over, ("ddp", "scaler"): apart}.items():
        assert (rows[key]["correct"], rows[key]["over_fp32"]) == (False, None)
        assert why in rows[key]["why"]
        assert "WRONG" in amp.line(rows[key])
    assert all(row["correct"] is None for row in amp.rows(found, judged=False))


@pytest.mark.parametrize(("without", "correct"), [(12.0, True), (96.0, False)])
def test_the_faint_model_must_fail_without_a_scaler(without: float, correct: bool):
    accuracies = {"fp32": 97.0, "autocast": without, "scaler": 12.0}
    found = {Cell("single", "cnn", way, 0, weight=amp.FAINT): outcome(of) for way, of in accuracies.items()}
    _, unscaled, scaled = amp.rows(found)
    assert unscaled["correct"] is correct
    assert ("underflows, as it must" in amp.line(unscaled)) == correct
    assert scaled["correct"] is False, "the scaler must cure it"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The script with these options, nothing trained: (exit status, stdout, stderr, the cells asked for)."""
    asked: list[Cell] = []

    def train(cell: Cell, part: Part) -> dict[str, Any]:
        asked.append(cell)
        return outcome(12.0 if cell.weight != 1.0 and cell.variant == "autocast" else 97.0)

    monkeypatch.setattr(amp, "train", train)
    monkeypatch.setattr(amp, "_processes", lambda cells, where: [train(cell, Part(where)) for cell in cells])
    monkeypatch.setattr(amp, "save", lambda what, result: tmp_path / what)

    def run(*arguments: object) -> tuple[int, str, str, list[Cell]]:
        status = amp.main(["--device", "cpu", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err, asked

    return run


def test_the_script_prints_one_table(call):
    status, out, told, asked = call()
    assert (status, len(asked), {cell.epochs for cell in asked}) == (0, 84, {8})
    table = out.splitlines()
    assert table.count(amp.HEADING) == 1
    body = table[table.index(amp.HEADING) + 1 :]
    groups = [" ".join(line.split()[:2]) for line in body[::4]]
    assert groups == ["single cnn", "single vit", "single cnn", "dp cnn", "dp vit", "ddp cnn", "ddp vit"]
    assert len(body) == 28
    assert "the times say nothing of a GPU" in out
    assert "WRONG" not in out
    assert "84/84: ddp, 2 processes" in told


def test_a_quick_result_is_not_judged(call, tmp_path: Path):
    status, out, _, asked = call("--quick", "--json", "--out", tmp_path / "amp.json")
    assert (status, len(asked)) == (0, 28)
    printed = json.loads(out)
    assert printed == json.loads((tmp_path / "amp.json").read_text())
    assert {row["correct"] for row in printed["rows"]} == {None}


def test_what_it_refuses(call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    for given, why in {("--device", "meta"): "no amp benchmark on meta", (): "fp8engine[examples]"}.items():
        status, out, told, asked = call(*given)
        assert (status, out, asked) == (2, "", [])
        assert why in told


def test_the_committed_result_reaches_the_target():
    rows = json.loads(max(RESULTS.glob("cpu-*/*-amp.json")).read_text())["rows"]
    assert {(row["launcher"], row["variant"]) for row in rows} == {(one, way) for one in LAUNCHERS for way in VARIANTS}
    for row in rows:
        assert row["correct"] is True, row
        assert len(row["accuracies"]) == 3
        if row["why"] != "underflows, as it must":
            assert abs(row["points"]) <= 1.0
