"""Mixtures of experts in an export: in 16 bits, under every name by which another program asks for them."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from compressed_tensors.utils.match import match_name
from exports import quantization
from support import converted
from torch import nn

from fp8engine.export.hf import export, load
from fp8engine.nn.serving import Served

FILES = "model.layers.0.block_sparse_moe"  # Mixtral's name in its files, and vLLM's for its module


def test_compressed_tensors_and_vllm_leave_them(tmp_path: Path):
    export(tiny_models.mixtral(), tmp_path / "out", "rowwise")
    left = quantization(tmp_path / "out")["ignore"]
    asked = [f"{FILES}.experts.0.{part}" for part in ("gate_proj", "up_proj", "down_proj")]  # by vLLM's get_moe_method
    for name in [*asked, f"{FILES}.gate", f"language_model.{asked[0]}", "model.layers.0.mlp.experts.3.w1"]:
        assert any(match_name(name, entry) for entry in left), name
    for name in ("model.layers.0.self_attn.q_proj", f"{FILES}.shared", "layers.00.mlp.experts.0"):
        assert not any(match_name(name, entry) for entry in left), name
    load(tmp_path / "out")


def test_experts_that_lie_one_after_the_other_are_left_and_listed(tmp_path: Path):
    """DBRX's: w1, v1 and w2 of `experts.mlp`; vLLM builds one module, `experts`."""
    attention = {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}
    ffn = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    size: Any = {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64}
    model = transformers.DbrxForCausalLM(transformers.DbrxConfig(**size, attn_config=attention, ffn_config=ffn))
    report = export(model, tmp_path / "out", "rowwise")
    assert {"transformer.blocks.0.ffn.experts.mlp.w1"} <= {row["name"] for row in report.left}
    left = quantization(tmp_path / "out")["ignore"]
    for name in ("experts", "experts.0.gate_proj", "experts.mlp", "router.layer"):
        assert any(match_name(f"transformer.blocks.0.ffn.{name}", entry) for entry in left), name
    assert not any(match_name("transformer.blocks.0.norm_attn_norm.attn.Wqkv", entry) for entry in left)
    name = "transformer.blocks.0.ffn.experts.mlp.w2"
    assert torch.equal(load(tmp_path / "out").get_parameter(name), model.get_parameter(name))


def test_vllm_leaves_them_in_the_layout_of_blocks(tmp_path: Path):
    model: Any = tiny_models.mixtral()
    size = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = {**model.config.to_dict(), **size, "head_dim": 128, "num_hidden_layers": 1}
    made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
    assert export(made, tmp_path / "out", "blockwise").layout == "fp8"
    left = quantization(tmp_path / "out")["ignored_layers"]
    assert f"{FILES}.gate" in left
    assert any(f"{FILES}.experts" in entry for entry in left)  # vLLM's is_layer_skipped
    load(tmp_path / "out")


def test_llama_4_whose_experts_compressed_tensors_divides(tmp_path: Path):
    size: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_hidden_layers": 1}
    config = transformers.Llama4TextConfig(**size, intermediate_size_mlp=64, pad_token_id=0)
    report = export(transformers.Llama4ForCausalLM(config), tmp_path / "out", "rowwise")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    theirs, info = loaded
    assert {key.split(".")[4] for key in info["missing_keys"]} == {"experts"}
    assert any("fills them with random numbers" in note for note in report.notes)
    theirs(torch.arange(8)[None])  # decompresses
    for name, layer in load(tmp_path / "out").named_modules():
        if isinstance(layer, nn.Linear):
            weight = layer.dequantize() if isinstance(layer, Served) else layer.weight
            assert torch.equal(theirs.get_submodule(name).weight, weight), name


def test_others_patterns_are_read(tmp_path: Path, damage):
    export(tiny_models.llama(), tmp_path / "out", "rowwise")
    damage(tmp_path / "out", config=lambda written: written.update(ignore=["re:.*lm_head"]))
    assert type(load(tmp_path / "out").lm_head) is nn.Linear


@pytest.mark.parametrize("convert", [False, True])
def test_experts_whose_parameter_is_the_weight_are_left_by_their_own_name(tmp_path: Path, convert: bool):
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "kv_channels": 16, "intermediate_size": 64}
    config = transformers.JetMoeConfig(**size, num_attention_heads=2, num_local_experts=4)  # pyright: ignore
    model: Any = transformers.JetMoeForCausalLM(config).eval()
    report = export(converted(model, "rowwise") if convert else model, tmp_path / "out", None if convert else "rowwise")
    left = {row["name"]: row["reason"] for row in report.left if row["kind"] == "JetMoeParallelExperts"}
    assert len(left) == 4
    assert all("keeps its experts in one 3-D parameter" in reason for reason in left.values())
    ignore = quantization(tmp_path / "out")["ignore"]
    assert left.keys() <= set(ignore)
    assert "model.layers.0.mlp" not in ignore
    read = load(tmp_path / "out").model.layers[0].mlp.input_linear.weight
    assert torch.equal(read, model.model.layers[0].mlp.input_linear.weight)


def test_experts_in_fp8_are_written_in_16_bits(tmp_path: Path):
    model: Any = tiny_models.mixtral()
    report = export(converted(model, "rowwise"), tmp_path / "out")
    left = {row["name"]: row["reason"] for row in report.left}
    assert left["model.layers.0.mlp.experts.down_proj"] == "experts in one 3-D parameter: written in 16 bits"
    assert "model.layers.0.mlp.experts" in quantization(tmp_path / "out")["ignore"]
    plain = load(tmp_path / "out").model.layers[0].mlp.experts
    assert torch.equal(plain.down_proj, model.model.layers[0].mlp.experts.down_proj)
