"""Which layers fe.convert leaves alone as output heads: a name alone says so only outside of blocks that repeat."""

from types import SimpleNamespace

import pytest
import torch
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.convert.select import decide


class Single(nn.Module):
    """Flux's single block: attention and MLP side by side, both read by `proj_out`."""

    def __init__(self, width: int):
        super().__init__()
        self.to_qkv = nn.Linear(width, width)
        self.proj_mlp = nn.Linear(width, 4 * width)
        self.proj_out = nn.Linear(5 * width, width)

    def forward(self, x):
        return x + self.proj_out(torch.cat([self.to_qkv(x), self.proj_mlp(x).relu()], -1))


class Flux(nn.Module):
    """Single blocks between two projections; the model's last layer has the name that each block's last layer has."""

    def __init__(self, blocks: nn.Module, width: int = 16):
        super().__init__()
        self.x_embedder = nn.Linear(8, width)
        self.single_transformer_blocks = blocks
        self.proj_out = nn.Linear(width, 8)

    def forward(self, x):
        x = self.x_embedder(x)
        for block in self.single_transformer_blocks.children():
            x = block(x)
        return self.proj_out(x)


def heads(model: nn.Module) -> set[str]:
    """Names of the layers that fe.convert leaves alone as heads."""
    return {decision.name for decision in decide(model, "current") if decision.reason.startswith("output head")}


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_of_a_block_that_repeats_is_no_head_by_its_name(count: int):
    model = Flux(nn.ModuleList(Single(16) for _ in range(count)))
    assert heads(model) == {"proj_out"}
    converted(model)(torch.randn(4, 8)).sum().backward()
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert all(rows[f"single_transformer_blocks.{i}.proj_out"]["ran"] for i in range(count))
    assert [name for name, row in rows.items() if row["recipe"] == "none"] == ["proj_out"]


def test_blocks_in_a_sequential_repeat_too_and_other_parts_of_one_do_not():
    assert heads(Flux(nn.Sequential(Single(16), Single(16)))) == {"proj_out"}
    assert heads(nn.Sequential(nn.Linear(8, 16), Single(16))) == {"1.proj_out"}


def test_blocks_within_blocks():
    def stage(depth: int) -> nn.Module:
        return nn.ModuleDict({"attentions": nn.ModuleList(Single(16) for _ in range(depth)), "score": nn.Linear(16, 4)})

    model = nn.ModuleDict({"down_blocks": nn.ModuleList([stage(1), stage(2)]), "head": nn.Linear(16, 4)})
    assert heads(model) == {"head"}


class Tied(nn.Module):
    """Blocks that repeat; each has a layer tied to an embedding, and one that its own method calls its output."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed.weight
        self.classifier = nn.Linear(16, 4)

    def get_output_embeddings(self):
        return self.classifier


def test_what_is_a_head_by_more_than_its_name_stays_one_in_a_block_that_repeats():
    model = nn.ModuleList([Tied(), Tied()])
    assert heads(model) == {f"{i}.{name}" for i in (0, 1) for name in ("lm_head", "classifier")}


def test_a_head_by_name_in_a_block_that_repeats_as_wide_as_the_vocabulary():
    exits = nn.ModuleList(nn.ModuleDict({"body": nn.Linear(16, 16), "lm_head": nn.Linear(16, 40)}) for _ in range(2))
    model = nn.ModuleDict({"exits": exits})
    assert heads(model) == set()
    model.config = SimpleNamespace(vocab_size=40)  # type: ignore[assignment]
    assert heads(model) == {"exits.0.lm_head", "exits.1.lm_head"}


def test_a_head_made_of_layers_or_blocks_that_repeat():
    """VGG's classifier, and a head of two blocks: the last layer within is the head, and it alone."""
    model = nn.ModuleDict({"classifier": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))})
    assert heads(model) == {"classifier.2"}
    named = nn.Sequential()
    named.add_module("body", nn.Linear(8, 8))
    named.add_module("head", nn.Linear(8, 4))
    assert heads(named) == {"head"}
    model = nn.ModuleDict({"head": nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))})
    assert heads(model) == {"head.1.0"}


class Encoder(nn.Module):
    """Blocks with a layer as wide as the classes, heads in a list, and layers around them."""

    def __init__(self):
        super().__init__()
        self.embedder = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"narrow": nn.Linear(16, 4), "wide": nn.Linear(16, 16)}) for _ in "ab"
        )
        self.final = nn.Linear(16, 4)
        self.lm_heads = nn.ModuleList(nn.Linear(16, 40) for _ in range(2))
        self.config = SimpleNamespace(num_labels=4)
        self.lm_heads.config = SimpleNamespace(vocab_size=40)  # type: ignore[assignment]


def test_a_layer_as_wide_as_the_classes_or_the_vocabulary_is_a_head_whatever_its_name():
    """XLM's `sequence_summary.summary`, Perceiver's `final_layer`; MusicGen's lm_heads, by the config of a part."""
    assert heads(Encoder()) == {"final", "lm_heads.0", "lm_heads.1"}


def test_a_width_that_a_layer_reads_is_no_sign_of_a_head():
    """LASR's subsampler writes 512 features for blocks that read 512, and its config has 512 tokens."""
    model = Encoder()
    model.config = SimpleNamespace(num_labels=16)
    assert heads(model) == {"lm_heads.0", "lm_heads.1"}
