"""`fp8engine plan`, `bench predict` and `train -r auto`, as a person and as a script use them."""

import json
import re
from pathlib import Path
from statistics import median

import pytest
from command_line import call, refused, shown, told
from torch import nn

import fp8engine as fe
from benchmarks import published, published_layers
from benchmarks.distributed import plan as planned
from fp8engine.bench import predict
from fp8engine.cli.bench import ERROR
from fp8engine.distributed import plan
from fp8engine.numerics.cards import H100_PCIE, H100_SXM
from fp8engine.numerics.recipe import RECIPES, resolve
from fp8engine.ops.cost import Setting, layer_time

MODEL = "benchmarks.distributed.plan:Model"


@pytest.mark.slow
def test_the_screen_and_json_tell_what_plan_found():
    words = ("plan", MODEL, "--ranks", 64, "--tokens", 48, "--sequence", 24, "-r", "blockwise")
    expected = plan(planned.Model(), 64, 48, "blockwise", sequence=24).to_dict()
    assert told(*words) == {"model": MODEL, **expected}
    text = shown(*words, "--tp", 2)
    for part in (
        "64 ranks, 48 tokens a rank, blockwise", "predicted seconds", "dgx-h100", "2: by formula: decoder_plan: ",
        "fits an H100's 80 GB, an H200's 141 GB", "times: predicted; docs/distributed.md",
        "2 and 3 blocks run, for 5",
    ):  # fmt: skip
        assert part in text


def test_a_misspelt_llama_is_told_the_known_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    known = "known without a file: llama-3-8b, llama-3-70b, llama-3-405b"
    refused(known, "plan", "llama-3-9b", "--ranks", 8, alone=False)
    refused(known, "bench", "predict", "llama-3-9b", alone=False)


def test_what_plan_refuses():
    refused("ranks=6 is not a multiple of tp=4", "plan", MODEL, "--ranks", 6, "--tp", 4)
    refused("did you mean 'rowwise'", "plan", MODEL, "--ranks", 4, "-r", "rowise")
    refused("llama-3-7b", "plan", "llama-3-7b", "--ranks", 4)
    for option in ("--ranks", "--tokens", "--sequence", "--tp"):
        for value in (0, -1):
            result = call("plan", MODEL, "--ranks", 4, option, value)
            assert result.exit_code == 2
            assert option in result.output


@pytest.mark.nightly
@pytest.mark.slow
def test_a_llama_of_70b_on_1024_ranks():
    """280 GB of parameters in FP32, none of which is allocated; about half a minute on one core."""
    found = told("plan", "llama-3-70b", "--ranks", 1024)
    assert found["parameters"] == 70_553_706_496
    kinds = found["traffic"]["16 bits"]
    # Forward and backward gather the blocks in BF16; embedding, head and last norm are gathered once, and the rows of
    # 128256 words are padded to 126 on each of 1,024 ranks.
    root = 2 * 126 * 1024 * 8192 + 8192
    blocks = found["parameters"] - 2 * 128256 * 8192 - 8192
    assert kinds["all-gather bfloat16"] == {
        "bytes": (2 * 2 * blocks + 2 * root) * 1023 // 1024,
        "calls": 161,
        "ranks": 1024,
        "apart": 1,
    }
    assert kinds["reduce-scatter float32"]["bytes"] == 4 * (blocks + root) * 1023 // 1024
    # With checkpointing what each of 80 blocks keeps is its input, [8192, 8192] in BF16.
    held = found["memory"]["FP8 gather"]["saved activations"]
    assert found["held"]["without checkpointing"] - found["held"]["with checkpointing"] < held - 80 * 2 * 8192 * 8192
    assert found["fits"] == {
        card: {"without checkpointing": False, "with checkpointing": True} for card in ("H100", "H200")
    }
    codes = found["traffic"]["FP8 gather"]["all-gather uint8"]["bytes"]
    assert 0.5 < codes / (2 * 2 * blocks * 1023 / 1024) < 0.501  # norms stay in BF16


def model() -> nn.Module:
    """Two equal blocks and a head."""
    block = lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))  # noqa: E731
    return nn.ModuleDict({"blocks": nn.ModuleList([block(), block()]), "lm_head": nn.Linear(512, 1000)}).to("meta")


def test_equal_layers_share_a_row_and_the_head_stays_in_bf16():
    found = predict.of_model(model(), 4096, H100_SXM)
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
    text = shown("bench", "predict", "8192,14336,4096", "--card", "h100-pcie")
    speedup = layer_time(resolve("current"), 8192, 14336, 4096, H100_PCIE).speedup
    words = ("PREDICTED", "nothing was measured", "H100 PCIe", "8192x14336x4096", "casts", "wgrad", f"{speedup:.2f}x")
    same = "predicted the same: bf16 as BF16, fp16 as BF16, auto as current"
    assert [part for part in (*words, *RECIPES, same) if part not in text] == []


def test_the_error_that_is_told_is_the_one_on_rows_that_nothing_was_fitted_to():
    matmuls = [abs(row.error) for row in published.rows() if not row.fitted]
    layers = [abs(row.error) for row in published_layers.rows() if row.kind == published_layers.KINDS["layer"]]
    (matmul, layer) = (f"{100 * median(each):.0f} % and {100 * max(each):.0f} %" for each in (matmuls, layers))
    assert f"matmuls {matmul}, a layer's speed-up {layer} (" in ERROR


def test_a_llama_by_name_as_json_and_the_page_that_prints_it(tmp_path: Path):
    found = told("bench", "predict", "llama-3-8b", "--card", "h200")
    assert found["predicted"] is True
    assert found["card"] == "h200"
    assert sum(row["count"] for row in found["rows"]) == 7 * 32 + 1
    assert 1.1 < found["total"]["recipes"]["current"]["speedup"] < 2.0
    heads = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
    }
    size = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}  # SmolLM2-135M
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **size, **heads}))
    large, small = speeds(found), speeds(told("bench", "predict", tmp_path, "--card", "h200")).values()
    page = (Path(fe.__file__).parents[1] / "docs/getting-started.md").read_text(encoding="utf-8")
    assert large["current"] == large["rowwise"]
    assert f"Llama-3-8B, 8,192 tokens a step, with their casts: {large['current']} times as fast as BF16 under" in page
    assert f"`rowwise`, {large['delayed']} under `delayed`, {large['blockwise']} under `blockwise`." in page
    assert f"Of SmolLM2-135M: {min(small)} to {max(small)} times." in page


def speeds(found: dict) -> dict[str, str]:
    """By recipe, of a whole model, as docs/getting-started.md prints them."""
    recipes = found["total"]["recipes"]
    return {name: f"{recipes[name]['speedup']:.2f}" for name in ("current", "delayed", "rowwise", "blockwise")}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("8192,4096,4096 --card h300", "h100-sxm"),
        ("8192,4096", "not M,N,K"),
        ("llama-3-7b", "llama-3-7b"),
        ("torch.nn:Identity", "Identity has no linear layers"),
    ],
)
def test_what_predict_refuses(arguments: str, told: str):
    result = call("bench", "predict", *arguments.split())
    assert result.exit_code == 2
    assert told in result.output


SMALLEST = ("train", "--size", "tiny", "--batch", "2", "--steps", "3", "-r", "auto", "-r", "current", "--out")


def test_the_page_and_the_plan_lie_beside_the_picture(tmp_path: Path):
    """Of auto alone: a fixed recipe decides nothing.  What is measured after the run is not in them."""
    found = told(*SMALLEST, tmp_path)
    names = [Path(name).name for name in found["files"]]
    assert names == ["table.json", "table.csv", "loss.png", "auto.html", "auto-plan.json"]
    assert all((tmp_path / name).stat().st_size > 200 for name in names)
    decisions = found["runs"]["auto"]["decisions"]
    assert found["runs"]["current"]["decisions"] == []
    assert all(each["after"].startswith("E4M3") for each in decisions if each["slot"].endswith("grad_output"))
    plan = json.loads((tmp_path / "auto-plan.json").read_text())
    assert sum(len(change["slots"]) for change in plan["changes"]) == len(decisions) >= 8
    page = (tmp_path / "auto.html").read_text()
    assert 'class="loss"' in page
    assert "blocks.1.down.grad_output" in page
    fe.auto(plan=tmp_path / "auto-plan.json")


def test_a_person_is_told_the_last_decisions(tmp_path: Path):
    text = shown(*SMALLEST, tmp_path, "--watch")  # no terminal: lines, not a live view
    assert re.search(r"auto changed \d+ formats; the last:", text)
    assert text.count("predicted SQNR") >= 5
    assert "auto          step 3/3  loss " in text
    assert "auto.html" in text
