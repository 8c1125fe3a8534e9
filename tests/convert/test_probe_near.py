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


class Guided(torch.autograd.Function):
    """A ReLU whose backward passes no negative gradient (arXiv 1412.6806)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, dy):
        return dy.relu() * (ctx.saved_tensors[0] > 0)


class DetachedRms(Rms):
    """Takes its statistics as constants."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)


class FrozenRms(Rms):
    """Gives its weight no gradient."""

    def forward(self, x):
        return F.rms_norm(x, (K,), self.weight.detach(), 1e-6)


class ClampsInput(Rms):
    """Clamps what it reads, far out."""

    def forward(self, x):
        return super().forward(x.clamp(-2e4, 2e4))


def in_fp16(h: torch.Tensor) -> torch.Tensor:
    return h.clamp(-100, 100) if h.dtype == torch.float16 else h


def with_gradients(h: torch.Tensor) -> torch.Tensor:
    return h * 0.5 if torch.is_grad_enabled() else h


GRADIENTS: dict[str, Callable[[], nn.Module]] = {
    "a straight-through ReLU": lambda: Function(lambda x: x + (F.relu(x) - x).detach()),
    "a guided ReLU": lambda: Function(Guided.apply),
    "detached": lambda: Function(lambda x: F.gelu(x).detach()),
    "twice the gradient": lambda: Function(lambda x: 2 * F.silu(x) - F.silu(x).detach()),
    "detached statistics": DetachedRms,
    "a frozen weight": FrozenRms,
    "a detached gate": lambda: Gated(lambda a, b: F.silu(a).detach() * b),
    "a detached factor": lambda: Gated(lambda a, b: F.silu(a) * b.detach()),
    "a guided gate": lambda: Gated(lambda a, b: Guided.apply(a) * b),
    "a detached input": lambda: Gated(before=lambda x: x.detach()),
    "a detached result": lambda: Gated(after=lambda x, y: y.detach()),
    "half of the result's gradient": lambda: Gated(after=lambda x, y: 0.5 * y + 0.5 * y.detach()),
}
BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "a clamp in FP16": lambda: Gated(lambda a, b: in_fp16(F.silu(a) * b)),
    "FP16's range": lambda: Gated(lambda a, b: (F.silu(a) * b).clamp(-65504, 65504)),
    "an activation clamped in FP16": lambda: Function(lambda x: in_fp16(F.gelu(x))),
    "a scale in FP32": lambda: Function(lambda x: F.gelu(x) * (1 + (x.dtype == torch.float32))),
    "a scale with gradients": lambda: Gated(lambda a, b: with_gradients(F.silu(a) * b)),
    "a scaled activation with gradients": lambda: Function(lambda x: with_gradients(F.relu(x))),
    "a scaled norm with gradients": lambda: spoiled(
        Rms, forward=lambda self, x: with_gradients(Rms.forward(self, x))
    )(),
    "a norm clamped in FP16": lambda: spoiled(Rms, forward=lambda self, x: Rms.forward(self, in_fp16(x)))(),
    "a clamp of 65504": lambda: Function(lambda x: F.silu(x).clamp(max=65504.0)),
    "a norm that clamps its input": ClampsInput,
}


class Penalty:
    """Where a module leaves an auxiliary loss."""

    penalty = 0.0

    def add(self, loss) -> None:
        self.penalty = self.penalty + loss


SEEN: list[torch.Tensor] = []
COUNTS: dict[str, int] = {"calls": 0}


class Penalised(Gated):
    """Adds to a loss on a helper object."""

    def __init__(self):
        super().__init__()
        self.ctx = Penalty()

    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        self.ctx.penalty = self.ctx.penalty + h.abs().mean()
        return self.w2(h)


class CallsHelper(Penalised):
    """Has the helper add to it."""

    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        self.ctx.add(h.abs().mean())
        return self.w2(h)


class Appends(Gated):
    """Appends to a global list, in a method of its own."""

    def note(self, h):
        SEEN.append(h)
        return h

    def forward(self, x):
        return self.w2(self.note(F.silu(self.w1(x)) * self.w3(x)))


class CountsCalls(Rms):
    """Counts its calls in a global dict."""

    def forward(self, x):
        COUNTS["calls"] += 1
        return super().forward(x)


class Inherits(CountsCalls):
    """Its base counts."""

    def forward(self, x):
        return super().forward(x)


SIDE_EFFECTS: dict[str, Callable[[], nn.Module]] = {
    "a penalty on a helper": Penalised,
    "a penalty that a helper adds": CallsHelper,
    "a global list": Appends,
    "a global dict": CountsCalls,
    "a base's global dict": Inherits,
    "of a part": lambda: TimmMlp(lambda: Function(lambda x: (SEEN.append(x), F.gelu(x))[1])),
}


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
    **GRADIENTS,
    **BRANCHES,
    **SIDE_EFFECTS,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_near_misses_are_left_alone(name: str):
    module = NEAR_MISSES[name]()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    assert what_is(module) is None
    assert (SEEN, COUNTS) == ([], {"calls": 0}), "code that keeps what it saw does not run"
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
