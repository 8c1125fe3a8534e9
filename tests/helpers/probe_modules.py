"""Small modules that are a norm or an MLP, as timm, diffusers and hands write them, or merely resemble one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine.convert.probe import survey

K, WIDE = 32, 48
Layer = Callable[..., nn.Module]


def what_is(module: nn.Module) -> Any:
    """What the probe knows a module itself to be, beside what it may know of its parts; None for nothing."""
    return survey(module).get("")


class TimmMlp(nn.Module):
    """timm.layers.Mlp."""

    def __init__(
        self, act: Layer = nn.GELU, drop: float = 0.0, norm: nn.Module | None = None, linear: Layer = nn.Linear
    ):
        super().__init__()
        self.fc1: Any = linear(K, WIDE)
        self.act, self.drop1 = act(), nn.Dropout(drop)
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


class MeanByProduct(Rms):
    """Sums in FP32 by a product of matrices, which autocast would make in BF16."""

    def forward(self, x):
        x32 = x.float()
        squares = x32.square() @ torch.full((K, 1), 1 / K, dtype=torch.float32, device=x.device)
        return self.weight * (x32 * torch.rsqrt(squares + self.eps)).to(x.dtype)


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
