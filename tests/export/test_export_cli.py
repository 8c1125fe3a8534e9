"""`fp8engine export` as a person and as a script use it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fp8engine.cli import app
from fp8engine.export import load


def call(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The folder of a tiny model."""
    model: Any = tiny_models.llama()
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_json_says_what_was_written(plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    result = call(plain, out, "--recipe", "blockwise", "--dtype", "bf16", "--skip", "*.down_proj", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["files"] == sorted(os.listdir(out))
    assert (told["layout"], told["recipe"], len(told["layers"])) == ("fp8", "blockwise", 12)
    left = {row["name"]: row["reason"] for row in told["left"]}
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj"} <= set(left)
    assert told["bytes_after"] == (out / "model.safetensors").stat().st_size < told["bytes_before"]
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert load(out)


def test_a_person_gets_a_table(plain: Path, tmp_path: Path):
    result = call(plain, tmp_path / "out", "--layout", "fp8engine", "--max-shard-size", "20KB")
    assert result.exit_code == 0, result.output
    for part in (
        "model.layers.1.mlp.up_proj",
        "2,048",
        "output head",
        "note: ",
        "14 layers in FP8 (current, layout fp8e",
    ):
        assert part in result.stdout, part
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_what_it_refuses(plain: Path, tmp_path: Path):
    refuse("did you mean 'rowwise'", plain, tmp_path / "out", "-r", "rowise")
    refuse("did you mean 'fp8'", plain, tmp_path / "out", "--layout", "fp")
    refuse("did you mean 'bf16'", plain, tmp_path / "out", "--dtype", "bf61")
    refuse("has no config.json", tmp_path, tmp_path / "out")
    refuse("not an empty folder", plain, plain)
    refuse("no linear layer matches it", plain, tmp_path / "out", "--skip", "nothing")
    assert call(plain, tmp_path / "first").exit_code == 0
    refuse("quantised already (compressed-tensors)", tmp_path / "first", tmp_path / "out")
    (plain / "model.safetensors").write_bytes(b"")
    refuse("transformers cannot load", plain, tmp_path / "out")


def refuse(told: str, *arguments: object) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert told in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")
