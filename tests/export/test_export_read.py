"""Damaged, cut off, mismatched exports: a clear error that names the place, and no model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from exports import answers_alike

import fp8engine as fe
from fp8engine.errors import ConversionError, Fp8EngineError, StateError, UnknownName
from fp8engine.export import headers
from fp8engine.export.hf import Fp8EngineConfig, export, load
from fp8engine.export.layout import parse

Q = "model.layers.0.self_attn.q_proj"
W, S = f"{Q}.weight", f"{Q}.weight_scale"


def refuses(folder: Path, told: str, error: type[Fp8EngineError] = StateError) -> None:
    """By `load`; and by transformers under our name, where the layout is ours (its own loaders are not ours)."""
    with pytest.raises(error, match=told):
        load(folder)
    method = json.loads((folder / "config.json").read_text()).get("quantization_config", {}).get("quant_method")
    if method == "fp8engine":
        assert Fp8EngineConfig, "its import has registered it"
        with pytest.raises((error, OSError, ValueError)):
            transformers.AutoModelForCausalLM.from_pretrained(folder)


TENSORS = {
    "a layer without its scale": (lambda t: t.pop(S), rf"{W} in model.safetensors is F8_E4M3 without its weight_scale"),
    "the scale under the other name": (
        lambda t: t.update({f"{Q}.weight_scale_inv": t.pop(S)}),
        r"without its weight_scale \(there is a weight_scale_inv\)",
    ),
    "a scale without its layer": (lambda t: t.pop(W), rf"{S} in model.safetensors has no F8_E4M3 weight"),
    "a scale of another shape": (lambda t: t.update({S: torch.ones(32, 1)}), rf"{S} .* is \[32, 1\]; .* has \[1\]"),
    "bytes for a number": (lambda t: t.update({S: torch.ones(1, dtype=torch.uint8)}), f"{S} .* is U8; want F32"),
    "a scale of another dtype": (lambda t: t.update({S: torch.ones(1, dtype=torch.int32)}), "is I32; want F32"),
    "a scale that is NaN": (lambda t: t[S].fill_(float("nan")), rf"{Q}: weight_scale holds NaN, Inf or a negative"),
    "a scale that is Inf": (lambda t: t[S].fill_(float("inf")), rf"{Q}: weight_scale holds NaN, Inf or a negative"),
    "a negative scale": (lambda t: t[S].fill_(-1.0), rf"{Q}: weight_scale holds NaN, Inf or a negative"),
    "a code that is NaN": (lambda t: t[W].view(torch.uint8)[5, 5].fill_(0xFF), f"{Q}: weight holds NaN codes"),
    "a weight in 16 bits": (
        lambda t: (t.pop(S), t.update({W: t[W].to(torch.bfloat16)})),
        rf"{W} in model.safetensors is BF16 without a scale",
    ),
    "a weight in E5M2": (lambda t: t.update({W: t[W].float().to(torch.float8_e5m2)}), f"{W} .* is F8_E5M2"),
    "a weight of another shape": (lambda t: t.update({W: t[W][:16].clone()}), rf"{W} is \[16, 32\]; .* has \[32, 32\]"),
    "a weight of three dimensions": (lambda t: t.update({W: t[W][None].clone()}), "not a layer's 2-D weight"),
    "an embedding in FP8": (
        lambda t: t.update(
            {
                "model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn),
                "model.embed_tokens.weight_scale": torch.ones(1),
            }
        ),
        "model.embed_tokens.weight is FP8, and is no linear layer",
    ),
    "the head in FP8, and listed as not": (
        lambda t: t.update({"lm_head.weight": t[W].repeat(2, 1), "lm_head.weight_scale": torch.ones(1)}),
        "lm_head.weight is F8_E4M3, and config.json lists it",
    ),
    "a norm that is not there": (lambda t: t.pop("model.norm.weight"), "1 tensors .* model.norm.weight the first"),
    "no FP8 at all": (lambda t: [t.pop(k) for k in list(t) if "proj" in k], "hold no F8_E4M3 weight"),
}


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8engine"])
def test_tensors_that_do_not_fit(exported, damage, what, layout):
    edit, told = TENSORS[what]
    folder = exported(layout=layout)
    damage(folder, tensors=edit)
    with pytest.raises(StateError, match=told):
        load(folder)
    if (
        layout == "fp8engine" and what != "a norm that is not there"
    ):  # transformers makes a missing norm up, and says so
        with pytest.raises(StateError, match=told):
            transformers.AutoModelForCausalLM.from_pretrained(folder)


CONFIGS = {
    "another method": ({"quant_method": "gptq"}, UnknownName, "quant_method of a checkpoint 'gptq'"),
    "no method": ({"quant_method": None}, UnknownName, "quant_method of a checkpoint None"),
    "no scheme": ({"activation_scheme": "sometimes"}, StateError, "activation_scheme is 'sometimes'"),
    "a block that is none": ({"weight_block_size": [128]}, StateError, r"weight_block_size is \[128\]"),
    "a block of words": ({"weight_block_size": ["128", "128"]}, StateError, "weight_block_size is"),
    "another block": ({"weight_block_size": [64, 64]}, StateError, "contradicts itself: weights per 64x64 block"),
    "scales as exponents": ({"scale_fmt": "ue8m0"}, StateError, "scale_fmt is 'ue8m0'"),
    "a list that is none": ({"modules_to_not_convert": "lm_head"}, StateError, "the list of modules left alone"),
    "static inputs by block": ({"activation_scheme": "static"}, StateError, "static activations beside inputs"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_does_not_fit(exported, damage, what):
    change, error, told = CONFIGS[what]
    folder = exported("blockwise")
    damage(folder, config=lambda written: written.update(change))
    refuses(folder, told, error)


COMPRESSED = {
    "two groups": (lambda c: c["config_groups"].update(group_1={}), "config_groups is"),
    "another format": (lambda c: c.update(format="pack-quantized"), "format is 'pack-quantized'"),
    "four bits": (lambda c: _weights(c).update(num_bits=4), "weights of config_groups is"),
    "integers": (lambda c: _weights(c).update(type="int"), "weights of config_groups is"),
    "other layers": (lambda c: c["config_groups"]["group_0"].update(targets=["re:.*q"]), "a group of config_groups"),
    "groups along K": (lambda c: _weights(c).update(strategy="group"), "strategy of the weights is 'group'"),
    "a pattern that is none": (
        lambda c: c.update(ignore=["re:("]),
        "a regular expression among the modules left alone",
    ),
    "16-bit inputs": (lambda c: c["config_groups"]["group_0"].update(input_activations=None), "input_activations of"),
    "rows for tensors": (lambda c: _weights(c).update(strategy="channel"), "contradicts itself: weights per row"),
    "static without scales": (
        lambda c: c["config_groups"]["group_0"]["input_activations"].update(dynamic=False),
        "without its input_scale",
    ),
}


def _weights(config: dict) -> dict:
    return config["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize("what", COMPRESSED)
def test_a_compressed_config_that_does_not_fit(exported, damage, what):
    edit, told = COMPRESSED[what]
    folder = exported()
    damage(folder, config=edit)
    refuses(folder, told)


def test_files_that_are_cut_off_or_missing(exported, tmp_path: Path):
    folder = exported(max_shard_size="20KB", layout="fp8engine")
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 100):
        shards[1].write_bytes(broken)
        refuses(folder, f"{re.escape(shards[1].name)} cannot be read")
    shards[1].unlink()
    refuses(folder, f"1 of {len(shards)} files are missing, {re.escape(shards[1].name)}")
    shards[1].write_bytes(whole)
    assert load(folder)
    index = folder / headers.INDEX
    index.write_text("{")
    refuses(folder, "index.json is damaged")
    index.unlink()
    refuses(folder, "holds neither model.safetensors nor")


def test_folders_that_are_none(exported, tmp_path: Path):
    with pytest.raises(ConversionError, match=r"has no config\.json"):
        load(tmp_path / "nowhere")
    folder = exported()
    config, file = json.loads((folder / "config.json").read_text()), folder / "config.json"
    for text, error, told in (
        ("{", StateError, "is not JSON"),
        ({"quantization_config": None}, StateError, "has no quantization_config: these weights are not FP8"),
        ({"architectures": ["Nobody"]}, ConversionError, "pass kind="),
    ):
        file.write_text(text if isinstance(text, str) else json.dumps(config | text))
        with pytest.raises(error, match=told):
            load(folder)
    assert load(folder, transformers.AutoModelForCausalLM)
    for change, told in (
        ({"hidden_size": 64}, "of this config has"),
        ({"vocab_size": 7}, r"lm_head.weight is \[\d+, \d+\] in the files and \[7, \d+\] in Llama"),
        ({"num_hidden_layers": 3}, "tensors of LlamaForCausalLM are not in the files"),
        (
            {"num_hidden_layers": 1},
            r"16 tensors of the files are none of Llama\S+ under this .*, model.layers.1",
        ),
    ):
        file.write_text(json.dumps(config | change))
        refuses(folder, told)


def test_what_others_write_is_read(exported, damage, ids):
    """DeepSeek's and Qwen's checkpoints: no recipe of ours, 16-bit scales, a scalar's shape."""
    folder = exported("blockwise")
    damage(folder, config=lambda written: [written.pop(key) for key in ("fp8engine", "ignored_layers")])
    before = load(folder)
    assert parse({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}).recipe
    narrow = lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items() if k.endswith("_inv")})  # noqa: E731
    damage(folder, tensors=narrow)
    back = load(folder)
    assert back.model.layers[0].mlp.up_proj.weight_scale_inv.dtype == torch.float32
    assert answers_alike(back, before, ids), "powers of two: BF16 holds them"


def test_scales_without_dimensions(tmp_path: Path, damage, ids):
    model: Any = tiny_models.llama().eval()
    export(model, tmp_path / "out", "current", layout="fp8")
    want = load(tmp_path / "out")
    damage(tmp_path / "out", tensors=lambda t: t.update({k: v.reshape(()) for k, v in t.items() if "scale" in k}))
    assert answers_alike(load(tmp_path / "out"), want, ids)


def test_a_scale_of_the_transposed_weight(tmp_path: Path, damage):
    """Our layout holds Conv1D's [K, N] too: a Linear's scales must still be the Linear's."""
    export(tiny_models.llama(), tmp_path / "out", "rowwise", layout="fp8engine")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    damage(tmp_path / "out", tensors=lambda t: t.update({name: torch.ones(32, 1)}))
    with pytest.raises(StateError, match=rf"{name} in model.safetensors is \[32, 1\]; this layer has \[64, 1\]"):
        load(tmp_path / "out")


def test_a_part_of_the_model_is_read(tmp_path: Path, ids, damage):
    """The encoder alone of a classifier's checkpoint, whose names have a prefix there."""
    model: Any = tiny_models.bert().eval()
    export(model, tmp_path / "out", "rowwise")
    back = load(tmp_path / "out", transformers.AutoModel)
    fe.convert(model, "rowwise")
    with torch.no_grad():
        assert torch.equal(back(ids).pooler_output, model.bert(ids).pooler_output)
    damage(tmp_path / "out", tensors=lambda t: [t.pop(key) for key in list(t) if "classifier" in key])
    with pytest.raises(StateError, match="2 tensors of BertForTokenClassification"):
        load(tmp_path / "out", transformers.BertForTokenClassification)
