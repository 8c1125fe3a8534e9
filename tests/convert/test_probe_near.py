"""Modules that merely resemble a formula, which the probe leaves alone and does not change."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probe_modules import WIDE, Function, Gated, K, Packed, Rms, TimmMlp, TimmSwiGlu, by_hand, rms_of, what_is
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def quantise(layer: Any) -> None:
    """As bitsandbytes has it."""
    layer.weight = type("Quantised", (nn.Parameter,), {})(layer.weight)


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


class Guided(torch.autograd.Function):
    """A ReLU whose backward passes no negative gradient (arXiv 1412.6806)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, dy):
        return dy.relu() * (ctx.saved_tensors[0] > 0)


def in_fp16(h: torch.Tensor) -> torch.Tensor:
    return h.clamp(-100, 100) if h.dtype == torch.float16 else h


def with_gradients(h: torch.Tensor) -> torch.Tensor:
    return h * 0.5 if torch.is_grad_enabled() else h


GRADIENTS: dict[str, Callable[[], nn.Module]] = {
    "a straight-through ReLU": lambda: Function(lambda x: x + (F.relu(x) - x).detach()),
    "a guided ReLU": lambda: Function(Guided.apply),
    "detached": lambda: Function(lambda x: F.gelu(x).detach()),
    "twice the gradient": lambda: Function(lambda x: 2 * F.silu(x) - F.silu(x).detach()),
    "detached statistics": lambda: rms_of(
        lambda m, x: m.weight * x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)
    ),
    "a frozen weight": lambda: rms_of(lambda m, x: F.rms_norm(x, (K,), m.weight.detach(), 1e-6)),
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
    "a scaled norm with gradients": lambda: rms_of(lambda m, x: with_gradients(by_hand(m, x))),
    "a norm clamped in FP16": lambda: rms_of(lambda m, x: by_hand(m, in_fp16(x))),
    "a clamp of 65504": lambda: Function(lambda x: F.silu(x).clamp(max=65504.0)),
    "a norm that clamps its input": lambda: rms_of(lambda m, x: by_hand(m, x.clamp(-2e4, 2e4))),
}


class Within(Gated):
    """A gated MLP in a context of its own, or in what `call` puts round it."""

    def __init__(self, context: Any = contextlib.nullcontext, call: Any = lambda core, x: core(x)):
        super().__init__()
        self.context, self.call = context, call

    def forward(self, x):
        with self.context():
            return self.call(super().forward, x)


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0, x)


def refused(x: torch.Tensor) -> torch.Tensor:
    assert not x.isnan().any()
    return x


AROUND: dict[str, Callable[[], nn.Module]] = {
    "autocast off": lambda: Within(lambda: torch.autocast("cpu", enabled=False)),
    "a card's autocast off": lambda: Within(lambda: torch.autocast("cuda", enabled=False)),
    "autocast on": lambda: Within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast to FP16": lambda: Within(lambda: torch.autocast("cpu", torch.float16)),
    "a result in the input's dtype": lambda: Gated(after=lambda x, y: y.to(x.dtype)),
    "checkpointing": lambda: Within(call=lambda core, x: checkpoint(core, x, use_reentrant=False)),
    "checkpointing with reentrance": lambda: Within(call=lambda core, x: checkpoint(core, x, use_reentrant=True)),
    "saved elsewhere": lambda: Within(torch.autograd.graph.save_on_cpu),
    "a filter of NaN before": lambda: Gated(before=without_nan),
    "a filter of NaN within": lambda: Gated(lambda a, b: without_nan(F.silu(a) * b)),
    "a filter of NaN after": lambda: Gated(after=lambda x, y: without_nan(y)),
    "a norm that filters NaN": lambda: rms_of(lambda m, x: by_hand(m, without_nan(x))),
    "an activation that filters NaN": lambda: Function(lambda x: F.silu(without_nan(x))),
    "an assertion": lambda: Gated(before=refused),
}
SEEN: list[torch.Tensor] = []
COUNTS: dict[str, int] = {"calls": 0}


class Penalty:
    """Where a module leaves an auxiliary loss."""

    penalty = 0.0

    def add(self, loss) -> None:
        self.penalty = self.penalty + loss


class Penalised(Gated):
    """Adds to a loss on a helper object, or has the helper add to it."""

    def __init__(self, helper: bool):
        super().__init__()
        self.ctx, self.helper = Penalty(), helper

    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        if self.helper:
            self.ctx.add(h.abs().mean())
        else:
            self.ctx.penalty = self.ctx.penalty + h.abs().mean()
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
    "a penalty on a helper": lambda: Penalised(helper=False),
    "a penalty that a helper adds": lambda: Penalised(helper=True),
    "a global list": Appends,
    "a global dict": CountsCalls,
    "a base's global dict": Inherits,
    "of a part": lambda: TimmMlp(lambda: Function(lambda x: (SEEN.append(x), F.gelu(x))[1])),
}


class CallsTwice(TimmMlp):
    """Calls its first layer again, and makes nothing of it: a hook there sees it."""

    def forward(self, x):
        y = super().forward(x)
        self.fc1(y)
        return y


class ReadsWeight(TimmMlp):
    """Multiplies by the first layer's weight itself."""

    def forward(self, x):
        return self.fc2(self.act(F.linear(x, self.fc1.weight, self.fc1.bias)))


class LayerNorm2d(nn.LayerNorm):
    """timm's: over the channels of pictures [N, C, H, W]."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scaled(nn.Linear):
    """A subclass of Linear with code of its own."""

    def forward(self, input):
        return F.linear(input, self.weight)


def with_state(module: nn.Module, **state: Any) -> nn.Module:
    """A module with more parameters or buffers."""
    for name, value in state.items():
        setattr(module, name, value) if isinstance(value, nn.Parameter) else module.register_buffer(name, value)
    return module


NEAR_MISSES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: TimmMlp(drop=0.1).eval(),
    "dropout by function": lambda: Gated(after=lambda x, y: F.dropout(y, 0.1)),
    "dropout of everything": lambda: TimmMlp(drop=1.0),
    "a norm inside": lambda: TimmMlp(norm=nn.LayerNorm(WIDE)),
    "a norm without parameters inside": lambda: TimmSwiGlu(Function(lambda x: F.rms_norm(x, (x.shape[-1],), eps=1e-7))),
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
    "pruned": lambda: with_layer(lambda layer: prune.l1_unstructured(layer, "weight", 0.5)),
    "a parameter of its own": lambda: with_layer(lambda layer: with_state(layer, g=nn.Parameter(torch.ones(1)))),
    "a buffer": lambda: with_layer(lambda layer: with_state(layer, g=torch.ones(1))),
    "codes": lambda: fe.convert(TimmMlp().requires_grad_(False), "rowwise", frozen="fp8"),
    "a subclass of Linear": lambda: TimmMlp(linear=Scaled),
    "eps in training": lambda: rms_of(lambda m, x: F.rms_norm(x, (K,), m.weight, 1e-5 if m.training else 1e-6)),
    "eps outside of the root": lambda: rms_of(
        lambda m, x: m.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6)
    ),
    "unbiased": lambda: rms_of(  # divides by K - 1
        lambda m, x: m.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()
    ),
    "a norm with a clamp": lambda: rms_of(lambda m, x: by_hand(m, x).clamp(-3, 3)),
    "a norm with a scale": lambda: rms_of(lambda m, x: by_hand(m, x) * 1.001),
    "1 - weight": lambda: rms_of(lambda m, x: by_hand(m, x) / m.weight * (1 - m.weight)),
    "half of the features": lambda: rms_of(
        lambda m, x: m.weight * x * torch.rsqrt(x[..., : K // 2].square().mean(-1, keepdim=True) + 1e-6)
    ),
    "over tokens": lambda: rms_of(lambda m, x: m.weight * x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-6)),
    "a norm in FP32": lambda: rms_of(lambda m, x: by_hand(m, x.float())),
    "a norm with state": lambda: with_state(Rms(), seen=torch.zeros(())),
    "a batch norm": lambda: nn.BatchNorm1d(K),
    "a group norm": lambda: nn.GroupNorm(1, K),
    "pictures": lambda: LayerNorm2d(K),
    "an RMSNorm with a bias": lambda: with_state(
        rms_of(lambda m, x: by_hand(m, x) + m.bias), bias=nn.Parameter(torch.zeros(K))
    ),
    "the dtype's eps": lambda: nn.RMSNorm(K),
    "over two dimensions": lambda: nn.LayerNorm([4, K]),
    "a weight per head": lambda: Rms(1e-6, (2, K)),
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
    **AROUND,
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
