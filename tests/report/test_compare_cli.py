"""`fp8engine compare` as a person and as a script use it: what it prints and writes agrees, and what it refuses."""

import functools
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
from command_line import refused, shown, told

import fp8engine as fe
from fp8engine.cli.models import load_pretrained
from fp8engine.report.compare import compare_recipes
from fp8engine.report.compare.batches import BYTES, batches

BYTES_READ: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": 128}
LINES = [f"Sentence {number} of {100 - number} has words in it." for number in range(12)]


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


@pytest.fixture
def compare(folder: Path, tmp_path: Path) -> tuple:
    """The words that compare the folder's model on a short text and write into an empty folder."""
    return "compare", folder / "model", "--tokenizer", "bytes", "--out", tmp_path, "--texts"


def test_screen_json_and_files_tell_the_same(compare: tuple, folder: Path, tmp_path: Path):
    arguments = (*compare, 10, "--text", folder / "text.txt", "--length", 30)
    found = told(*arguments, "-r", "current", "-r", "rowwise", "-r", "current")
    assert found["files"] == [str(tmp_path / name) for name in ("compare.json", "compare.png")]
    assert json.loads((tmp_path / "compare.json").read_text()) == {k: v for k, v in found.items() if k != "files"}
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert [one["recipe"] for one in found["results"]] == ["bf16", "current", "rowwise"]
    assert (found["model"], found["dtype"], found["texts"]) == ("LlamaForCausalLM", "float32", 10)
    chosen = [LINES[index * 12 // 10] for index in range(10)]  # ten of the twelve lines, evenly spaced
    assert found["notes"] == [
        f"{sum(len(line) > 30 for line in chosen)} of 10 texts were cut to 30 tokens",
        "± is one standard error over the texts; a change of less than two may be chance",
    ]

    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    ids = [BYTES.encode(line)[:30] for line in chosen]
    want = compare_recipes(model, batches(model, ids, BYTES), ["current"])
    assert found["loss"] == want.loss
    result, agrees = found["results"][1], want.results[0].top1
    assert agrees is not None
    assert (result["loss"], result["top1"], result["top1_error"]) == (want.results[0].loss, *agrees)

    text = shown(*arguments, "-r", "current", "-r", "fp32")
    change = f"{result['change_percent']:+.3f} ± {result['change_percent_error']:.3f}"
    words = (
        "current (emulated)",
        f"{want.loss:.4f}",
        f"{100 * agrees.value:.2f}",
        change,
        "texts were cut",
        "compare.png",
    )
    assert [part for part in words if part not in text] == []
    assert text.count("left alone: lm_head: output head") == 1
    rows = {line.split("│")[1].split()[0]: line for line in text.splitlines() if line.startswith("│")}
    assert list(rows)[:3] == ["fp32", "bf16", "current"]
    assert "+0.000 ± 0.000" in rows["fp32"], "the model's own precision is a row of the table"
    assert "recipe: fp32, which it computes in already" in text


def test_a_function_is_the_folder_and_the_manual_is_the_text(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "compared_models", raising=False)
    arguments = ("--tokenizer", "bytes", "--texts", 4, "--out", tmp_path)
    one, other = (told("compare", target, *arguments) for target in ("model", "compared_models:model"))
    assert one.pop("target") != other.pop("target")
    assert one == other
    assert one["text"].startswith("Python's manual")
    assert one["loss"] > 5  # random weights: ln 256 = 5.5
    want = "a function brings no tokenizer: give --tokenizer FOLDER, or bytes"
    refused(want, "compare", "compared_models:model", alone=False)


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


def test_without_matplotlib_it_says_that_there_is_no_picture(compare: tuple, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "no picture: matplotlib is not installed (pip install 'fp8engine[report]')" in shown(*compare, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]


def test_weights_that_are_not_in_the_folder_are_said_to_be_random(tmp_path: Path):
    config = transformers.BertConfig(**{**tiny_models._encoder(), **BYTES_READ})
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(written | {"architectures": ["BertForMaskedLM"]}))
    notes = told("compare", tmp_path / "model", "--tokenizer", "bytes", "--texts", 2, "--out", tmp_path)["notes"]
    assert any("weights are not in" in note and "cls.predictions" in note for note in notes)


def test_what_it_refuses(folder: Path, tmp_path: Path):
    model, text = folder / "model", tmp_path / "text.txt"
    refuses = functools.partial(refused, alone=False)
    read = ("compare", model, "--tokenizer", "bytes")
    (tmp_path / "empty").mkdir()
    refuses("did you mean 'current'", "compare", model, "-r", "curent")
    refuses("neither a folder that exists nor module:function", "compare", tmp_path / "nowhere")
    refuses("empty has no config.json", "compare", tmp_path / "empty")
    refuses("has no tokenizer that transformers can load", "compare", model)
    refuses("--tokenizer: 'nowhere' is neither a folder", "compare", model, "--tokenizer", "nowhere")
    refuses("No such file", *read, "--text", text)
    for content, word in (
        (b" \n\n ", "is empty: want a text of paragraphs or lines"),
        (b"a\n\nb", "each part of it a single token"),
        (b"\xff\xfe text", "it is not UTF-8"),
    ):
        text.write_bytes(content)
        refuses(word, *read, "--text", text)
    refuses("device 'cuda:77' cannot be used", *read, "--device", "cuda:77")
    refuses("cannot write in", *read, "--out", text)
    assert not (tmp_path / "compare.json").exists()


def test_what_it_refuses_of_a_folder(folder: Path, tmp_path: Path, monkeypatch):
    """Of FP8 weights transformers would make 16 bits without an FP8 card: what is compared would be neither."""
    refuses = functools.partial(refused, alone=False)
    options = ("--tokenizer", "bytes", "--out", tmp_path)
    fe.hf.export(transformers.LlamaForCausalLM.from_pretrained(folder / "model"), tmp_path / "served", "blockwise")
    want = "quantised already (compressed-tensors): want the 16- or 32-bit weights"
    refuses(want, "compare", tmp_path / "served", *options)
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    refuses("ViTModel cannot be run on token ids", "compare", tmp_path / "vit", *options)
    small: Any = tiny_models.llama()
    small.save_pretrained(tmp_path / "small")
    refuses("has embeddings for 64: give the tokenizer", "compare", tmp_path / "small", *options)
    (tmp_path / "small" / "model.safetensors").write_bytes(b"no weights")
    refuses("transformers cannot load", "compare", tmp_path / "small", *options)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refuses("needs transformers: pip install 'fp8engine[hf]'", "compare", tmp_path / "vit", "--out", tmp_path)


def test_bf16_comes_first_and_auto_is_what_is_compared_by_default(compare: tuple):
    """One text has no standard error: no ± is printed, JSON has null, and a note says so."""
    found = told(*compare, 1)
    assert [one["recipe"] for one in found["results"]] == ["bf16", "auto"]
    assert {one["change_error"] for one in found["results"]} == {None}
    assert any("one text has no standard error" in note for note in found["notes"])
    assert "±" not in shown(*compare, 1, "-r", "current").replace("no ± is given", "")


def test_screen_and_json_say_what_auto_chose_and_what_recipes_have_read_before(compare: tuple):
    """Of each converted layer three matmuls; a fixed recipe chooses nothing."""
    arguments = (*compare, 2, "-r", "current", "-r", "delayed", "-r", "auto")
    found = told(*arguments)
    _, current, _, auto = found["results"]
    assert current["chosen"] is None
    converted = sum(layer["recipe"] == "auto" for layer in auto["layers"])
    matmuls = auto["chosen"]["matmuls"]
    assert [sum(count.values()) for count in matmuls.values()] == [converted] * 3
    text = " ".join(shown(*arguments).split())
    cast, count = next(iter(matmuls["forward"].items()))
    assert f"auto chose, by layers: forward {cast} {count}" in text
    assert f"; {auto['fp8_flops_share']:.0%} of linear FLOPs in FP8" in text
    assert "current chose" not in text
    assert "delayed has read the text first (at most 16 batches), for its predicted scales" in found["notes"]
    assert "auto has run a few training steps on the text first, without an optimizer" in found["notes"]
    assert not any(note.startswith("current") for note in found["notes"])
