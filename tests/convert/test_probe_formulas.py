"""What the probe knows of single modules: formulas of timm, of diffusers and by hand, and what merely resembles one."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.convert.probe import Mlp, activation_of, mlp_of, norm_of, survey
from fp8engine.ops.reference import Norm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
K, WIDE = 32, 48
Layer = Callable[..., nn.Module]


class TimmMlp(nn.Module):
    """timm.layers.Mlp."""

    def __init__(
        self, act: Layer = nn.GELU, drop: float = 0.0, norm: nn.Module | None = None, linear: Layer = nn.Linear
    ):
        super().__init__()
        self.fc1, self.act, self.drop1 = linear(K, WIDE), act(), nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2, self.drop2 = linear(WIDE, K), nn.Dropout(drop)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class TimmGluMlp(nn.Module):
    """timm.layers.GluMlp: by default the second half is the gate."""

    def __init__(self, act: Layer = nn.Sigmoid, gate_last: bool = True):
        super().__init__()
        self.fc1, self.act, self.gate_last = nn.Linear(K, 2 * WIDE), act(), gate_last
        self.drop1, self.norm, self.fc2, self.drop2 = (
            nn.Dropout(0.0),
            nn.Identity(),
            nn.Linear(WIDE, K),
            nn.Dropout(0.0),
        )

    def forward(self, x):
        x1, x2 = self.fc1(x).chunk(2, dim=-1)
        x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        return self.drop2(self.fc2(self.norm(self.drop1(x))))


class TimmSwiGlu(nn.Module):
    """timm.layers.SwiGLU: two layers."""

    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        self.fc1_g, self.fc1_x, self.act = nn.Linear(K, WIDE), nn.Linear(K, WIDE), nn.SiLU()
        self.drop1, self.norm, self.fc2, self.drop2 = (
            nn.Dropout(0.0),
            norm or nn.Identity(),
            nn.Linear(WIDE, K),
            nn.Identity(),
        )

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1_g(x)) * self.fc1_x(x)))))


class GEGLU(nn.Module):
    """diffusers.models.activations.GEGLU: the second half is the gate."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(K, 2 * WIDE)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class DiffusersGELU(nn.Module):
    """diffusers.models.activations.GELU."""

    def __init__(self, approximate: str):
        super().__init__()
        self.proj, self.approximate = nn.Linear(K, WIDE), approximate

    def forward(self, x):
        return F.gelu(self.proj(x), approximate=self.approximate)


class FeedForward(nn.Module):
    """diffusers.models.attention.FeedForward."""

    def __init__(self, first: nn.Module):
        super().__init__()
        self.net = nn.ModuleList([first, nn.Dropout(0.0), nn.Linear(WIDE, K)])

    def forward(self, x):
        for module in self.net:
            x = module(x)
        return x


class Gated(nn.Module):
    """down(f(gate(x)) * up(x)), or as `between`, `before` and `after` say, under Meta's names."""

    def __init__(self, between=lambda gate, up: F.silu(gate) * up, before=lambda x: x, after=lambda x, y: y):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(K, WIDE), nn.Linear(K, WIDE), nn.Linear(WIDE, K)
        self.between, self.before, self.after = between, before, after

    def forward(self, x):
        h = self.before(x)
        return self.after(x, self.w2(self.between(self.w1(h), self.w3(h))))


class Packed(nn.Module):
    """One layer for gate and up, divided by `halves`."""

    def __init__(self, halves=lambda h: h.split(WIDE, -1)):
        super().__init__()
        self.first, self.last, self.halves = nn.Linear(K, 2 * WIDE, bias=False), nn.Linear(WIDE, K), halves

    def forward(self, x):
        gate, up = self.halves(self.first(x))
        return self.last(F.silu(gate) * up)


class ReadsWeight(TimmMlp):
    """Multiplies by the first layer's weight itself."""

    def forward(self, x):
        return self.fc2(self.act(F.linear(x, self.fc1.weight, self.fc1.bias)))


class Rms(nn.Module):
    """An RMSNorm by hand, each of whose parts a test may change.  eps: None, in the code alone."""

    def __init__(self, eps: float | None = 1e-6, size: int = K, more: dict[str, Any] | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        if eps is not None:
            self.eps = eps
        vars(self).update(more or {})

    def forward(self, x):
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.of_eps())).to(x.dtype)

    def of_eps(self) -> float:
        return getattr(self, "eps", 3e-6)


class TrainedEps(Rms):
    """Another eps in training."""

    def of_eps(self):
        return 1e-5 if self.training else 1e-6


class ScaledEps(Rms):
    """Says 1e-6, and takes twice that."""

    def of_eps(self):
        return 2e-6


class EpsOutside(Rms):
    """Adds eps to the root."""

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6)


class UnbiasedLayerNorm(Rms):
    """Divides by K - 1."""

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


class ClampedRms(Rms):
    """Clamps its result."""

    def forward(self, x):
        return super().forward(x).clamp(-3, 3)


class ScaledRms(Rms):
    """Multiplies by 1.001."""

    def forward(self, x):
        return super().forward(x) * 1.001


class HalfRms(Rms):
    """Norms the first half of the features, as LayerNorms over a part of them do."""

    def forward(self, x):
        z = x[..., : K // 2].square().mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(z + 1e-6)


class OverTokens(Rms):
    """Means over the other dimension."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-6)


class ReturnsFloat(Rms):
    """Returns FP32 whatever it is given."""

    def forward(self, x):
        return super().forward(x.float())


class OneMinus(Rms):
    """Multiplies by 1 - weight."""

    def forward(self, x):
        return super().forward(x) / self.weight * (1 - self.weight)


class Counting(Rms):
    """Keeps a running mean, as batch norms do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


class RmsWithBias(Rms):
    """An RMSNorm that adds a bias."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(K))

    def forward(self, x):
        return super().forward(x) + self.bias


class LayerNorm2d(nn.LayerNorm):
    """timm's: over the channels of pictures [N, C, H, W]."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        return super().forward(x).permute(0, 3, 1, 2)


class LayerNorm1P(nn.LayerNorm):
    """NVIDIA's, which stores its weight less 1."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class NoWeight(nn.Module):
    """An RMSNorm without parameters."""

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), eps=1e-7)


class Function(nn.Module):
    """A module that computes what it is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


NORMS = {
    "LayerNorm": (nn.LayerNorm(K, eps=1e-12), Norm("layer", 1e-12)),
    "LayerNorm without bias": (nn.LayerNorm(K, bias=False), Norm("layer", 1e-5)),
    "LayerNorm without parameters": (nn.LayerNorm(K, elementwise_affine=False), Norm("layer", 1e-5)),
    "LayerNorm1P": (LayerNorm1P(K), Norm("layer", 1e-5, True)),
    "RMSNorm": (nn.RMSNorm(K, eps=1e-6), Norm("rms", 1e-6)),
    "RMSNorm of no weight": (NoWeight(), Norm("rms", 1e-7)),
    "by hand": (Rms(1e-6), Norm("rms", 1e-6)),
    "an eps in no attribute": (Rms(None), Norm("rms", 3e-6)),
    "another eps than it says": (ScaledEps(1e-6), Norm("rms", 2e-6)),
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
    "diffusers GEGLU": (FeedForward(GEGLU()), Mlp("geglu", "net.2", up_gate="net.0.proj")),
    "diffusers GELU": (FeedForward(DiffusersGELU("tanh")), Mlp("gelu_tanh", "net.2", "net.0.proj")),
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
    assert norm_of(module) == expected
    assert activation_of(module) is None
    assert mlp_of(module) is None


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("mode", [True, False])
def test_mlps(name: str, mode: bool):
    module, expected = MLPS[name]
    assert mlp_of(module.train(mode)) == expected
    assert next(iter(survey(nn.ModuleDict({"a": module})).items())) == ("a", expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("relu", "relu"),
        ("relu2", "srelu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_python_tanh", "gelu_tanh"),
        ("quick_gelu", "qgelu"),
        ("silu", "silu"),
        ("swish", "silu"),
        *(
            (name, None)
            for name in ("gelu_10", "hardswish", "leaky_relu", "linear", "mish", "relu6", "sigmoid", "tanh")
        ),
        *((name, None) for name in ("laplace", "prelu", "sqrtsoftplus", "xielu")),
    ],
)
def test_activations_of_transformers(name: str, kind: str | None):
    assert activation_of(ACT2FN[name]) == kind
    assert norm_of(ACT2FN[name]) is None


def pruned() -> nn.Module:
    mlp = TimmMlp()
    prune.l1_unstructured(mlp.fc1, "weight", 0.5)
    return mlp


def with_layer(change: Callable[[nn.Module], Any]) -> nn.Module:
    """An MLP whose first layer a function of torch has changed."""
    mlp = TimmMlp()
    change(mlp.fc1)
    return mlp


def wrapped(module: nn.Module, part: str = "") -> nn.Module:
    """A module with a forward on the instance."""
    target = module.get_submodule(part)
    plain = target.forward
    target.forward = lambda x: plain(x)
    return module


def spoiled(kind: type[nn.Module], **methods) -> Any:
    return type(kind.__name__, (kind,), methods)


NEAR_MISSES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: TimmMlp(drop=0.1).eval(),
    "dropout by function": lambda: Gated(after=lambda x, y: F.dropout(y, 0.1)),
    "dropout of everything": lambda: TimmMlp(drop=1.0),
    "a norm inside": lambda: TimmMlp(norm=nn.LayerNorm(WIDE)),
    "a norm without parameters inside": lambda: TimmSwiGlu(NoWeight()),
    "a clamp before": lambda: Gated(lambda a, b: F.silu(a.clamp(max=10)) * b),
    "a clamp after": lambda: Gated(after=lambda x, y: y.clamp(-1000, 1000)),
    "a clamp within": lambda: Gated(lambda a, b: (F.silu(a) * b).clamp(-1000, 1000)),
    "a scale": lambda: Gated(after=lambda x, y: y * 0.5),
    "a scale within": lambda: Gated(lambda a, b: F.silu(a) * b * 1.0001),
    "a residual of its own": lambda: Gated(after=lambda x, y: x + y),
    "an input cast down": lambda: Gated(before=lambda x: x.float().double()),
    "a product cast down": lambda: Gated(lambda a, b: (F.silu(a) * b).to(torch.bfloat16).double()),
    "another order": lambda: Gated(lambda a, b: F.silu(a * b)),
    "a sum": lambda: Gated(lambda a, b: F.silu(a) + b),
    "both halves activated": lambda: Gated(lambda a, b: F.silu(a) * F.silu(b)),
    "no activation": lambda: Gated(lambda a, b: a * b),
    "swish of another beta": lambda: Gated(lambda a, b: a * torch.sigmoid(1.7 * a) * b),
    "tanh": lambda: TimmMlp(nn.Tanh),
    "leaky relu": lambda: TimmMlp(lambda: nn.LeakyReLU(1e-4)),
    "a learned activation": lambda: TimmMlp(nn.PReLU),
    "interleaved": lambda: Packed(lambda h: (h[..., ::2], h[..., 1::2])),
    "three parts": lambda: Packed(lambda h: (h[..., :WIDE], h[..., -1:] * h[..., WIDE:])),
    "rows turned": lambda: Gated(before=lambda x: x.flip(1), after=lambda x, y: y.flip(1)),
    "the input is written into": lambda: Gated(before=lambda x: x.mul_(1), after=lambda x, y: (x.zero_(), y)[1]),
    "a tuple": lambda: Gated(after=lambda x, y: (y, None)),
    "a layer twice": lambda: nn.Sequential(layer := nn.Linear(K, K), nn.ReLU(), layer, nn.Linear(K, K)),
    "a weight that other code multiplies by": ReadsWeight,
    "its forward wrapped": lambda: wrapped(TimmMlp()),
    "its activation's forward wrapped": lambda: wrapped(TimmMlp(), "act"),
    "weight_norm": lambda: with_layer(parametrizations.weight_norm),
    "spectral_norm": lambda: with_layer(parametrizations.spectral_norm),
    "the old spectral_norm": lambda: with_layer(nn.utils.spectral_norm),
    "pruned": pruned,
    "a parameter of its own": lambda: with_layer(
        lambda layer: layer.register_parameter("g", nn.Parameter(torch.ones(1)))
    ),
    "a buffer": lambda: with_layer(lambda layer: layer.register_buffer("g", torch.ones(1))),
    "codes": lambda: fe.convert(TimmMlp().requires_grad_(False), "rowwise", frozen="fp8"),
    "a subclass of Linear": lambda: TimmMlp(
        linear=spoiled(nn.Linear, forward=lambda self, x: F.linear(x, self.weight))
    ),
    "eps in training": TrainedEps,
    "eps outside of the root": EpsOutside,
    "unbiased": UnbiasedLayerNorm,
    "a norm with a clamp": ClampedRms,
    "a norm with a scale": ScaledRms,
    "1 - weight": OneMinus,
    "half of the features": HalfRms,
    "over tokens": OverTokens,
    "a norm in FP32": ReturnsFloat,
    "a norm with state": Counting,
    "a batch norm": lambda: nn.BatchNorm1d(K),
    "a group norm": lambda: nn.GroupNorm(1, K),
    "pictures": lambda: LayerNorm2d(K),
    "an RMSNorm with a bias": RmsWithBias,
    "the dtype's eps": lambda: nn.RMSNorm(K),
    "over two dimensions": lambda: nn.LayerNorm((4, K)),
    "a weight per head": lambda: Rms(1e-6, K, {"_parameters": {"weight": nn.Parameter(torch.ones(2, K))}}),
    "a norm wrapped": lambda: wrapped(nn.LayerNorm(K)),
    "a norm under a parametrization": lambda: nn.utils.parametrize.register_parametrization(
        nn.LayerNorm(K), "weight", nn.Identity()
    ),
    "an activation wrapped": lambda: wrapped(nn.GELU()),
    "in place": lambda: nn.ReLU(inplace=True),
    "random": lambda: nn.RReLU(),
    "softmax": lambda: nn.Softmax(-1),
    "a gate alone": lambda: nn.GLU(),
    "identity": nn.Identity,
    "dropout alone": nn.Dropout,
    "gelu + 1e-3": lambda: Function(lambda x: F.gelu(x) + 1e-3),
    "gelu, clipped at 1000": lambda: Function(lambda x: F.gelu(x).clamp(max=1000)),
    "it raises": lambda: Function(lambda x: 1 / 0),
    "it gives back no tensor": lambda: Function(lambda x: 3),
}


def asked(module: nn.Module) -> list[Any]:
    return [norm_of(module), activation_of(module), mlp_of(module)]


@pytest.mark.parametrize("name", NEAR_MISSES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_near_misses_are_left_alone(name: str):
    module = NEAR_MISSES[name]()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    assert asked(module) == [None] * 3
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


def test_a_patched_class_is_what_it_computes(monkeypatch):
    mlp, norm = TimmMlp(), Rms()
    monkeypatch.setattr(TimmMlp, "forward", lambda self, x: 2 * self.fc2(self.act(self.fc1(x))))
    monkeypatch.setattr(Rms, "forward", lambda self, x: F.layer_norm(x, (K,), self.weight, None, 1e-4))
    assert mlp_of(mlp) is None
    assert norm_of(norm) == Norm("layer", 1e-4)


def test_in_evaluation_alone_dropout_makes_no_difference():
    mlp = TimmMlp(drop=0.5)
    assert mlp_of(mlp, training=False) == MLPS["timm Mlp"][1]
    assert survey(mlp, training=False) == {"": MLPS["timm Mlp"][1]}
    assert survey(mlp) == {"act": "gelu"}


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
