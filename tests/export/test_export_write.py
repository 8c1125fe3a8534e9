"""What an export holds: codes and scales as fe.quantize makes them, names and config as other programs read them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from exports import answers_alike, bits, quantization, read_by_transformers, served
from safetensors.torch import load_file
from support import FP8_RECIPES, converted

import fp8engine as fe
from fp8engine.convert.select import is_conv1d
from fp8engine.errors import ConversionError, StateError
from fp8engine.export.hf import export, load
from fp8engine.nn.serving import Served
from fp8engine.numerics.recipe import resolve

EXACT = (fe.rowwise(power_of_2=False), fe.blockwise(power_of_2=False))
COMBINATIONS = [(recipe, layout) for recipe in FP8_RECIPES for layout in ("fp8engine", "compressed-tensors")]
COMBINATIONS += [("current", "fp8"), ("blockwise", "fp8")]
COMBINATIONS += [(recipe, layout) for recipe in EXACT for layout in ("fp8engine", "compressed-tensors")]
COMBINATIONS += [(EXACT[1], "fp8")]
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("recipe", "layout"), COMBINATIONS, ids=lambda each: getattr(each, "name", each))
def test_codes_and_scales_are_those_of_a_cast_and_what_is_left_is_as_it_was(exported, ids, recipe: Any, layout: str):
    asked = resolve(recipe)
    blocks = isinstance(asked.weight.granularity, fe.PerBlock)
    model: Any = (tiny_models.llama_of_blocks() if blocks else tiny_models.llama()).eval()
    folder = exported(recipe, model, layout=layout)
    held, back = load_file(folder / "model.safetensors"), load(folder)
    assert back.training is False
    scale = "weight_scale_inv" if blocks and layout != "compressed-tensors" else "weight_scale"
    layers = served(back)
    assert len(layers) == (7 if blocks else 14)
    weights = {name: model.get_submodule(name).weight.detach() for name in layers}
    if recipe in ("current", "delayed") and layout != "fp8engine":  # what others fuse has one scale
        weights = {name: fused(name, weights) for name in layers}
    cast = fe.Cast(asked.weight.format, asked.weight.granularity, power_of_2=asked.weight.power_of_2)
    for name, layer in layers.items():
        want = fe.quantize(weights[name], cast)
        for codes, scales in ((held[f"{name}.weight"], held[f"{name}.{scale}"]), (layer.weight, layer.scale)):
            assert codes.dtype == torch.float8_e4m3fn
            assert torch.equal(bits(codes), bits(want.data[: layer.out_features]))
            assert scales.dtype == torch.float32
            assert scales.tolist() == want.scale.reshape(scales.shape).tolist()
        assert recipe not in EXACT or layer.numerics.recipe.input == asked.input
    scales = torch.cat([layer.scale.flatten() for layer in layers.values()])
    assert bool((torch.frexp(scales).mantissa > 0.5).any()) != asked.weight.power_of_2
    for name, tensor in model.state_dict().items():
        assert name.removesuffix(".weight") in layers or torch.equal(held[name], tensor), name
    converted(model, recipe)  # delayed: its first forward has no window yet, and measures, as serving does
    assert answers_alike(back, model, ids) == (recipe not in ("current", "delayed") or layout == "fp8engine")


def fused(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer's weight, and below it those of the layers that servers run with it."""
    parent, _, own = name.rpartition(".")
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    others = [other for names in groups if own in names for other in names if other != own]
    return torch.cat([weights[name], *(weights[f"{parent}.{other}"] for other in others)])


def test_the_report_adds_up(tmp_path: Path):
    model: Any = tiny_models.llama(tie_word_embeddings=True).to(torch.bfloat16)
    report = export(model, tmp_path / "out", "rowwise")
    assert report.bytes_before == sum(p.nbytes for p in model.parameters())  # parameters() gives a tie once
    assert report.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report.files == sorted(os.listdir(tmp_path / "out"))
    assert (report.layout, report.recipe, len(report.layers)) == ("compressed-tensors", "rowwise", 14)
    size = {"bytes_before": 2048, "bytes_after": 1024 + 4 * 32}
    assert report.layers[0] == {"name": Q, "shape": [32, 32], "recipe": "rowwise"} | size
    left = {row["name"]: row["reason"] for row in report.left}
    assert "head" in left["lm_head"]
    assert "looked up" in left["model.embed_tokens"]
    assert json.loads(json.dumps(report.to_dict()))["recipe"] == "rowwise"
    assert "14 layers in FP8" in str(report)


def test_block_config_is_what_transformers_and_vllm_name(exported):
    config = quantization(exported("blockwise"))
    assert config.pop("fp8engine")["recipe"]["name"] == "blockwise"
    assert config == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
        "ignored_layers": ["lm_head"],
    }
    theirs: Any = transformers.FineGrainedFP8Config.from_dict(config)
    assert theirs.modules_to_not_convert == ["lm_head"]


@pytest.mark.parametrize(
    ("recipe", "strategies"),
    [("current", ("tensor", "tensor")), ("rowwise", ("channel", "token")), ("blockwise", ("block", "group"))],
)
def test_compressed_config_names_its_strategies(exported, recipe, strategies):
    config = quantization(exported(recipe, layout="compressed-tensors"))
    (group,) = config["config_groups"].values()
    words = (config["quant_method"], config["format"], config["ignore"], group["targets"])
    assert words == ("compressed-tensors", "float-quantized", ["lm_head"], ["Linear"])
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == strategies
    assert (group["weights"]["dynamic"], group["input_activations"]["dynamic"]) == (False, True)
    assert group["weights"].get("block_structure") == ([128, 128] if recipe == "blockwise" else None)


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes * scale, in FP32: what a reader must find (a product of FP32 numbers, rounded once by both)."""
    n, k = codes.shape
    if scale.numel() > 1 and scale.shape != (n, 1):
        scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return codes.float() * scale


def whole_blocks() -> Any:
    """Layers of several whole blocks."""
    size: dict = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**size, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # blocks of very different scales
        model.model.layers[0].mlp.gate_proj.weight[128:256] *= 100
        model.model.layers[0].mlp.gate_proj.weight[:, 128:] /= 30
    return model


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("blockwise", "fp8"), *((r, "compressed-tensors") for r in ("current", "rowwise", "blockwise"))],
)
def test_transformers_reads_the_same_weights(exported, recipe: str, layout: str):
    """Its own FineGrainedFP8 loader, and compressed-tensors, which dequantise without a card: to the bit."""
    folder = exported(recipe, whole_blocks(), layout=layout)
    held, theirs = load_file(folder / "model.safetensors"), read_by_transformers(folder)
    scale = "weight_scale_inv" if layout == "fp8" else "weight_scale"
    names = [name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(names) == 7
    for name in names:
        assert torch.equal(theirs[name], dequantised(held[name], held[name.removesuffix("weight") + scale])), name


def test_conv1d_keeps_its_storage(tmp_path: Path, ids):
    model: Any = tiny_models.gpt2().eval()
    with pytest.raises(ConversionError, match="layout='fp8engine' holds both"):
        export(model, tmp_path / "out")
    export(model, tmp_path / "out", "rowwise", layout="fp8engine")
    held = load_file(tmp_path / "out" / "model.safetensors")
    for name, module in model.named_modules():
        if is_conv1d(module):
            k, n = module.weight.shape
            want = fe.quantize(module.weight.detach().t(), resolve("rowwise").weight)
            assert held[f"{name}.weight"].shape == (k, n)
            assert torch.equal(held[f"{name}.weight"].t().float(), want.data.float())
            assert torch.equal(held[f"{name}.weight_scale"], want.scale)
    back = load(tmp_path / "out")
    assert back.transformer.h[0].mlp.c_fc.weight.t().is_contiguous(), "a call would copy the codes"
    fe.convert(model, "rowwise")
    assert answers_alike(back, model, ids)
    assert "emulated" in next(row for row in fe.inspect(back).layers if row["kind"] == "ServedConv1D")["reason"]


def test_large_models_come_in_shards(exported, ids):
    model: Any = tiny_models.llama(tie_word_embeddings=True).eval()
    folder = exported("rowwise", model, max_shard_size="10KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert "lm_head.weight" not in index, "a tied head is written once"
    back = load(folder)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    fe.convert(model, "rowwise")
    assert answers_alike(back, model, ids)


def test_what_lies_beside_the_model_comes_along(tmp_path: Path):
    source = tmp_path / "source"
    model: Any = tiny_models.llama()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "training_args.bin").write_text("not a tokenizer's")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    report = export(model, tmp_path / "out")
    assert {"tokenizer.json", "generation_config.json"} <= set(report.files)
    assert "training_args.bin" not in report.files
    assert not any("tokenizer" in note for note in report.notes)
    assert load(tmp_path / "out").generation_config.max_new_tokens == 7


def test_rotary_frequencies_that_no_program_will_have(tmp_path: Path, ids):
    model: Any = tiny_models.llama().eval().to(torch.bfloat16)
    report = export(model, tmp_path / "out", "current")
    assert any(note.startswith("model.rotary_emb.inv_freq is in 16 bits") for note in report.notes)
    loaded = load(tmp_path / "out", dtype=torch.bfloat16)
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    report = export(
        transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16), tmp_path / "b", "current"
    )
    assert not any("16 bits (model.to)" in note for note in report.notes)


def test_a_converted_model_brings_its_recipes(tmp_path: Path, ids):
    model: Any = tiny_models.llama().eval()
    fe.convert(model, "rowwise", overrides={"*.down_proj": "bf16", "lm_head": "rowwise"})
    with pytest.raises(ConversionError, match=re.escape("leave out recipe=")):
        export(model, tmp_path / "out", "current")
    report = export(model, tmp_path / "out")
    assert "lm_head" in {row["name"] for row in report.layers}
    assert any("head is FP8" in note for note in report.notes)
    assert {row["reason"] for row in report.left if "down_proj" in row["name"]} == {"asked for bf16"}
    fe.convert(plain := transformers.AutoModelForCausalLM.from_config(model.config), "bf16")
    with pytest.raises(ConversionError, match="nothing to write in FP8"):
        export(plain, tmp_path / "none")
    back = load(tmp_path / "out")
    assert isinstance(back.lm_head, Served)


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8", "fp8engine"])
def test_static_scales_are_the_amax_that_was_seen(tmp_path: Path, ids, layout):
    model: Any = tiny_models.llama().eval()
    fe.convert(model, "current")
    with pytest.raises(StateError, match=rf"{Q} has no input scale yet"):
        export(model, tmp_path / "out", activations="static", layout=layout)
    assert os.listdir(tmp_path) == []
    want = model(ids).logits.detach()
    export(model, tmp_path / "out", activations="static", layout=layout)
    amax = fe.scaling_state(model)[f"{Q}.input"].amax
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held[f"{Q}.input_scale"], (amax / 448).reshape(1))
    back = load(tmp_path / "out")
    with torch.no_grad():
        got = back(ids).logits
    # 1 / (amax / 448) may be an ulp from 448 / amax: a code in 2^20 falls on its other side, one E4M3 step (2^-3) off.
    # Elsewhere q, k, v share a scale, and a code has 31.5 dB (2.7 %) of other noise: a few layers of that.
    assert (got - want).norm() < (1e-3 if layout == "fp8engine" else 0.1) * want.norm()
    slot = fe.inspect(back).layers[0]["input"]
    assert slot["scale"] == pytest.approx(float(amax) / 448, rel=1e-6)
    assert slot["calls"] == 1
    with pytest.raises(ConversionError, match="per row"):
        export(tiny_models.llama(), tmp_path / "rows", "rowwise", activations="static")


def test_blocks_that_do_not_fit_become_rows_whose_scales_are_as_exact(exported):
    layers = served(load(exported(EXACT[1], tiny_models.llama(), layout="compressed-tensors")))
    assert {layer.numerics.recipe.name for layer in layers.values()} == {"rowwise_exact"}
    assert {layer.numerics.recipe.weight for layer in layers.values()} == {EXACT[0].weight}


def test_a_converted_models_own_reasons_are_told(tmp_path: Path):
    """Those of fe.convert, and of fe.inspect: a layer put in later is no layer that was skipped."""
    model: Any = fe.convert(tiny_models.llama(), "current", skip=lambda name, _: name.endswith(("up_proj", "lm_head")))
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(64, 32, bias=False)
    report = export(model, tmp_path / "out", layout="fp8engine")
    left = {row["name"]: row["reason"] for row in report.left if row["kind"] != "Embedding"}
    assert left["model.layers.1.mlp.up_proj"] == left["lm_head"] == "skip() returned True"
    assert left["model.layers.0.mlp.down_proj"].startswith("a new layer stands where fe.convert changed one")
    assert left == {row["name"]: row["reason"] for row in fe.inspect(model).layers if row["recipe"] == "none"}
