"""The blocks of a model that FSDP gathers one at a time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hf_families import MORE
from torch import nn

from fp8engine.convert.blocks import repeated_blocks


def deeper(name: str) -> nn.Module:
    """A vision tower of three blocks.  Gathered with the root, it would be whole in memory during the whole step."""
    family = MORE[name]
    options = {**family.options, "vision_config": {**family.options["vision_config"], "depth": 3}}
    return replace(family, options=options).build()


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
        (
            lambda: deeper("qwen3-vl"),
            {"Qwen3VLTextDecoderLayer": 2, "Qwen3VLVisionBlock": 3, "Qwen3VLVisionPatchMerger": 1},
        ),
        (lambda: MORE["gpt_oss"].build(), {"GptOssDecoderLayer": 2}),  # experts are part of their block
        (with_stacks_beside, {"GemmaDecoderLayer": 2}),
        (lambda: MORE["gemma"].build(num_hidden_layers=1), {"GemmaDecoderLayer": 1}),
        (lambda: nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(8, 8)])}), {}),
        (lambda: nn.ModuleList(nn.Sequential(nn.Conv1d(2, 2, 1)) for _ in range(2)), {"Sequential": 2}),
    ],
)
def test_what_repeats_is_a_block(make: Callable[[], nn.Module], want: dict[str, int]):
    assert Counter(type(block).__name__ for block in repeated_blocks(make())) == want
