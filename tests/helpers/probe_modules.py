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
        self.drop1, self.norm, self.fc2, self.drop2 = nn.Dropout(0), nn.Identity(), nn.Linear(WIDE, K), nn.Dropout(0)

    def forward(self, x):
        x1, x2 = self.fc1(x).chunk(2, dim=-1)
        x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        return self.drop2(self.fc2(self.norm(self.drop1(x))))


class TimmSwiGlu(nn.Module):
    """timm.layers.SwiGLU: two layers."""

    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        self.fc1_g, self.fc1_x, self.act = nn.Linear(K, WIDE), nn.Linear(K, WIDE), nn.SiLU()
        self.norm, self.fc2 = norm or nn.Identity(), nn.Linear(WIDE, K)

    def forward(self, x):
        return self.fc2(self.norm(self.act(self.fc1_g(x)) * self.fc1_x(x)))


class Projected(nn.Module):
    """A function of a layer's result, as diffusers.models.activations has GEGLU and GELU."""

    def __init__(self, features: int, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.proj, self.function = nn.Linear(K, features), function

    def forward(self, x):
        return self.function(self.proj(x))


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


def by_hand(rms: Any, x: torch.Tensor) -> torch.Tensor:
    """An RMSNorm as Llama's code has it."""
    x32 = x.float()
    return rms.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + rms.eps)).to(x.dtype)


Formula = Callable[[Any, torch.Tensor], torch.Tensor]


class Rms(nn.Module):
    """An RMSNorm by hand, or what `formula` makes of the module and its input."""

    def __init__(self, eps: float | None = 1e-6, size: int | tuple = K, formula: Formula = by_hand):
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.ones(size)), eps, formula

    def forward(self, x):
        return self.formula(self, x)


def rms_of(formula: Formula) -> nn.Module:
    return Rms(formula=formula)


class LayerNorm1P(nn.LayerNorm):
    """NVIDIA's, which stores its weight less 1."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Function(nn.Module):
    """A module that computes what it is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)
