"""`fp8engine compare` as a person and as a script use it: what it prints and writes agrees, and what it refuses."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import torch
import transformers
from typer.testing import CliRunner

import fp8engine as fe
from fp8engine.cli import app
from fp8engine.cli.models import load_pretrained
from fp8engine.report.compare import compare_recipes
from fp8engine.report.compare.batches import BYTES, batches

BYTES_READ: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": 128}
LINES = [f"Sentence {number} of {100 - number} has words in it." for number in range(12)]


def call(*arguments: object):
    """Run the command line in this process."""
    return CliRunner().invoke(app, ["compare", *(str(argument) for argument in arguments)])


def refused(told: str, *arguments: object) -> None:
    """Exit code 2 and one line on standard error; nothing on standard output."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert told in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads bytes, a text, and a module whose function gives the same model."""
    where = tmp_path_factory.mktemp("compared")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**tiny_models._decoder(), **BYTES_READ})
    transformers.LlamaForCausalLM(config).save_pretrained(where / "model")
    (where / "text.txt").write_text("\n".join(LINES))
    code = "import transformers\ndef model(): return transformers.LlamaForCausalLM.from_pretrained('model')\n"
    (where / "compared_models.py").write_text(code)
    return where


def test_screen_json_and_files_tell_the_same(folder: Path, tmp_path: Path):
    arguments = (folder / "model", "--tokenizer", "bytes", "--text", folder / "text.txt", "--texts", 10, "--length", 30)
    result = call(*arguments, "-r", "current", "-r", "rowwise", "-r", "current", "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["files"] == [str(tmp_path / name) for name in ("compare.json", "compare.png")]
    assert json.loads((tmp_path / "compare.json").read_text()) == {k: v for k, v in told.items() if k != "files"}
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert [one["recipe"] for one in told["results"]] == ["bf16", "current", "rowwise"]
    assert (told["model"], told["dtype"], told["texts"]) == ("LlamaForCausalLM", "float32", 10)
    assert told["notes"] == [
        f"{sum(len(line) > 30 for line in _chosen())} of 10 texts were cut to 30 tokens",
        "± is one standard error over the texts; a change of less than two may be chance",
    ]

    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    ids = [BYTES.encode(line)[:30] for line in _chosen()]
    want = compare_recipes(model, batches(model, ids, BYTES), ["current"])
    assert told["loss"] == want.loss
    result, agrees = told["results"][1], want.results[0].top1
    assert agrees is not None
    assert (result["loss"], result["top1"], result["top1_error"]) == (want.results[0].loss, *agrees)

    shown = call(*arguments, "-r", "current", "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    for part in (
        "current (emulated)",
        f"{want.loss:.4f}",
        f"{100 * agrees.value:.2f}",
        f"{result['change_percent']:+.3f} ± {result['change_percent_error']:.3f}",
        "texts were cut",
        "compare.png",
    ):
        assert part in shown.stdout, part


def _chosen() -> list[str]:
    """Ten of the twelve lines, evenly spaced."""
    return [LINES[index * 12 // 10] for index in range(10)]


def test_a_function_is_the_folder_and_the_manual_is_the_text(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "compared_models", raising=False)
    arguments = ("--tokenizer", "bytes", "--texts", 4, "--out", tmp_path, "--json")
    told = [json.loads(call(target, *arguments).stdout) for target in ("model", "compared_models:model")]
    assert told[0].pop("target") != told[1].pop("target")
    assert told[0] == told[1]
    assert told[0]["text"].startswith("Python's manual")
    assert told[0]["loss"] > 5  # random weights: ln 256 = 5.5
    refused("a function brings no tokenizer: give --tokenizer FOLDER, or bytes", "compared_models:model")


def test_a_folder_brings_its_own_tokenizer(folder: Path, tmp_path: Path):
    words = {"<unk>": 0, "end": 1, "</s>": 2, "<mask>": 3, "start": 4}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", mask_token="<mask>")
    shutil.copytree(folder / "model", tmp_path / "model")
    made.save_pretrained(tmp_path / "model")
    _, tokens, notes = load_pretrained(str(tmp_path / "model"), None)
    assert tokens.encode("start never end") == [4, 0, 1]
    assert (tokens.pad, tokens.mask) == (2, 3)  # as GPT-2's: no padding token, the end pads
    assert notes == []
    made.add_special_tokens({"pad_token": "end"})
    made.save_pretrained(tmp_path / "model")
    assert load_pretrained(str(folder / "model"), str(tmp_path / "model"))[1].pad == 1


def test_without_matplotlib_it_says_that_there_is_no_picture(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call(folder / "model", "--tokenizer", "bytes", "--texts", 2, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no picture: matplotlib is not installed (pip install 'fp8engine[report]')" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]


def test_weights_that_are_not_in_the_folder_are_said_to_be_random(tmp_path: Path):
    config = transformers.BertConfig(**{**tiny_models._encoder(), **BYTES_READ})
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(written | {"architectures": ["BertForMaskedLM"]}))
    result = call(tmp_path / "model", "--tokenizer", "bytes", "--texts", 2, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert any("weights are not in" in note and "cls.predictions" in note for note in told["notes"])


def test_what_it_refuses(folder: Path, tmp_path: Path):
    model, text = folder / "model", tmp_path / "text.txt"
    read = (model, "--tokenizer", "bytes")
    refused("did you mean 'current'", model, "-r", "curent")
    refused("neither a folder that exists nor module:function", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("empty has no config.json", tmp_path / "empty")
    refused("has no tokenizer that transformers can load", model)
    refused("--tokenizer: 'nowhere' is neither a folder", model, "--tokenizer", "nowhere")
    refused("No such file", *read, "--text", text)
    text.write_text(" \n\n ")
    refused("is empty: want a text of paragraphs or lines", *read, "--text", text)
    text.write_text("a\n\nb")
    refused("each part of it a single token", *read, "--text", text)
    text.write_bytes(b"\xff\xfe text")
    refused("it is not UTF-8", *read, "--text", text)
    refused("device 'cuda:77' cannot be used", *read, "--device", "cuda:77")
    refused("cannot write in", *read, "--out", text)
    assert not (tmp_path / "compare.json").exists()


def test_the_models_own_precision_is_a_row_of_the_table(folder: Path, tmp_path: Path):
    arguments = (folder / "model", "--tokenizer", "bytes", "--texts", 2, "--out", tmp_path)
    shown = call(*arguments, "-r", "fp32", "-r", "current")
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.stdout.splitlines() if "fp32 " in line[:10] or "bf16 " in line[:10]]
    assert ["+0.000 ± 0.000" in row and "equal" in row for row in rows] == [False, False, True]
    assert "recipe: fp32, which it computes in already" in shown.stdout


def test_bf16_comes_first_and_auto_is_what_is_compared_by_default(folder: Path, tmp_path: Path):
    """One text has no standard error: no ± is printed, JSON has null, and a note says so."""
    arguments = (folder / "model", "--tokenizer", "bytes", "--texts", 1, "--out", tmp_path)
    told = json.loads(call(*arguments, "--json").stdout)
    assert [one["recipe"] for one in told["results"]] == ["bf16", "auto"]
    assert {one["change_error"] for one in told["results"]} == {None}
    assert any("one text has no standard error" in note for note in told["notes"])
    shown = call(*arguments, "-r", "current", "-r", "bf16").stdout
    assert "±" not in shown.replace("no ± is given", "")
    rows = [line.split("│")[1].split()[0] for line in shown.splitlines() if line.startswith("│")]
    assert rows[:3] == ["fp32", "bf16", "current"]


def test_what_recipes_have_read_before_is_said(folder: Path, tmp_path: Path):
    arguments = (folder / "model", "--tokenizer", "bytes", "--texts", 2, "--out", tmp_path, "--json")
    told = json.loads(call(*arguments, "-r", "current", "-r", "delayed", "-r", "auto").stdout)["notes"]
    assert "delayed has read the text first (at most 16 batches), for its predicted scales" in told
    assert "auto has run a few training steps on the text first, without an optimizer" in told
    assert not any(note.startswith("current") for note in told)


def test_screen_and_json_say_what_auto_chose(folder: Path, tmp_path: Path):
    """Of each converted layer three matmuls; a fixed recipe chooses nothing."""
    arguments = (
        folder / "model",
        "--tokenizer",
        "bytes",
        "--texts",
        2,
        "--out",
        tmp_path,
        "-r",
        "current",
        "-r",
        "auto",
    )
    _, current, auto = json.loads(call(*arguments, "--json").stdout)["results"]
    assert current["chosen"] is None
    converted = sum(layer["recipe"] == "auto" for layer in auto["layers"])
    matmuls = auto["chosen"]["matmuls"]
    assert [sum(count.values()) for count in matmuls.values()] == [converted] * 3
    shown = " ".join(call(*arguments).stdout.split())
    cast, count = next(iter(matmuls["forward"].items()))
    assert f"auto chose, by layers: forward {cast} {count}" in shown
    assert f"; {auto['fp8_flops_share']:.0%} of linear FLOPs in FP8" in shown
    assert "current chose" not in shown


def test_why_layers_are_left_alone_is_said_once(folder: Path, tmp_path: Path):
    arguments = (folder / "model", "--tokenizer", "bytes", "--texts", 2, "--out", tmp_path)
    shown = call(*arguments, "-r", "current", "-r", "rowwise")
    assert shown.stdout.count("left alone: lm_head: output head") == 1
    shown = call(*arguments, "-r", "current", "-r", "bf16", "-r", "fp16")
    assert "left alone" in shown.stdout


def test_fp8_weights_are_not_dequantised_and_compared(folder: Path, tmp_path: Path):
    """transformers would do it without an FP8 card, and what is compared would be neither."""
    fe.hf.export(transformers.LlamaForCausalLM.from_pretrained(folder / "model"), tmp_path / "served", "blockwise")
    refused(
        "quantised already (compressed-tensors): want the 16- or 32-bit weights",
        tmp_path / "served",
        "--tokenizer",
        "bytes",
    )


def test_what_it_refuses_of_a_folder(tmp_path: Path, monkeypatch):
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    refused("ViTModel cannot be run on token ids", tmp_path / "vit", "--tokenizer", "bytes", "--out", tmp_path)
    small: Any = tiny_models.llama()
    small.save_pretrained(tmp_path / "small")
    refused("has embeddings for 64: give the tokenizer", tmp_path / "small", "--tokenizer", "bytes", "--out", tmp_path)
    (tmp_path / "small" / "model.safetensors").write_bytes(b"no weights")
    refused("transformers cannot load", tmp_path / "small", "--tokenizer", "bytes", "--out", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("needs transformers: pip install 'fp8engine[hf]'", tmp_path / "vit", "--out", tmp_path)
