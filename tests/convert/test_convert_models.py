"""Models that users bring as they are: output heads and routers, which are left alone, Conv1D, parts in TorchScript,
layers without a weight yet, lists with None in them, inputs without a dimension, towers that no batch has called."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers as hf
from reading_models import Keys, Model
from support import converted, same
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.convert.select import decide


def linear(features: int = 16) -> nn.Linear:
    return nn.Linear(16, features)


def parts(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def single() -> nn.Module:
    """Flux's single block: attention and MLP side by side, both read by `proj_out`."""
    return parts(to_qkv=linear(), proj_mlp=linear(64), proj_out=nn.Linear(80, 16))


def flux(blocks: nn.Module) -> nn.Module:
    """Single blocks between two projections; the model's last layer has the name that each block's last layer has."""
    return parts(x_embedder=nn.Linear(8, 16), single_transformer_blocks=blocks, proj_out=linear(8))


class Tied(nn.Module):
    """A block with a layer tied to an embedding, and one that its own method calls its output."""

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head, self.classifier = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False), linear(4)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.classifier


def twice(make: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(2))


def stage(depth: int) -> nn.Module:
    return parts(attentions=nn.ModuleList(single() for _ in range(depth)), score=linear(4))


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
    "a list of one block": (lambda: flux(nn.ModuleList([single()])), {"proj_out"}),
    "a list of three blocks": (lambda: flux(nn.ModuleList(single() for _ in range(3))), {"proj_out"}),
    "a sequence of blocks": (lambda: flux(nn.Sequential(single(), single())), {"proj_out"}),
    "a sequence of other parts": (lambda: nn.Sequential(linear(), single()), {"1.proj_out"}),
    "blocks within blocks": (lambda: parts(down=nn.ModuleList([stage(1), stage(2)]), head=linear(4)), {"head"}),
    "in a block that repeats, by more than its name": (
        lambda: twice(Tied),
        {f"{i}.{name}" for i in (0, 1) for name in ("lm_head", "classifier")},
    ),
    "in a block that repeats, by its name": (exits, set()),
    "there as wide as the vocabulary": (lambda: exits(vocab_size=40), {"exits.0.lm_head", "exits.1.lm_head"}),
    "VGG's classifier": (lambda: parts(classifier=nn.Sequential(linear(), nn.ReLU(), linear())), {"classifier.2"}),
    "a head in a Sequential": (lambda: nn.Sequential(OrderedDict(body=linear(), head=linear())), {"head"}),
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


ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "cross_num_attention_heads": 2, "cross_num_key_value_heads": 2}
DECODER |= {"cross_head_dim": 16, "cross_hidden_size": 32}
DETECTION = {"class_labels_classifier.layers.2", "bbox_predictor.layers.2"}


# Heads as wide as no config says: one class more ("no object"), a box of four numbers, one number, channels * words.
@pytest.mark.parametrize(
    ("kind", "size", "want"),
    [
        ("YolosForObjectDetection", ENCODER | {"image_size": [32, 32]}, DETECTION),
        ("EomtForUniversalSegmentation", ENCODER | {"image_size": 64, "num_blocks": 1}, {"class_predictor"}),
        ("ElectraForPreTraining", ENCODER | {"embedding_size": 32}, {"discriminator_predictions.dense_prediction"}),
        (
            "DiaForConditionalGeneration",
            {"encoder_config": ENCODER | {"head_dim": 16}, "decoder_config": ENCODER | DECODER},
            {"logits_dense"},
        ),
    ],
)
def test_heads_of_detection_and_of_several_channels_are_heads(kind: str, size: dict, want: set[str]):
    with torch.device("meta"):
        model = getattr(hf, kind)(getattr(hf, kind).config_class(**size))
    assert left(model, "output head") == want


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


def test_a_gate_is_a_router_beside_experts_alone():
    gate = nn.Sequential(linear(), nn.ReLU(), linear())
    assert left(parts(gate=gate, experts=twice(linear)), "router") == {"gate.0", "gate.2"}
    assert left(parts(gate=gate, down=linear()), "router") == set()
    routed = parts(gate=linear(4), experts=twice(linear), mlp=parts(gate=linear(), up=linear()))
    assert left(routed, "router") == {"gate"}
    named = {decision.name: decision.recipe for decision in decide(routed, "current", overrides={"gate": "rowwise"})}
    assert named["gate"] == fe.rowwise()
    with pytest.raises(fe.errors.StrictError, match=r"MixtralTopKRouter is not an nn\.Linear"):
        fe.convert(tiny.mixtral(), overrides={"*.mlp.gate": "rowwise"}, strict=True)


def test_gpt2_conv1d_is_the_linear_of_its_transposed_weight():
    conv, linear = Conv1D(24, 16), nn.Linear(16, 24)
    nn.init.normal_(conv.bias)
    linear.load_state_dict({"weight": conv.weight.t(), "bias": conv.bias})
    found, x = [], torch.randn(2, 5, 16)
    for layer in (conv, linear):
        leaf = x.clone().requires_grad_()
        y = converted(nn.Sequential(layer), "rowwise")(leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, layer.bias.grad, layer.weight.grad])
    found[0][3] = found[0][3].t()
    assert same(*found)
    assert (isinstance(conv, Conv1D), conv.weight.shape) == (True, (16, 24))
    assert repr(conv) == "Conv1D(nf=24, nx=16, recipe=rowwise (E4M3xE4M3, grad E4M3))"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("part", [False, True])
def test_torchscript_is_refused_by_name(part: bool):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    model = nn.Sequential(nn.Linear(16, 16), scripted) if part else scripted
    where = "its part '1'" if part else "the model"
    with pytest.raises(fe.errors.ConversionError, match=f"{where} is TorchScript already.*: convert the plain module"):
        fe.convert(model, "current")
    assert not part or type(model[0]) is nn.Linear


def test_a_layer_without_a_weight_yet_says_when_it_gets_one():
    model = converted(nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 8)))
    reason = fe.inspect(model).layers[0]["reason"]
    assert reason == "its weight is made by its first forward: run the model once before fe.convert"
    model(torch.randn(2, 4))
    converted(model)  # the remedy
    assert [row["recipe"] for row in fe.inspect(model).layers] == ["current", "current"]


def test_an_input_without_a_dimension_is_refused_in_the_words_of_torch():
    with pytest.raises(RuntimeError) as torchs:
        nn.Linear(4, 4)(torch.tensor(1.0))
    with pytest.raises(fe.errors.ShapeError) as ours:
        converted(nn.Sequential(nn.Linear(4, 4)))(torch.tensor(1.0))
    assert str(ours.value) == f"0: {torchs.value}"


@pytest.mark.parametrize("recipe", ["current", "auto"])
def test_a_list_of_layers_may_hold_none(recipe: str):
    """As Informer's encoder has it: a norm after each block but the last, whose place in the list is None."""
    unused: Any = (nn.LayerNorm(16), None, nn.ModuleList([None]))  # type: ignore[list-item]
    plain = Model(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)), unused=unused)
    model, x = copy.deepcopy(plain), torch.randn(8, 16)
    converted(model, recipe, example_inputs=(x,))
    y, want = model(x), plain(x)
    assert 0 < (y - want).norm() < 0.15 * want.norm()  # three layers of 28 dB each in a row, and their gains
    assert fe.inspect(model).totals["in_fp8"] == 3
    fe.revert(model)
    assert type(model.get_submodule("parts.0.0")) is nn.Linear


class TwoTowers(nn.Module):
    """A model of pictures and text, whose batches may lack pictures; `read` is left alone, its weight is read."""

    def __init__(self):
        super().__init__()
        self.pictures = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))
        self.text, self.read = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, pictures=None):
        x = x if pictures is None else x + self.pictures(pictures)
        return nn.functional.linear(self.text(x), self.read.weight)


def test_a_tower_that_no_batch_has_called_has_no_share_of_the_flops():
    model = converted(TwoTowers(), "current")
    assert fe.inspect(model).totals["fp8_flops_share"] == 0
    x = torch.randn(4, 16)
    model(x)
    text, read, tower = 16 * 32, 32 * 8, 2 * 16 * 256
    report = fe.inspect(model)
    assert report.totals["never_ran"] == 2
    assert report.totals["fp8_flops_share"] == pytest.approx(text / (text + read))
    assert {row["name"]: row["flops_share"] for row in report.layers}["pictures.0"] == 0
    model(x, x)
    # `text` has seen 8 rows by now, the tower 4, and the median of those that count is for `read`.
    fp8 = 8 * text + 4 * tower
    assert fe.inspect(model).totals["fp8_flops_share"] == pytest.approx(fp8 / (fp8 + 4 * read))


def test_a_config_whose_keys_are_attributes():
    model: Any = TwoTowers()
    model.config = Keys(num_labels=32)
    with pytest.raises(fe.errors.ParallelError, match="TwoTowers is no model of transformers"):
        fe.distributed.decoder_plan(model)
    converted(model, "current")(torch.randn(4, 16)).sum().backward()
    model.text = nn.Linear(16, 40)
    model.config = Keys(vocab_size=40)
    assert {d.name for d in decide(model, "current") if d.reason.startswith("output head")} == {"text"}


def test_a_norm_of_a_family_with_linear_in_its_name_is_no_linear_layer():
    norm = type("KimiLinearRMSNorm", (nn.RMSNorm,), {})  # as transformers names the norms of Kimi-Linear
    model = converted(nn.Sequential(norm(16), linear(), nn.GELU(), linear()))
    model(torch.randn(4, 16))
    report = fe.inspect(model)
    assert [row["name"] for row in report.layers] == ["1", "3"]
    assert (report.totals["left_alone"], report.totals["fp8_flops_share"]) == (0, 1)
