"""What the benchmarks of casts and of a Linear compute and refuse; on a clock of their own, never timed."""

import json
from typing import Any

import pytest
import torch
from ticks import Ticks
from torch import nn

from benchmarks import casts
from fp8engine.bench import harness, linear
from fp8engine.bench.cases import Shape
from fp8engine.bench.harness import Limits, Timer
from fp8engine.errors import ShapeError
from fp8engine.ops import reference
from fp8engine.ops.backends import asked

CPU = torch.device("cpu")
COPY = Limits(1e12, 1e9)


def test_rates_follow_from_bytes_that_have_to_move_and_from_seconds():
    x = torch.zeros(64, 256, dtype=torch.bfloat16)
    # Two bytes read, one written; read once more, for an amax; one byte more of a transpose.
    for name, moved in {"row": 3, "tensor": 5, "tensor, predicted": 3, "tensor, transposed too": 6}.items():
        assert casts.WAYS[name].bytes(x) == moved * x.numel(), name
    assert casts.WAYS["row"].bytes(x.float()) == 5 * x.numel()
    result = casts.casts([(64, 256)], CPU, Timer(Ticks(len(casts.WAYS)), 4), COPY)
    for place, (row, way) in enumerate(zip(result["rows"], casts.WAYS.values(), strict=True)):
        assert (row["correct"], row["seconds"], row["target"]) == (True, 1.0 + place, None)  # a target is a card's
        assert row["of_copy"] == pytest.approx(way.bytes(x) / row["seconds"] / 1e9)
    assert "of copy" in harness.line(result["rows"][0])


def test_a_cast_that_is_off_by_a_code_has_no_rate(monkeypatch: pytest.MonkeyPatch):
    real = reference.quantize

    def wrong(x_MK, how, slot=None):
        data, scale = real(x_MK, how, slot)
        if how.rows == 1 and how.cols == -1 and asked() != "reference":
            data.view(torch.uint8)[3, 5] ^= 1
        return data, scale

    monkeypatch.setattr(reference, "quantize", wrong)
    rows = {row["name"]: row for row in casts.compare((16, 64), CPU, Timer(Ticks(len(casts.WAYS) - 1), 3), COPY)}
    assert (rows["row"]["correct"], rows["tensor"]["correct"]) == (False, True)
    assert not {"seconds", "of_copy"} & {*rows["row"]}
    assert "WRONG" in harness.line(rows["row"])


def test_a_predicted_scale_is_used_and_known_to_fit():
    x = torch.randn(64, 64).bfloat16()
    way = casts.WAYS["tensor, predicted"]
    (found,) = way.run(x, casts._slot(way, x))
    assert found.scale.item() == pytest.approx(16 / 448, rel=2**-24)  # 1 / 28 in FP32


@pytest.mark.parametrize("text", ["", "64", "64,0", "64,64,64", "a,b", "-1,5", ";"])
def test_shapes_that_are_none(text: str):
    with pytest.raises(ShapeError, match="M,K"):
        casts.parse(text)


def test_a_linears_ratio_is_to_bf16_in_the_same_run():
    ways = linear.variants(CPU, in_graphs=False)
    result = linear.linear([Shape(48, 64, 80)], CPU, ways, Timer(Ticks(len(ways)), 4))
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [linear.BASE, *(f"fp8engine {recipe}" for recipe in linear.RECIPES)]
    assert all(row["correct"] for row in rows.values()), rows
    assert [row["over_bf16"] for row in rows.values()] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert min(rows[linear.BASE]["sqnr"]) > 45  # BF16 keeps 8 bits
    for recipe in linear.RECIPES:
        assert 18 < min(rows[f"fp8engine {recipe}"]["sqnr"]) < 35  # three bits of E4M3, two of E5M2
    assert "emulated" in result["what"]


class Wrong(nn.Linear):
    """Half of what it should be."""

    def forward(self, input):
        return super().forward(input) / 2


def halved(plain: Any) -> nn.Module:
    made = Wrong(plain.in_features, plain.out_features, dtype=torch.bfloat16)
    made.load_state_dict(plain.state_dict())
    return made


def test_a_linear_with_wrong_gradients_has_no_time():
    ways = {linear.BASE: linear.Variant(linear.bf16), "wrong": linear.Variant(halved)}
    _, wrong = linear.compare(Shape(16, 24, 32), CPU, ways, Timer(Ticks(1), 3))
    assert wrong["correct"] is False
    assert not {"seconds", "over_bf16"} & {*wrong}
    assert wrong["sqnr"][0] == pytest.approx(6.0, abs=0.1)  # half is missing: 10 log10(4)
    assert "WRONG" in harness.line(wrong)


def test_the_script_of_casts(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(harness, "limits", lambda where, ticks: COPY)
    monkeypatch.setattr(casts, "WHERE", CPU)
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["casts", "--shapes", "64,64"])
    casts.main()
    text = capsys.readouterr().out
    (written,) = tmp_path.rglob("*-quantize.json")
    rows = json.loads(written.read_text())["rows"]
    assert all(row["correct"] and row["name"] in text for row in rows)
