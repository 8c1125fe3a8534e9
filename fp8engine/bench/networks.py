"""Networks to measure, in plain torch, which a bare checkout has: a decoder block; models built of it.

block   x + attention(norm(x)), then x + mlp(norm(x)); RMSNorm, rotary positions, grouped queries, SwiGLU as in Llama
llama   tokens -> blocks, causal -> logits        bert   tokens -> blocks with LayerNorm and GELU -> logits
vit     patches of images -> such blocks -> logits of classes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine.autograd.attention import Cache, Scores, attention, rotate
from fp8engine.nn import Heads, TransformerLayer
from fp8engine.nn.layernorm_linear import norm_of


class Size(NamedTuple):
    """hidden, intermediate: columns.  heads, of_keys: of queries and keys.  layers, vocabulary: of a model."""

    hidden: int
    intermediate: int
    heads: int
    of_keys: int
    layers: int = 1
    vocabulary: int = 256

    def __str__(self) -> str:
        return f"h{self.hidden} f{self.intermediate} {self.heads}/{self.of_keys} heads {self.layers} layers"


class Attention(nn.Module):
    """Projections named as transformers' Llama names them."""

    def __init__(self, size: Size, theta: float | None, causal: bool):
        super().__init__()
        self.width, self.theta, self.scores = size.hidden // size.heads, theta, Scores(causal)
        self.q_proj = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.of_keys * self.width, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.of_keys * self.width, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """x [batch, T, hidden].  cache: keys and values of earlier calls; this call's are appended."""
        heads = [p(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = heads
        if self.theta is not None:
            start = 0 if cache is None else len(cache)
            positions = torch.arange(start, start + x.shape[1], device=x.device)
            q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(attention(q, k, v, scores=self.scores).transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size.hidden, size.intermediate, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    """GELU."""

    def __init__(self, size: Size):
        super().__init__()
        self.up, self.down = nn.Linear(size.hidden, size.intermediate), nn.Linear(size.intermediate, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]."""
        return self.down(F.gelu(self.up(x)))


def _norm(size: Size, llama: bool) -> nn.Module:
    """With Llama's eps: RMSNorm's default depends on the dtype, and such a norm writes no codes."""
    return nn.RMSNorm(size.hidden, eps=1e-5) if llama else nn.LayerNorm(size.hidden)


class Block(nn.Module):
    """Pre-norm; llama: RMSNorm, rotary positions, causal, SwiGLU; otherwise LayerNorm, all to all, GELU."""

    def __init__(self, size: Size, llama: bool = True):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (_norm(size, llama) for _ in range(2))
        self.self_attn = Attention(size, 1e4 if llama else None, llama)
        self.mlp = Gated(size) if llama else Plain(size)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """x [batch, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def fused(network: nn.Module, recipe: str, **memory: Any) -> nn.Module:
    """A Block, or a Model whose Blocks are replaced, as fe.TransformerLayer: same weights.  memory: its options."""
    if isinstance(network, Model):
        network.blocks = nn.ModuleList(fused(block, recipe, **memory) for block in network.blocks)
        return network
    own: Any = network
    attention, norm, mlp = own.self_attn, norm_of(own.input_layernorm).norm, own.mlp
    weights = {
        name.replace("mlp.up.", "mlp.up_proj.").replace("mlp.down.", "mlp.down_proj."): value
        for name, value in own.state_dict().items()
    }
    count, of_keys = (layer.out_features // attention.width for layer in (attention.q_proj, attention.k_proj))
    made = TransformerLayer(
        attention.q_proj.in_features,
        weights["mlp.up_proj.weight"].shape[0],
        Heads(count, of_keys, theta=attention.theta, causal=attention.scores.causal),
        "swiglu" if isinstance(mlp, Gated) else "gelu",
        () if isinstance(mlp, Gated) else ("up_proj", "down_proj"),
        recipe=recipe,
        norm=norm.kind,
        eps=norm.eps,
        device=attention.q_proj.weight.device,
        dtype=attention.q_proj.weight.dtype,
        **memory,
    )
    made.load_state_dict(weights)
    return made


class Model(nn.Module):
    """Tokens, or patches where `patch` is their size in pixels, to logits."""

    def __init__(self, size: Size, llama: bool, patch: int | None = None):
        super().__init__()
        if patch is None:
            self.embed: nn.Module = nn.Embedding(size.vocabulary, size.hidden)
        else:
            self.embed = nn.Conv2d(3, size.hidden, patch, stride=patch)
        self.blocks = nn.ModuleList(Block(size, llama) for _ in range(size.layers))
        self.norm = _norm(size, llama)
        self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, caches: Sequence[Cache] = ()) -> torch.Tensor:
        """Tokens [batch, T] -> [batch, T, vocabulary]; images [batch, 3, H, W] -> [batch, patches, vocabulary].

        caches: one a block, where tokens come piece by piece.
        """
        x = self.embed(inputs)
        if x.dim() == 4:
            x = x.flatten(2).mT
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i]) if caches else block(x)
        return self.lm_head(self.norm(x))


class Network(NamedTuple):
    """make: () -> module in FP32 on the CPU.  inputs: (tokens, sequence, device, seed) -> its argument."""

    make: Callable[[Size], nn.Module]
    inputs: Callable[[Size, int, int, torch.Generator], torch.Tensor]


def _activations(size: Size, tokens: int, sequence: int, random: torch.Generator) -> torch.Tensor:
    shape = (max(tokens // sequence, 1), sequence, size.hidden)
    return torch.randn(shape, generator=random, device=random.device)


def _tokens(size: Size, tokens: int, sequence: int, random: torch.Generator) -> torch.Tensor:
    shape = (max(tokens // sequence, 1), sequence)
    return torch.randint(size.vocabulary, shape, generator=random, device=random.device)


PATCH = 4


def _images(size: Size, tokens: int, sequence: int, random: torch.Generator) -> torch.Tensor:
    side = PATCH * max(round(sequence**0.5), 1)
    return torch.randn(max(tokens // sequence, 1), 3, side, side, generator=random, device=random.device)


NETWORKS = {
    "block": Network(Block, _activations),
    "llama": Network(lambda size: Model(size, True), _tokens),
    "bert": Network(lambda size: Model(size, False), _tokens),
    "vit": Network(lambda size: Model(size, False, PATCH), _images),
}
