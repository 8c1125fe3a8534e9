"""What the probe knows of single modules: formulas of timm, of diffusers and by hand, activations, adapters."""

import peft
import pytest
import torch
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
    what_is,
)
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from fp8engine.convert.probe import Mlp, gated_products, survey
from fp8engine.ops.reference import Norm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NORMS = {
    "LayerNorm": (nn.LayerNorm(K, eps=1e-12), Norm("layer", 1e-12)),
    "LayerNorm without bias": (nn.LayerNorm(K, bias=False), Norm("layer", 1e-5)),
    "LayerNorm without parameters": (nn.LayerNorm(K, elementwise_affine=False), Norm("layer", 1e-5)),
    "LayerNorm1P": (LayerNorm1P(K), Norm("layer", 1e-5, True)),
    "RMSNorm": (nn.RMSNorm(K, eps=1e-6), Norm("rms", 1e-6)),
    "RMSNorm of no weight": (Function(lambda x: F.rms_norm(x, (x.shape[-1],), eps=1e-7)), Norm("rms", 1e-7)),
    "by hand": (Rms(1e-6), Norm("rms", 1e-6)),
    "an eps in no attribute": (
        Rms(None, formula=lambda m, x: F.rms_norm(x, (K,), m.weight, 3e-6)),
        Norm("rms", 3e-6),
    ),
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


def test_layers_under_an_adapter_are_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Gated()

        def forward(self, x):
            return self.mlp(x)

    config = peft.LoraConfig(r=2, target_modules=["w1", "w2"], lora_dropout=0.1)
    model = peft.get_peft_model(Model(), config)
    assert survey(model) == {"base_model.model.mlp": MLPS["w1 w3 w2"][1]}
