"""Structure recognised by numbers: norms, activations and MLPs of families, of timm, of diffusers and by hand."""

from typing import Any

import peft
import pytest
import torch
import transformers as hf
from hf_families import FAMILIES, MORE
from probe_modules import (
    WIDE,
    FeedForward,
    Function,
    Gated,
    K,
    LayerNorm1P,
    Packed,
    Projected,
    Rms,
    TimmGluMlp,
    TimmMlp,
    TimmSwiGlu,
    by_hand,
    what_is,
)
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from fp8engine.convert.probe import Mlp, gated_products, scope, survey
from fp8engine.ops.reference import Norm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LLAMA = "swiglu gate_proj, up_proj > down_proj"
PACKED = "swiglu gate_up_proj > down_proj"
GEMMA = "geglu_tanh gate_proj, up_proj > down_proj"
LAYER, LAYER_12, RMS = "layer 1e-05", "layer 1e-12", "rms 1e-06"

# Families -> all that their modules are, each once.
FOUND = {
    "llama mistral qwen2 qwen3 granite smollm3": {RMS, LLAMA},
    "olmo2 olmo3": {"rms 1e-05", LLAMA},
    "gemma gemma2 gemma3": {"rms+1 1e-06", GEMMA},
    "gpt2 starcoder2": {LAYER, "gelu_tanh c_fc > c_proj"},
    "opt opt-350m": {LAYER, "relu"},
    "whisper bart": {LAYER, "gelu"},
    "bert roberta xlm-roberta camembert electra mpnet": {LAYER_12, "gelu"},
    "wav2vec2 wav2vec2-stable": {LAYER, "gelu", "gelu intermediate_dense > output_dense"},
    "phi": {LAYER, "gelu_tanh fc1 > fc2"},
    "phi3": {"rms 1e-05", PACKED},
    "gpt_neox": {LAYER, "gelu dense_h_to_4h > dense_4h_to_h"},
    "distilbert": {LAYER_12, "gelu lin1 > lin2"},
    "albert": {LAYER_12, "gelu_tanh"},
    "vit": {LAYER_12, "gelu fc1 > fc2"},
    "clip": {LAYER, "qgelu fc1 > fc2"},
    "t5": {RMS, "relu wi > wo"},
    "t5-v1.1": {RMS, "geglu_tanh wi_0, wi_1 > wo"},
    "mixtral": {"rms 1e-05", "silu"},
    "qwen2_moe": {RMS, "silu", LLAMA},
    "qwen3_moe": {RMS, "silu"},
    "stablelm": {LAYER, LLAMA},
    "gpt_oss": {"rms 1e-05"},
    "qwen2.5-vl": {RMS, "rms 1e-05", LLAMA, "gelu 0 > 2"},
    "qwen3-vl": {RMS, RMS.replace("rms", "layer"), LLAMA, "gelu_tanh linear_fc1 > linear_fc2", "gelu"},
    "deberta-v2": {"layer 1e-07", "gelu"},
    "modernbert": {LAYER, "gelu", "geglu Wi > Wo"},
    "siglip": {"layer 1e-06", "gelu_tanh fc1 > fc2"},
    "dinov2": {"layer 1e-06", "gelu fc1 > fc2"},
}
EXPECTED = {name: found for names, found in FOUND.items() for name in names.split()}

_SIZE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
_HEADS |= {"bos_token_id": 1, "eos_token_id": 2}
_MODERN = {**_SIZE, **_HEADS, "num_key_value_heads": 1, "head_dim": 16}
_PICTURE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_PICTURE |= {"image_size": 8, "patch_size": 4}
_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4}
_GPT |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_LATENT |= {"first_k_dense_replace": 1, "num_key_value_heads": 2}

# Config -> its options, and all that the model's modules are.  No table of ours has ever named these.
OTHERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Cohere": (_MODERN, {LAYER, LLAMA}),
    "Glm": (_MODERN, {"rms 1.5625e-07", PACKED}),
    "Falcon": ({**_SIZE, "num_attention_heads": 2}, {LAYER, "gelu dense_h_to_4h > dense_4h_to_h"}),
    "GPTJ": (_GPT, {LAYER, "gelu_tanh fc_in > fc_out"}),
    "GPTNeo": (
        {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
        {LAYER, "gelu_tanh c_fc > c_proj"},
    ),
    "DeepseekV3": ({**_SIZE, **_HEADS, **_LATENT}, {RMS, LLAMA, "silu"}),
    "Beit": (_PICTURE, {LAYER_12, "gelu fc1 > fc2"}),
    "Swin": (
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "image_size": 16, "patch_size": 2, "window_size": 2},
        {LAYER, "gelu fc1 > fc2"},
    ),
    "Arcee": (_MODERN, {"rms 1e-05", "srelu up_proj > down_proj"}),
    "Helium": (_MODERN, {"rms 1e-08", LLAMA}),
    "Persimmon": ({**_SIZE, **_HEADS}, {LAYER, "srelu dense_h_to_4h > dense_4h_to_h"}),
    "Nemotron": (_MODERN, {"layer+1 1e-05", "srelu up_proj > down_proj"}),
    "Bloom": (
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.0},
        {LAYER, "gelu_tanh dense_h_to_4h > dense_4h_to_h + residual"},
    ),
    "Mpt": (
        {"vocab_size": 64, "d_model": 32, "n_heads": 2, "n_layers": 2},
        {LAYER, "gelu up_proj > down_proj + residual"},
    ),
}
NO_NORMS = {"GroupNorm", "_WeightNorm", "Wav2Vec2LayerNormConvLayer"}  # by class, what "Norm" in the name hides


def told(found: Any) -> str:
    """One thing that the probe saw, as the tables above write it."""
    if isinstance(found, Norm):
        return f"{found.kind}{'+1' * found.zero_centered} {found.eps}"
    if isinstance(found, Mlp):
        first = ", ".join(filter(None, (found.gate, found.up, found.gate_up, found.up_gate)))
        return f"{found.kind} {first} > {found.down}{' + residual' * found.residual}"
    return found


@pytest.mark.parametrize("name", FAMILIES | MORE | OTHERS)
def test_the_families_of_the_tests_and_those_that_no_table_has_named(name: str):
    if name in OTHERS:
        options, expected = OTHERS[name]
        model: Any = hf.AutoModel.from_config(getattr(hf, f"{name}Config")(**options))
    else:
        model, expected = (FAMILIES | MORE)[name].build(), EXPECTED[name]
    found = survey(model)
    assert {told(each) for each in found.values()} == expected
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__ and not module._modules and type(module).__name__ not in NO_NORMS:
            assert isinstance(found[name], Norm), name


NORMS = {
    "LayerNorm": (nn.LayerNorm(K, eps=1e-12), Norm("layer", 1e-12)),
    "LayerNorm without bias": (nn.LayerNorm(K, bias=False), Norm("layer", 1e-5)),
    "LayerNorm without parameters": (nn.LayerNorm(K, elementwise_affine=False), Norm("layer", 1e-5)),
    "LayerNorm1P": (LayerNorm1P(K), Norm("layer", 1e-5, True)),
    "RMSNorm": (nn.RMSNorm(K, eps=1e-6), Norm("rms", 1e-6)),
    "RMSNorm of no weight": (Function(lambda x: F.rms_norm(x, (x.shape[-1],), eps=1e-7)), Norm("rms", 1e-7)),
    "by hand": (Rms(1e-6), Norm("rms", 1e-6)),
    "an eps in no attribute": (Rms(None, formula=lambda m, x: F.rms_norm(x, (K,), m.weight, 3e-6)), Norm("rms", 3e-6)),
    "another eps than it says": (Rms(formula=lambda m, x: F.rms_norm(x, (K,), m.weight, 2e-6)), Norm("rms", 2e-6)),
    "no eps": (Rms(0.0), Norm("rms", 0.0)),
    "wide": (Rms(1e-5, 16384), Norm("rms", 1e-5)),
    "narrow": (Rms(1e-5, 8), Norm("rms", 1e-5)),
}

MLPS = {
    "timm Mlp": (TimmMlp(), Mlp("gelu", "fc2", "fc1", activation="act")),
    "timm Mlp, tanh": (TimmMlp(lambda: ACT2FN["gelu_new"]), Mlp("gelu_tanh", "fc2", "fc1", activation="act")),
    "timm GluMlp": (TimmGluMlp(), Mlp("glu", "fc2", up_gate="fc1", activation="act")),
    "timm GluMlp, gate first": (TimmGluMlp(nn.SiLU, False), Mlp("swiglu", "fc2", gate_up="fc1", activation="act")),
    "timm SwiGLU": (TimmSwiGlu(), Mlp("swiglu", "fc2", "fc1_x", "fc1_g", activation="act")),
    "diffusers GEGLU": (
        FeedForward(Projected(2 * WIDE, lambda h: h[..., :WIDE] * F.gelu(h[..., WIDE:]))),
        Mlp("geglu", "net.2", up_gate="net.0.proj"),
    ),
    "diffusers GELU": (
        FeedForward(Projected(WIDE, lambda h: F.gelu(h, approximate="tanh"))),
        Mlp("gelu_tanh", "net.2", "net.0.proj"),
    ),
    "w1 w3 w2": (Gated(), Mlp("swiglu", "w2", "w3", "w1")),
    "w3 is the gate": (Gated(lambda a, b: a * F.silu(b)), Mlp("swiglu", "w2", "w1", "w3")),
    "bilinear gelu": (Gated(lambda a, b: F.gelu(a.float()).to(a.dtype) * b), Mlp("geglu", "w2", "w3", "w1")),
    "gpt-oss": (
        Gated(lambda a, b: (b.clamp(-7, 7) + 1) * a.clamp(max=7) * torch.sigmoid(1.702 * a.clamp(max=7))),
        Mlp("clamped_swiglu", "w2", "w3", "w1"),
    ),
    "packed": (Packed(), Mlp("swiglu", "last", gate_up="first")),
    "rows flattened": (
        Gated(before=lambda x: x.reshape(-1, K), after=lambda x, y: y.view(x.shape)),
        Mlp("swiglu", "w2", "w3", "w1"),
    ),
    "Conv1D": (TimmMlp(linear=lambda k, n: Conv1D(n, k)), Mlp("gelu", "fc2", "fc1", activation="act")),
    "Sequential": (nn.Sequential(nn.Linear(K, K), nn.ReLU(True), nn.Linear(K, K)), Mlp("relu", "2", "0")),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str):
    module, expected = NORMS[name]
    assert what_is(module) == expected


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("mode", [True, False])
def test_mlps(name: str, mode: bool):
    module, expected = MLPS[name]
    assert what_is(module.train(mode)) == expected
    assert next(iter(survey(nn.ModuleDict({"a": module})).items())) == ("a", expected)


ACTIVATIONS = {
    "relu": ("relu",),
    "srelu": ("relu2",),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    "qgelu": ("quick_gelu",),
    "silu": ("silu", "swish"),
    None: (
        *("gelu_10", "hardswish", "leaky_relu", "linear", "mish", "relu6", "sigmoid", "tanh"),
        *("laplace", "prelu", "sqrtsoftplus", "xielu"),
    ),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in ACTIVATIONS.items() for name in names])
def test_activations_of_transformers(name: str, kind: str | None):
    assert what_is(ACT2FN[name]) == kind


def test_a_patched_class_is_what_it_computes(monkeypatch):
    mlp, norm = TimmMlp(), Rms()
    monkeypatch.setattr(TimmMlp, "forward", lambda self, x: 2 * self.fc2(self.act(self.fc1(x))))
    monkeypatch.setattr(Rms, "forward", lambda self, x: F.layer_norm(x, (K,), self.weight, None, 1e-4))
    assert what_is(mlp) is None
    assert what_is(norm) == Norm("layer", 1e-4)


def test_in_evaluation_alone_dropout_makes_no_difference():
    mlp = TimmGluMlp()
    mlp.drop1.p = mlp.drop2.p = 0.5
    assert gated_products(mlp) == {"": MLPS["timm GluMlp"][1]}
    assert survey(mlp) == {}


RANKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "of any": (nn.LayerNorm(K), (2, 3, 4)),
    "a norm's branch": (Rms(formula=lambda m, x: by_hand(m, x) * (1 + (x.dim() == 4))), (2, 3)),
    "an activation's branch": (Function(lambda x: F.gelu(x) * (1 + (x.dim() == 2))), (3, 4)),
    "an MLP that flattens pictures": (Gated(before=lambda x: x.flatten(1, 2) if x.dim() == 4 else x), (2, 3)),
    "an MLP that flattens rows": (MLPS["rows flattened"][0], (2, 3, 4)),
    "batch, tokens, features": (Gated(before=lambda x: (lambda batch, tokens, features: x)(*x.shape)), (3,)),
}


@pytest.mark.parametrize("name", RANKS)
def test_of_which_ranks_a_module_computes_the_same(name: str):
    module, expected = RANKS[name]
    assert scope(module, {}) == (expected, True)


def test_layers_under_an_adapter_are_layers():
    config = peft.LoraConfig(r=2, target_modules=["w1", "w2"], lora_dropout=0.1)
    model = peft.get_peft_model(nn.Sequential(Gated()), config)  # pyright: ignore[reportArgumentType]
    assert survey(model) == {"base_model.model.0": MLPS["w1 w3 w2"][1]}
