"""fe.hf.describe: what the probe sees of a model, block by block; and the blocks that FSDP gathers one at a time."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from hf_families import FAMILIES, MORE
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.probe import Mlp
from fp8engine.export import hf
from fp8engine.ops.reference import Norm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Linear layers in no block, by design: heads, poolers, and what fits an embedding's width to the blocks'.
OUTSIDE = {
    "opt-350m": ("model.decoder.project_out", "model.decoder.project_in", "lm_head"),
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "classifier"),
    "albert": ("albert.encoder.embedding_hidden_mapping_in", "albert.pooler", "classifier"),
    "vit": ("classifier",),
    "clip": ("visual_projection", "text_projection"),
    "whisper": ("proj_out",),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_and_every_linear_layer_has_its_place(name: str):
    family = FAMILIES[name]
    told = hf.describe(family.build())
    assert len(told.blocks) == family.blocks
    assert told.outside == OUTSIDE.get(name, ("lm_head",))
    assert all(any(isinstance(what, Norm) for what in told.inside(block).values()) for block in told.blocks)


def test_the_text_of_a_model_with_more_than_one_stack():
    told = str(hf.describe(FAMILIES["t5-v1.1"].build())).replace("DenseReluDense", "D")
    assert told.splitlines() == [
        "encoder.block.0 to encoder.block.1, 2 alike: T5Block",
        "    layer.0.layer_norm, layer.1.layer_norm: rms norm, eps 1e-06",
        "    layer.1.D: wo(gelu_tanh(wi_0(x)) * wi_1(x))",
        "decoder.block.0 to decoder.block.1, 2 alike: T5Block",
        "    layer.0.layer_norm, layer.1.layer_norm, layer.2.layer_norm: rms norm, eps 1e-06",
        "    layer.2.D: wo(gelu_tanh(wi_0(x)) * wi_1(x))",
        "outside blocks: encoder.final_layer_norm, decoder.final_layer_norm: rms norm, eps 1e-06",
        "linear layers outside blocks: lm_head",
    ]


def test_stacks_of_one_class_are_told_apart_and_so_are_blocks_that_differ():
    told = str(hf.describe(FAMILIES["clip"].build()))
    assert "text_model.encoder.layers.0 to text_model.encoder.layers.1, 2 alike" in told
    assert "rms norm, eps 1e-06, multiplies by 1 + weight" in str(hf.describe(MORE["gemma"].build()))
    told = str(hf.describe(FAMILIES["qwen2_moe"].build(mlp_only_layers=[1])))
    assert "model.layers.0: Qwen2MoeDecoderLayer\n    mlp.experts.act_fn: silu\n" in told
    assert "model.layers.1: Qwen2MoeDecoderLayer\n    mlp: down_proj(silu(gate_proj(x)) * up_proj(x))\n" in told


@pytest.mark.parametrize(
    ("mlp", "text"),
    [
        (Mlp("gelu", "fc2", "fc1"), "fc2(gelu(fc1(x)))"),
        (Mlp("glu", "fc2", up_gate="fc1"), "fc2(sigmoid(gate) * up), [up | gate] = fc1(x)"),
        (Mlp("swiglu", "wo", gate_up="wi"), "wo(silu(gate) * up), [gate | up] = wi(x)"),
        (Mlp("clamped_swiglu", "down", "up", "gate"), "down(clamped_swiglu(gate(x), up(x)))"),
        (Mlp("gelu", "down", "up", residual=True), "down(gelu(up(x))) + residual"),
    ],
)
def test_the_text_of_an_mlp(mlp: Mlp, text: str):
    assert str(mlp) == text


def test_converted_and_adapted_models_are_described_too():
    model = FAMILIES["gpt2"].build()
    assert str(hf.describe(model)) == str(hf.describe(converted(model)))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv_proj", "down_proj"])
    adapted = hf.describe(peft.get_peft_model(FAMILIES["phi3"].build(), config))
    assert list(adapted.blocks) == [f"base_model.model.model.layers.{i}" for i in range(2)]
    assert adapted.outside == ("base_model.model.lm_head",)
    assert getattr(adapted.inside("base_model.model.model.layers.0")["mlp"], "kind", "") == "swiglu"


def test_any_model_is_described_and_nothing_else_is():
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2, hidden_dropout=0.0)
    told = hf.describe(transformers.BloomForCausalLM(bloom))
    assert str(told.found["transformer.h.0.mlp"]).endswith(" + residual")
    assert str(hf.describe(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))) == (
        "outside blocks: itself: 2(relu(0(x)))\nlinear layers outside blocks: 0, 2"
    )
    assert str(hf.describe(nn.Identity())) == ""
    other: Any = torch.ones(1)
    with pytest.raises(fe.errors.ConversionError, match=r"describe takes an nn\.Module, not Tensor"):
        hf.describe(other)


MERGER = {"Qwen3VLVisionPatchMerger": 1}


def deeper(name: str) -> nn.Module:
    """A vision tower of three blocks.  Gathered with the root, it would be whole in memory during the whole step."""
    return MORE[name].build(vision_config={**MORE[name].options["vision_config"], "depth": 3})


def with_stacks_beside() -> nn.Module:
    """Of no blocks: their code may read them without a call, which no hook of fully_shard sees."""
    model = MORE["gemma"].build()
    model.tables = nn.ModuleList([nn.Embedding(8, 8), nn.Embedding(8, 8)])
    model.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return model


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda: deeper("qwen2.5-vl"), {"Qwen2_5_VLDecoderLayer": 2, "Qwen2_5_VLVisionBlock": 3}),
        (lambda: deeper("qwen3-vl"), {"Qwen3VLTextDecoderLayer": 2, "Qwen3VLVisionBlock": 3, **MERGER}),
        (lambda: MORE["gpt_oss"].build(), {"GptOssDecoderLayer": 2}),  # experts are part of their block
        (with_stacks_beside, {"GemmaDecoderLayer": 2}),
        (lambda: MORE["gemma"].build(num_hidden_layers=1), {"GemmaDecoderLayer": 1}),
        (lambda: nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(8, 8)])}), {}),
        (lambda: nn.ModuleList(nn.Sequential(nn.Conv1d(2, 2, 1)) for _ in range(2)), {"Sequential": 2}),
    ],
)
def test_what_repeats_is_a_block(make: Callable[[], nn.Module], want: dict[str, int]):
    assert Counter(type(block).__name__ for block in repeated_blocks(make())) == want
