"""The blocks of a model that FSDP gathers one at a time."""

from collections import Counter
from dataclasses import replace

import pytest
from hf_families import MORE
from torch import nn

from fp8engine.convert.blocks import repeated_blocks


def kinds(model: nn.Module) -> dict[str, int]:
    return dict(Counter(type(block).__name__ for block in repeated_blocks(model)))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("qwen2.5-vl", {"Qwen2_5_VLDecoderLayer": 2, "Qwen2_5_VLVisionBlock": 3}),
        ("qwen3-vl", {"Qwen3VLTextDecoderLayer": 2, "Qwen3VLVisionBlock": 3, "Qwen3VLVisionPatchMerger": 1}),
    ],
)
def test_vision_blocks_are_blocks_beside_those_of_text(name: str, want: dict[str, int]):
    """Gathered with the root, a vision tower would be whole in memory during the whole step."""
    family = MORE[name]
    deeper = {**family.options, "vision_config": {**family.options["vision_config"], "depth": 3}}
    assert kinds(replace(family, options=deeper).build()) == want


def test_experts_are_part_of_their_block():
    assert kinds(MORE["gpt_oss"].build()) == {"GptOssDecoderLayer": 2}


def test_stacks_beside_without_linear_layers_are_no_blocks():
    """Their code may read them without a call, which no hook of fully_shard sees."""
    model = MORE["gemma"].build()
    model.tables = nn.ModuleList([nn.Embedding(8, 8), nn.Embedding(8, 8)])
    model.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    assert kinds(model) == {"GemmaDecoderLayer": 2}


def test_a_model_of_one_block_has_one_and_a_list_of_one_layer_is_none():
    assert kinds(MORE["gemma"].build(num_hidden_layers=1)) == {"GemmaDecoderLayer": 1}
    assert kinds(nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(8, 8)])})) == {}


def test_without_linear_layers_any_stack_will_do():
    assert kinds(nn.ModuleList([nn.Sequential(nn.Conv1d(2, 2, 1)), nn.Sequential(nn.Conv1d(2, 2, 1))])) == {
        "Sequential": 2
    }
