"""Modules that merely resemble a formula, which the probe leaves alone and does not change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_modules import (
    WIDE,
    CallsTwice,
    ClampedRms,
    Counting,
    EpsOutside,
    Function,
    Gated,
    HalfRms,
    K,
    LayerNorm2d,
    NoWeight,
    OneMinus,
    OverTokens,
    Packed,
    ReadsWeight,
    ReturnsFloat,
    Rms,
    RmsWithBias,
    ScaledRms,
    TimmMlp,
    TimmSwiGlu,
    TrainedEps,
    UnbiasedLayerNorm,
    what_is,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Quantised(nn.Parameter):
    """A weight as bitsandbytes has it."""


def quantise(layer: Any) -> None:
    layer.weight = Quantised(layer.weight)


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
    "a layer that is called twice": CallsTwice,
    "a weight of a class of its own": lambda: with_layer(quantise),
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
    "over two dimensions": lambda: nn.LayerNorm([4, K]),
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


@pytest.mark.parametrize("name", NEAR_MISSES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_near_misses_are_left_alone(name: str):
    module = NEAR_MISSES[name]()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    assert what_is(module) is None
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
