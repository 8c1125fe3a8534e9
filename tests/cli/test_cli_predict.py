"""`fp8engine bench predict`, as a person and as a script use it; its numbers are those of the cost model."""

import json
from statistics import median

import pytest
from torch import nn
from typer.testing import CliRunner

from benchmarks import published, published_layers
from fp8engine.bench import predict
from fp8engine.cli import app
from fp8engine.cli.bench import ERROR
from fp8engine.numerics.cards import H100_PCIE, H100_SXM
from fp8engine.numerics.recipe import RECIPES, resolve
from fp8engine.ops.cost import Setting, layer_time


def call(*arguments: object):
    """Run the command line in this process."""
    return CliRunner().invoke(app, ["bench", "predict", *map(str, arguments)])


class Model(nn.Module):
    """Two equal blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in "ab")
        self.lm_head = nn.Linear(512, 1000)


def test_equal_layers_share_a_row_and_the_head_stays_in_bf16():
    found = predict.of_model(Model().to("meta"), 4096, H100_SXM)
    assert [(row["name"], row["count"], row["shape"]) for row in found["rows"]] == [
        ("blocks.*.*", 2, [4096, 2048, 512]),
        ("blocks.*.*", 2, [4096, 512, 2048]),
        ("lm_head", 1, [4096, 1000, 512]),
    ]
    up, down, head = found["rows"]
    assert head["why"]
    assert not head["recipes"]
    assert set(up["recipes"]) == set(found["total"]["recipes"]) == set(RECIPES)
    time = layer_time(resolve("delayed"), 4096, 2048, 512, H100_SXM, Setting(bias=True))
    assert up["recipes"]["delayed"]["us"] == pytest.approx(1e6 * time.fp8)
    assert up["recipes"]["delayed"]["casts_us"] == pytest.approx(1e6 * time.casts)
    total = found["total"]
    assert total["bf16_us"] == pytest.approx(2 * up["bf16_us"] + 2 * down["bf16_us"] + head["bf16_us"])
    fp8 = 2 * (up["recipes"]["current"]["us"] + down["recipes"]["current"]["us"]) + head["bf16_us"]
    assert total["recipes"]["current"]["us"] == pytest.approx(fp8)


def test_one_layer_on_the_screen_is_marked_as_predicted():
    shown = call("8192,14336,4096", "--card", "h100-pcie")
    assert shown.exit_code == 0, shown.output
    for text in ("PREDICTED", "nothing was measured", "H100 PCIe", "8192x14336x4096", *RECIPES, "casts", "wgrad"):
        assert text in shown.stdout
    assert "predicted the same: bf16 as BF16, fp16 as BF16, auto as current" in shown.stdout
    speedup = layer_time(resolve("current"), 8192, 14336, 4096, H100_PCIE).speedup
    assert f"{speedup:.2f}x" in shown.stdout


def test_the_error_that_is_told_is_the_one_on_rows_that_nothing_was_fitted_to():
    matmuls = [abs(row.error) for row in published.rows() if not row.fitted]
    layers = [abs(row.error) for row in published_layers.rows() if row.kind == published_layers.KINDS["layer"]]
    (matmul, layer) = (f"{100 * median(each):.0f} % and {100 * max(each):.0f} %" for each in (matmuls, layers))
    assert f"matmuls {matmul}, a layer's speed-up {layer} (" in ERROR


def test_a_llama_by_name_as_json():
    told = json.loads(call("llama-3-8b", "--card", "h200", "--json").stdout)
    assert told["predicted"] is True
    assert told["card"] == "h200"
    assert sum(row["count"] for row in told["rows"]) == 7 * 32 + 1
    assert 1.1 < told["total"]["recipes"]["current"]["speedup"] < 2.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("8192,4096,4096", "--card", "h300"), "h100-sxm"),
        (("8192,4096"), "not M,N,K"),
        (("llama-3-7b",), "llama-3-7b"),
    ],
)
def test_what_predict_refuses(arguments, told):
    result = call(*([arguments] if isinstance(arguments, str) else arguments))
    assert result.exit_code == 2
    assert told in result.output
