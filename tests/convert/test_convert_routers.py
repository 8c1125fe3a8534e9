"""Routers that are made of layers: what chooses an expert stays as it is, however the module around it is built."""

import pytest
import torch
import transformers as hf
from torch import nn

from fp8engine.convert.select import decide

SIZE = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
        {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "d_kv": 16},
        4,
    ),
    "jetmoe": ("JetMoeForCausalLM", {**SIZE, **EXPERTS}, {"kv_channels": 16, "intermediate_size": 64}, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_within_a_router_stay_as_they_are(name: str):
    kind, size, options, count = MODELS[name]
    with torch.device("meta"):
        model = getattr(hf, kind)(getattr(hf, kind).config_class(**size, **options))
    routers = [one for one in decide(model, "current") if "router" in one.name]
    assert len(routers) == count
    assert all(one.recipe is None and one.reason.startswith("router") for one in routers), routers


def test_a_gate_of_several_layers_beside_the_experts():
    gate = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    model = nn.ModuleDict({"gate": gate, "experts": nn.ModuleList(nn.Linear(16, 16) for _ in range(4))})
    left = {one.name for one in decide(model, "current") if one.recipe is None}
    assert left == {"gate.0", "gate.2"}
    gated_mlp = nn.ModuleDict({"gate": gate, "down": nn.Linear(16, 16)})
    assert all(one.recipe is not None for one in decide(gated_mlp, "current"))
