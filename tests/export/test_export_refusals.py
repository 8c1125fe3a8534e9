"""What export refuses, and that nothing is left of an export that fails."""

import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_models
import torch
import transformers
from hf_families import FAMILIES
from torch import nn

import fp8engine as fe
from fp8engine.errors import ConversionError, StateError, UnknownName
from fp8engine.export import headers
from fp8engine.export.hf import export, iter_fp8, load


def refused(told: str, model: nn.Module, folder: Path, *args, error: type[Exception] = ConversionError, **options):
    with pytest.raises(error, match=told):
        export(model, folder, *args, **options)
    assert not folder.exists()
    assert [name for name in os.listdir(folder.parent) if name.startswith(".")] == []


def test_models_that_are_not_to_be_exported(tmp_path: Path):
    out, llama = tmp_path / "out", tiny_models.llama()
    refused("not Sequential", nn.Sequential(nn.Linear(32, 32)), out)
    with torch.device("meta"):
        there = r"model.embed_tokens.weight is on the meta device .*: load the whole model into memory"
        refused(there, tiny_models.llama(), out)
    part: Any = tiny_models.llama()
    fe.convert(part.model.layers[0])
    refused("converted by themselves", part, out)
    e4m3, e5m2, bf16 = fe.Cast(fe.E4M3), fe.Cast(fe.E5M2), fe.Cast(fe.BF16)
    for told, casts in (
        ("name an FP8 recipe", (bf16, bf16, bf16)),
        ("weights of recipe 'custom' are E5M2", (e4m3, e5m2, e4m3)),
        ("inputs of recipe 'custom' are E5M2; 'compressed-tensors' casts them to E4M3", (e5m2, e4m3, e4m3)),
    ):
        refused(told, llama, out, fe.Recipe(**dict(zip(("input", "weight", "grad_output"), casts, strict=True))))
    refused("no scales per row", llama, out, "rowwise", layout="fp8")
    for told, options in {
        "did you mean 'rowwise'": {"recipe": "rowise"},
        "did you mean 'compressed-tensors'": {"layout": "compresed-tensors"},
        "did you mean 'static'": {"activations": "statik"},
    }.items():
        refused(told, llama, out, error=UnknownName, **options)
    refused("nothing to write", llama.to(torch.bfloat16), out, "bf16")
    export(tiny_models.llama(), tmp_path / "first")
    refused("quantised already", load(tmp_path / "first"), out)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_adapters_are_merged_first(tmp_path: Path):
    model: Any = peft.get_peft_model(tiny_models.llama(), peft.LoraConfig(target_modules=["q_proj"]))  # pyright: ignore
    refused("merge_and_unload", model, tmp_path / "out")
    inside = r"model\.layers\.0\.self_attn\.q_proj is an adapter of peft, .*merge_and_unload"
    refused(inside, model.base_model.model, tmp_path / "out")
    with pytest.raises(ConversionError, match=inside):
        iter_fp8(fe.convert(model, "rowwise").base_model.model)
    export(fe.revert(model).merge_and_unload(), tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float):
    model: Any = tiny_models.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = value
    refused(r"layers.1.mlp.up_proj.weight holds 1 values", model, tmp_path / "out", error=StateError)


def test_a_folder_that_is_in_use(tmp_path: Path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConversionError, match="not an empty folder"):
        export(tiny_models.llama(), tmp_path)
    with pytest.raises(ConversionError, match="not an empty folder"):
        export(tiny_models.llama(), tmp_path / "kept")
    assert os.listdir(tmp_path) == ["kept"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    for free in ("empty", "link", Path("deep", "down")):
        export(tiny_models.llama(), tmp_path / free)
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "linked").config.model_type == "llama"
    assert load(tmp_path / "deep" / "down").config.model_type == "llama"


@pytest.mark.parametrize("where", ["save_pretrained", "read", "replace"])
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    def fail(*_, **__):
        raise OSError("no space left on device")

    model: Any = tiny_models.llama()
    target = {"save_pretrained": model, "read": headers, "replace": os}[where]
    with monkeypatch.context() as patch:
        patch.setattr(target, where, fail)
        with pytest.raises(OSError, match="no space left"):
            export(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []
    export(model, tmp_path / "out")


def test_the_folder_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    read = headers.read
    monkeypatch.setattr(headers, "read", lambda files: seen.append((tmp_path / "out").exists()) or read(files))
    export(tiny_models.llama(), tmp_path / "out")
    assert seen == [False]


def test_a_tied_head_is_left_even_if_asked_for(tmp_path: Path):
    model: Any = tiny_models.llama(tie_word_embeddings=True)
    fe.convert(model, "current", overrides={"lm_head": "current"})
    report = export(model, tmp_path / "out")
    assert "shared with another module" in next(row["reason"] for row in report.left if row["name"] == "lm_head")
    back = load(tmp_path / "out")
    assert back.lm_head.weight is back.model.embed_tokens.weight


def test_codes_of_a_layer_that_the_config_ties_are_refused(tmp_path: Path):
    model = fe.convert(tiny_models.llama(), "current", overrides={"lm_head": "current"})
    export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(
        StateError, match=r"lm_head\.weight is FP8, and LlamaForCausalLM ties lm_head to a layer that is"
    ):
        load(tmp_path / "out")


def test_what_transformers_keeps_in_fp32_is_left(tmp_path: Path):
    model = FAMILIES["t5"].build(num_layers=1)
    report = export(model, tmp_path / "out", "rowwise")
    kept = {row["name"] for row in report.left if "_keep_in_fp32_modules" in row["reason"]}
    assert kept == {"encoder.block.0.layer.1.DenseReluDense.wo", "decoder.block.0.layer.2.DenseReluDense.wo"}
    ids = tiny_models.tokens()
    back = load(tmp_path / "out")
    fe.convert(model.eval(), "rowwise", overrides={"*.wo": "fp32"})
    with torch.no_grad():
        want, got = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (model, back))
    assert torch.equal(got, want)


class Renamed(transformers.LlamaForCausalLM):
    """A head whose name ends another layer's."""

    def __init__(self, config):
        super().__init__(config)
        self.proj = nn.Linear(128, 128)


def test_a_name_that_transformers_would_misread(tmp_path: Path):
    config: Any = tiny_models.llama_of_blocks().config
    model = Renamed(config)
    fe.convert(model, "blockwise", overrides={"proj": "bf16"})
    refused("'proj' is left in 16 bits, and transformers would take that name for", model, tmp_path / "out")
    assert export(model, tmp_path / "out", layout="fp8engine").layers
