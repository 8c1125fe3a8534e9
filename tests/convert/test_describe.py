"""fe.hf.describe: each claim of the table is held against what the real modules read and write in a forward.

The table says what a part is called and how parts are joined; hooks see every part's input and output.  So: q reads
what the norm wrote, `down` reads act(gate) * up, the residual is added before or after the norm, as the row says.
"""

from typing import Any

import peft
import pytest
import torch
import transformers
from hf_families import FAMILIES, Family
from support import converted
from torch import nn
from transformers.activations import ACT2FN

import fp8engine as fe
from fp8engine.export import hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

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


class Seen:
    """The input and output of every module in one forward (of ALBERT's one block, in its last round)."""

    def __init__(self, model: nn.Module, batch: dict):
        self.read: dict[str, torch.Tensor] = {}
        self.wrote: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda m, args, kwargs, y, n=name: self._note(n, args, kwargs, y), with_kwargs=True
            )
        with torch.no_grad():
            model(**batch)

    def _note(self, name: str, args: tuple, kwargs: dict, y: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if tensors:
            self.read[name] = rows(tensors[0])
        first = y[0] if isinstance(y, tuple) else y
        if isinstance(first, torch.Tensor):
            self.wrote[name] = rows(first)


def rows(x: torch.Tensor) -> torch.Tensor:
    """Its leading dimensions as one: some modules are called with two, some with three."""
    return x.reshape(-1, x.shape[-1]) if x.dim() else x


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same numbers, up to a few FP32 roundings."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_and_every_linear_layer_has_its_place(name: str):
    family = FAMILIES[name]
    model = family.build()
    told = hf.describe(model)
    assert len(told.blocks) == family.blocks
    assert told.outside == OUTSIDE.get(name, ("lm_head",))
    assert told.why == ()
    for block in told.blocks:
        assert block.parts.keys() == block.structure.parts().keys()
        assert all(model.get_submodule(part) is not None for part in block.parts.values())
        assert len(set(block.parts.values())) + (name == "phi") == len(block.parts), "phi's one norm serves both"


@every_family
def test_blocks_are_joined_as_the_table_says(family: Family):
    model = family.build(attn_implementation="eager")
    seen = Seen(model, family.batch())
    for block in hf.describe(model).blocks:
        kind, part = block.structure, block.parts
        attended, done = seen.wrote[part["out"]], seen.wrote[block.name]
        x = seen.read[block.name]
        first, second = part["attention_norm"], part["mlp_norm"]
        for role in ("q", "k", "v", "qkv"):
            if role in part:
                assert near(seen.read[part[role]], x if kind.placement == "post" else seen.wrote[first]), role
        up = next(part[role] for role in ("gate_up", "up", "experts") if role in part)
        if kind.placement == "post":
            assert near(seen.read[first], x + attended)
            assert near(seen.read[up], seen.wrote[first])
            assert near(seen.read[second], seen.wrote[first] + seen.wrote[part["down"]])
            assert near(done, seen.wrote[second])
            continue
        assert near(seen.read[first], x)
        assert near(seen.read[up], seen.wrote[second])
        added = _mlp(seen, part)
        if kind.placement == "parallel":
            assert near(seen.read[second], x)
            assert near(done, x + attended + added)
        elif kind.cross is None:
            assert near(seen.read[second], x + attended)
            assert near(done, x + attended + added)
        else:
            assert near(seen.read[part["cross_norm"]], x + attended)
            assert near(seen.read[part["cross_q"]], seen.wrote[part["cross_norm"]])
            assert near(seen.read[second], x + attended + seen.wrote[part["cross_out"]])
            assert not near(seen.read[part["cross_k"]], seen.read[part["cross_v"]] + 1)
            assert seen.read[part["cross_k"]].data_ptr() == seen.read[part["cross_v"]].data_ptr(), (
                "the encoder's states"
            )


def _mlp(seen: Seen, part: dict[str, str]) -> torch.Tensor:
    """What the MLP adds to the residual."""
    if "down" in part:
        return seen.wrote[part["down"]]
    experts = seen.wrote[part["experts"]]
    if "shared_down" not in part:
        return experts
    weight = seen.wrote[part["shared_weigh"]].sigmoid()
    return experts + weight * seen.wrote[part["shared_down"]]


@every_family
def test_activations_gates_norms_and_heads(family: Family):
    model = family.build(attn_implementation="eager")
    seen = Seen(model, family.batch())
    for block in hf.describe(model).blocks:
        kind, part, act = block.structure, block.parts, ACT2FN[block.activation]
        for role in ("attention_norm", "mlp_norm"):
            x = seen.read[part[role]]
            norm: Any = model.get_submodule(part[role])
            eps = getattr(norm, "eps", None) or norm.variance_epsilon
            centred = x - x.mean(-1, keepdim=True) if kind.norm == "layer" else x
            plain = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
            assert near(seen.wrote[part[role]], plain * norm.weight + getattr(norm, "bias", 0)), role
        if "down" in part:
            if "gate_up" in part:
                gate, up = seen.wrote[part["gate_up"]].chunk(2, -1)
                want = act(gate) * up
            else:
                want = (
                    act(seen.wrote[part["gate"]]) * seen.wrote[part["up"]]
                    if "gate" in part
                    else act(seen.wrote[part["up"]])
                )
            assert near(seen.read[part["down"]], want)
        width, group = block.heads * block.head_dim, block.kv_heads * block.head_dim
        if "qkv" in part:
            assert seen.wrote[part["qkv"]].shape[-1] == width + 2 * group
        else:
            assert [seen.wrote[part[role]].shape[-1] for role in "qkv"] == [width, group, group]
        assert seen.read[part["out"]].shape[-1] == width
        if "q_norm" in part:
            assert seen.wrote[part["q_norm"]].shape[-1] == block.head_dim


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3"])
def test_the_rows_of_a_fused_qkv_lie_as_told(name: str):
    """With v's rows zero by that layout, nothing is attended to; with all others zero, v's mean is."""
    model = FAMILIES[name].build(attn_implementation="eager")
    block = hf.describe(model).blocks[0]
    qkv: Any = model.get_submodule(block.parts["qkv"])
    rows = torch.arange(block.head_dim * (block.heads + 2 * block.kv_heads))
    if block.structure.attention.fused == "stacked":
        is_v = rows >= block.head_dim * (block.heads + block.kv_heads)
    else:
        is_v = rows % (3 * block.head_dim) >= 2 * block.head_dim
    weight = qkv.weight.t() if name == "gpt2" else qkv.weight
    with torch.no_grad():
        weight[is_v] = 0
        if qkv.bias is not None:
            qkv.bias[is_v] = 0
    assert not Seen(model, FAMILIES[name].batch()).read[block.parts["out"]].any()


def test_converted_wrapped_and_adapted_models_are_described_too():
    model = FAMILIES["gpt2"].build()
    plain = str(hf.describe(model))
    assert str(hf.describe(converted(model))) == plain
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv_proj", "down_proj"])
    adapted = hf.describe(peft.get_peft_model(FAMILIES["phi3"].build(), config))
    assert [block.name for block in adapted.blocks] == [f"base_model.model.model.layers.{i}" for i in range(2)]
    assert (adapted.blocks[0].head_dim, adapted.outside) == (16, ("base_model.model.lm_head",))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt_neox", {"use_parallel_residual": False}),
        ("opt", {"do_layer_norm_before": False}),
        ("qwen2_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
    ],
)
def test_a_config_may_choose_another_structure(name: str, options: dict):
    test_blocks_are_joined_as_the_table_says(
        Family(**{**vars(FAMILIES[name]), "options": FAMILIES[name].options | options})
    )


def test_what_the_table_does_not_know_is_said():
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    told = hf.describe(model)
    assert told.blocks == ()
    assert "model_type 'bloom' is in no row of fp8engine.hf.FAMILIES" in str(told)
    assert fe.inspect(converted(model)).totals["converted"] == 4, "level 1 needs no row"
    with pytest.raises(fe.errors.ConversionError, match="has no config: describe takes a model of transformers"):
        hf.describe(nn.Linear(2, 2))
