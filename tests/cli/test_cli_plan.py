"""`fp8engine plan`, as a person and as a script use it."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.distributed import plan as planned
from fp8engine.cli import app
from fp8engine.distributed import plan


def call(*arguments: object):
    """Run the command line in this process."""
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.mark.slow
def test_the_screen_and_json_tell_what_plan_found():
    asked = ("benchmarks.distributed.plan:Model", "--ranks", 64, "--tokens", 48, "--sequence", 24, "-r", "blockwise")
    told = json.loads(call(*asked, "--json").stdout)
    expected = plan(planned.Model(), 64, 48, "blockwise", sequence=24).to_dict()
    assert told == {"model": "benchmarks.distributed.plan:Model", **expected}
    shown = call(*asked, "--tp", 2)
    assert shown.exit_code == 0, shown.output
    for text in (
        "64 ranks, 48 tokens a rank, blockwise",
        "predicted seconds",
        "dgx-h100",
        "2: by formula: decoder_plan: ",
    ):
        assert text in shown.stdout
    assert "fits an H100's 80 GB, an H200's 141 GB" in shown.stdout
    assert "times: predicted; docs/distributed.md" in shown.stdout
    assert "2 and 3 blocks run, for 5" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("benchmarks.distributed.plan:Model", "--ranks", 6, "--tp", 4), "ranks=6 is not a multiple of tp=4"),
        (("benchmarks.distributed.plan:Model", "--ranks", 4, "-r", "rowise"), "did you mean 'rowwise'"),
        (("llama-3-7b", "--ranks", 4), "llama-3-7b"),
    ],
)
def test_what_plan_refuses(arguments, told):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_a_llama_of_70b_on_1024_ranks():
    """280 GB of parameters in FP32, none of which is allocated; about half a minute on one core."""
    told = json.loads(call("llama-3-70b", "--ranks", 1024, "--json").stdout)
    assert told["parameters"] == 70_553_706_496
    kinds = told["traffic"]["16 bits"]
    # Forward and backward gather the blocks in BF16; embedding, head and last norm are gathered once, and the rows of
    # 128256 words are padded to 126 on each of 1,024 ranks.
    root = 2 * 126 * 1024 * 8192 + 8192
    blocks = told["parameters"] - 2 * 128256 * 8192 - 8192
    assert kinds["all-gather bfloat16"] == {
        "bytes": (2 * 2 * blocks + 2 * root) * 1023 // 1024,
        "calls": 161,
        "ranks": 1024,
        "apart": 1,
    }
    assert kinds["reduce-scatter float32"]["bytes"] == 4 * (blocks + root) * 1023 // 1024
    # With checkpointing what each of 80 blocks keeps is its input, [8192, 8192] in BF16.
    held = told["memory"]["FP8 gather"]["saved activations"]
    assert told["held"]["without checkpointing"] - told["held"]["with checkpointing"] < held - 80 * 2 * 8192 * 8192
    assert told["fits"] == {
        card: {"without checkpointing": False, "with checkpointing": True} for card in ("H100", "H200")
    }
    codes = told["traffic"]["FP8 gather"]["all-gather uint8"]["bytes"]
    assert 0.5 < codes / (2 * 2 * blocks * 1023 / 1024) < 0.501  # norms stay in BF16
