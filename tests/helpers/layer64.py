"""A transformer layer written out in float64, from a layer's parameters and options, in words of its own.

Rotation by complex numbers, softmax by exponentials, keys repeated for each group of queries.
"""

import math
from typing import Any

import torch
from activations import exact
from torch import nn
from torch.nn import functional as F

import fp8engine as fe

Results = dict[str, torch.Tensor]


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [batch, heads, T, D] at positions 0, 1, ..."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[2]).double()[:, None] * theta ** (-torch.arange(0, d, 2).double() / d)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones((), dtype=torch.float64), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


class Exact:
    """layer: any fe.TransformerLayer without dropout; p: its parameters in float64, leaves."""

    def __init__(self, layer: fe.TransformerLayer):
        self.layer: Any = layer
        self.p = {name: each.detach().double().requires_grad_() for name, each in layer.named_parameters()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.p[f"{name}.weight"], self.p.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gamma, beta, of = self.p[f"{name}.weight"], self.p.get(f"{name}.bias"), getattr(self.layer, name)
        gamma = gamma + 1 if type(of).__name__.startswith("ZeroCentred") else gamma
        if isinstance(of, nn.LayerNorm):
            return F.layer_norm(x, x.shape[-1:], gamma, beta, of.eps)
        return x / (x.square().mean(-1, keepdim=True) + of.eps).sqrt() * gamma

    def attention(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads, t = self.layer.self_attn.heads, x.shape[1]
        q, k, v = (self.linear(f"self_attn.{n}_proj", x).unflatten(-1, (-1, self.layer.self_attn.width)) for n in "qkv")
        if heads.qk_norm is not None:
            q, k = (
                part
                / (part.square().mean(-1, keepdim=True) + heads.qk_norm).sqrt()
                * self.p[f"self_attn.{n}_norm.weight"]
                for part, n in ((q, "q"), (k, "k"))
            )
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if heads.theta is not None:
            q, k = rotated(q, heads.theta), rotated(k, heads.theta)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        back = torch.arange(t)[:, None] - torch.arange(t)
        seen = (back >= 0) | (not heads.causal)
        if heads.window is not None:
            seen = seen & (back < heads.window)
        seen = seen if mask is None else seen & mask[:, None, None]
        weights = (scores - scores.max()).exp() * seen
        weights = weights / weights.sum(-1, keepdim=True)
        return self.linear("self_attn.o_proj", (weights @ v).transpose(1, 2).flatten(-2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        layers = [name for name in ("mlp.gate_proj", "mlp.up_proj") if f"{name}.weight" in self.p]
        made = torch.cat([self.linear(name, x) for name in layers], dim=-1)
        return self.linear("mlp.down_proj", exact(made, self.layer.mlp.activation))

    def __call__(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        match self.layer.placement:
            case "pre":
                y = x + self.attention(self.norm("input_layernorm", x), mask)
                return y + self.mlp(self.norm("post_attention_layernorm", y))
            case "post":
                y = self.norm("post_attention_layernorm", x + self.attention(x, mask))
                return self.norm("post_feedforward_layernorm", y + self.mlp(y))
            case shared:
                second = "input_layernorm" if shared == "parallel shared" else "post_attention_layernorm"
                attended = self.attention(self.norm("input_layernorm", x), mask)
                return x + attended + self.mlp(self.norm(second, x))


def exact_step(layer: fe.TransformerLayer, x: torch.Tensor, dy: torch.Tensor, mask=None) -> Results:
    """y, dx and the parameters' gradients by name, float64."""
    exact, leaf = Exact(layer), x.detach().double().requires_grad_()
    y = exact(leaf, mask)
    y.backward(dy.double())
    assert leaf.grad is not None
    grads = {name: each.grad for name, each in exact.p.items() if each.grad is not None}
    return {"y": y.detach(), "dx": leaf.grad, **grads}


def step(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, mask=None) -> Results:
    """The same of a layer as it is."""
    layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf, mask)
    y.backward(dy.to(y.dtype))
    assert leaf.grad is not None
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": leaf.grad, **grads}


def lively(layer: Any) -> Any:
    """Norms and biases that are not ones and zeros."""
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p)) if "bias" in name else p.add_(torch.rand_like(p) - 0.5)
    return layer
