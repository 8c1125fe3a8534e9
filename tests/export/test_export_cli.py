"""`fp8engine export` as a person and as a script use it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from command_line import call, refused, shown, told
from safetensors.torch import load_file, save_file

from fp8engine.export.hf import load


def refuse(why: str, *arguments: object) -> None:
    """Behind whatever transformers says of the files."""
    refused(why, "export", *arguments, alone=False)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The folder of a tiny model."""
    model: Any = tiny_models.llama()
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_json_says_what_was_written(plain: Path, tmp_path: Path):
    out = tmp_path / "out"
    model: Any = tiny_models.llama_of_blocks()
    model.save_pretrained(plain)
    found = told("export", plain, out, "--recipe", "blockwise", "--dtype", "bf16", "--skip", "*.down_proj")
    assert found["files"] == sorted(os.listdir(out))
    assert (found["layout"], found["recipe"], len(found["layers"])) == ("fp8", "blockwise", 6)
    left = {row["name"]: row["reason"] for row in found["left"]}
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.down_proj"} <= set(left)
    assert found["bytes_after"] == (out / "model.safetensors").stat().st_size < found["bytes_before"]
    assert load_file(out / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert load(out)


def test_weights_that_the_class_has_no_place_for_are_named(plain: Path, tmp_path: Path):
    """A class that transformers does not know is read as the model without its head, which the export then lacks."""
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    notes = told("export", plain, tmp_path / "out", "-r", "rowwise")["notes"]
    assert any("1 weights of" in note and "'lm_head.weight' the first: LlamaModel has none" in note for note in notes)


def test_a_person_gets_a_table(plain: Path, tmp_path: Path):
    text = shown("export", plain, tmp_path / "out", "--layout", "fp8engine", "--max-shard-size", "20KB")
    for part in ("model.layers.0-1.mlp.up_proj × 2", "output head", "note: ", "14 layers in FP8 (current; layout fp8e"):
        assert part in text, part
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_what_it_refuses(plain: Path, tmp_path: Path):
    refuse("did you mean 'rowwise'", plain, tmp_path / "out", "-r", "rowise")
    refuse("did you mean 'fp8'", plain, tmp_path / "out", "--layout", "fp")
    refuse("did you mean 'bf16'", plain, tmp_path / "out", "--dtype", "bf61")
    refuse("has no config.json", tmp_path, tmp_path / "out")
    refuse("not an empty folder", plain, plain)
    refuse("unknown --skip pattern (no linear layer matches it)", plain, tmp_path / "out", "--skip", "nothing")
    refuse("--max-shard-size '5XB': want a number and", plain, tmp_path / "out", "--max-shard-size", "5XB")
    shown("export", plain, tmp_path / "first")
    refuse("quantised already (compressed-tensors)", tmp_path / "first", tmp_path / "out")
    (plain / "model.safetensors").write_bytes(b"")
    refuse("transformers cannot load", plain, tmp_path / "out")
    refuse("not an empty folder", plain, tmp_path / "first")  # said before the weights are read, and so first


def test_a_folder_that_cannot_be_written(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    refuse("no space left on device; nothing was written", plain, tmp_path / "out")
    assert os.listdir(tmp_path) == ["plain"]


def test_layers_left_for_one_reason_are_said_once(tmp_path: Path):
    model: Any = tiny_models.gpt2()
    model.save_pretrained(tmp_path / "gpt2")
    refuse("attn.c_attn and 7 more: 'compressed-tensors' holds nn.Linear only", tmp_path / "gpt2", tmp_path / "out")


def test_a_folder_that_lacks_a_weight_is_refused(plain: Path, tmp_path: Path):
    """Random numbers stood in its place, with exit code 0."""
    held = load_file(plain / "model.safetensors")
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, plain / "model.safetensors", metadata={"format": "pt"})
    refuse(
        "1 weights of LlamaForCausalLM are not in its files, 'model.layers.1.mlp.up_proj.weight'",
        plain,
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()


def test_nobody_watches_a_bar_in_a_pipe(plain: Path, tmp_path: Path):
    before = transformers.logging.is_progress_bar_enabled()
    transformers.logging.enable_progress_bar()
    try:
        result = call("export", plain, tmp_path / "out")
        assert transformers.logging.is_progress_bar_enabled()
    finally:
        if not before:
            transformers.logging.disable_progress_bar()
    assert result.exit_code == 0
    assert result.stderr == ""


def test_auto_decides_from_the_given_text(tmp_path: Path):
    """`-r auto` of a plain folder once wrote `current`.  Rows of o_proj that are a million times smaller need a scale
    of their own."""
    model: Any = tiny_models.llama(vocab_size=256, num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[::2] *= 1e-6
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "text.txt").write_text("\n".join(f"Line {number} of the text." for number in range(20)))
    text = ("--text", tmp_path / "text.txt", "--tokenizer", "bytes")
    to = (tmp_path / "plain", tmp_path / "out", "-r")
    refuse("recipe 'auto' decides from what the layers see while the model reads a text", *to, "auto")
    refuse("leave it out", *to, "rowwise", *text)
    refuse("has no tokenizer", *to, "auto", *text[:2])
    found = told("export", *to, "auto", *text, "--skip", "*.down_proj")
    recipes = {row["name"].rpartition(".")[2]: row["recipe"] for row in found["layers"]}
    assert recipes["o_proj"] == "rowwise_exact"
    assert recipes["gate_proj"] == recipes["up_proj"]
    assert "down_proj" not in recipes
    back = load(tmp_path / "out")
    assert back.model.layers[0].self_attn.o_proj.weight_scale.shape == (32, 1)
    kept = {name: p for name, p in model.state_dict().items() if "norm" in name or "embed" in name}
    assert all(torch.equal(back.state_dict()[name], p) for name, p in kept.items()), "auto's steps train nothing"
