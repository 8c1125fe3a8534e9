"""Which layers fe.convert leaves alone as output heads and routers; a head's name says so only outside of blocks."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.convert.select import decide


class Single(nn.Module):
    """Flux's single block: attention and MLP side by side, both read by `proj_out`."""

    def __init__(self, width: int = 16):
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


class Tied(nn.Module):
    """A block with a layer tied to an embedding, and one that its own method calls its output."""

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head, self.classifier = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False), linear(4)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.classifier


def linear(features: int = 16) -> nn.Linear:
    return nn.Linear(16, features)


def parts(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def twice(make: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(2))


def named(*names: str) -> nn.Sequential:
    model = nn.Sequential()
    for name in names:
        model.add_module(name, linear())
    return model


def stage(depth: int) -> nn.Module:
    return parts(attentions=nn.ModuleList(Single() for _ in range(depth)), score=linear(4))


def exits(**config: int) -> nn.Module:
    """Two blocks, each with a head's name for a layer of 40 columns."""
    model = parts(exits=twice(lambda: parts(body=linear(), lm_head=linear(40))))
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return model


def encoder(labels: int) -> nn.Module:
    """Blocks with a layer of 4 columns, a last layer of as many, and heads in a list with a config of their own."""
    blocks, heads = twice(lambda: parts(narrow=linear(4), wide=linear())), twice(lambda: linear(40))
    heads.config = SimpleNamespace(vocab_size=40)  # type: ignore[assignment]
    model = parts(embedder=nn.Linear(8, 16), blocks=blocks, final=linear(4), lm_heads=heads)
    model.config = SimpleNamespace(num_labels=labels)  # type: ignore[assignment]
    return model


HEADS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a sequence of blocks": (lambda: Flux(nn.Sequential(Single(), Single())), {"proj_out"}),
    "a sequence of other parts": (lambda: nn.Sequential(linear(), Single()), {"1.proj_out"}),
    "blocks within blocks": (
        lambda: parts(down_blocks=nn.ModuleList([stage(1), stage(2)]), head=linear(4)),
        {"head"},
    ),
    "in a block that repeats, by more than its name": (
        lambda: twice(Tied),
        {f"{i}.{name}" for i in (0, 1) for name in ("lm_head", "classifier")},
    ),
    "in a block that repeats, by its name": (exits, set()),
    "there as wide as the vocabulary": (lambda: exits(vocab_size=40), {"exits.0.lm_head", "exits.1.lm_head"}),
    "VGG's classifier": (lambda: parts(classifier=nn.Sequential(linear(), nn.ReLU(), linear())), {"classifier.2"}),
    "a head in a Sequential": (lambda: named("body", "head"), {"head"}),
    "a head of two blocks": (
        lambda: parts(head=nn.Sequential(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(2)))),
        {"head.1.0"},
    ),
    # XLM's `sequence_summary.summary`, Perceiver's `final_layer`; MusicGen's lm_heads, by the config of a part.
    "as wide as the classes or the vocabulary": (lambda: encoder(4), {"final", "lm_heads.0", "lm_heads.1"}),
    # LASR's subsampler writes 512 features for blocks that read 512, and its config has 512 tokens.
    "as wide as the classes, and read": (lambda: encoder(16), {"lm_heads.0", "lm_heads.1"}),
}


def left(model: nn.Module, why: str) -> set[str]:
    return {decision.name for decision in decide(model, "current") if decision.reason.startswith(why)}


@pytest.mark.parametrize("case", HEADS)
def test_what_is_a_head(case: str):
    make, want = HEADS[case]
    assert left(make(), "output head") == want


@pytest.mark.parametrize("count", [1, 3])
def test_a_layer_of_a_block_that_repeats_is_no_head_by_its_name(count: int):
    model = Flux(nn.ModuleList(Single() for _ in range(count)))
    assert left(model, "output head") == {"proj_out"}
    converted(model)(torch.randn(4, 8)).sum().backward()
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert all(rows[f"single_transformer_blocks.{i}.proj_out"]["ran"] for i in range(count))
    assert [name for name, row in rows.items() if row["recipe"] == "none"] == ["proj_out"]


SIZE = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SIZE |= {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16, "intermediate_size": 64}
SWITCH = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
SWITCH |= {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "d_kv": 16}


@pytest.mark.parametrize(
    ("kind", "size"), [("SwitchTransformersForConditionalGeneration", SWITCH), ("JetMoeForCausalLM", SIZE)]
)
def test_the_layers_within_a_router_stay_as_they_are(kind: str, size: dict):
    with torch.device("meta"):
        model = getattr(hf, kind)(getattr(hf, kind).config_class(**size))
    routers = [one for one in decide(model, "current") if "router" in one.name]
    assert len(routers) == 4
    assert all(one.recipe is None and one.reason.startswith("router") for one in routers), routers


def test_a_gate_of_several_layers_is_a_router_beside_experts_alone():
    gate = nn.Sequential(linear(), nn.ReLU(), linear())
    assert left(parts(gate=gate, experts=twice(linear)), "router") == {"gate.0", "gate.2"}
    assert left(parts(gate=gate, down=linear()), "router") == set()
