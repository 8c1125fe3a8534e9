"""Networks to train and measure, in plain torch, which a bare checkout has: a decoder block; models built of it.

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
from fp8engine.bench.steps import Case, Variant, as_graphs
from fp8engine.bench.steps import variants as steps_variants
from fp8engine.nn import Heads, TransformerLayer
from fp8engine.nn.layernorm_linear import norm_of

PATCH = 4  # pixels
MEMORY = {"": {}, ", recompute": {"recompute": True}, ", FP8 inputs": {"recompute": True, "store": "fp8"}}


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


class MLP(nn.Module):
    """SwiGLU without biases, or GELU with them; layers named as transformers' Llama names them."""

    def __init__(self, size: Size, gated: bool):
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False) if gated else None
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=not gated)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=not gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]."""
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _norm(size: Size, llama: bool) -> nn.Module:
    """With Llama's eps: RMSNorm's default depends on the dtype, and such a norm writes no codes."""
    return nn.RMSNorm(size.hidden, eps=1e-5) if llama else nn.LayerNorm(size.hidden)


class Block(nn.Module):
    """Pre-norm; llama: RMSNorm, rotary positions, causal, SwiGLU; otherwise LayerNorm, all to all, GELU."""

    def __init__(self, size: Size, llama: bool = True):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (_norm(size, llama) for _ in range(2))
        self.self_attn = Attention(size, 1e4 if llama else None, llama)
        self.mlp = MLP(size, gated=llama)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """x [batch, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def fused(network: nn.Module, recipe: str, **memory: Any) -> nn.Module:
    """A Block, or a Model whose Blocks are replaced, as fe.TransformerLayer: same weights.  memory: its options."""
    if isinstance(network, Model):
        network.blocks = nn.ModuleList(fused(block, recipe, **memory) for block in network.blocks)
        return network
    block: Any = network
    attention, norm, gated = block.self_attn, norm_of(block.input_layernorm).norm, block.mlp.gate_proj is not None
    hidden, weight = attention.q_proj.in_features, attention.q_proj.weight
    count, of_keys = (layer.out_features // attention.width for layer in (attention.q_proj, attention.k_proj))
    made = TransformerLayer(
        hidden,
        block.mlp.up_proj.out_features,
        Heads(count, of_keys, theta=attention.theta, causal=attention.scores.causal),
        "swiglu" if gated else "gelu",
        () if gated else ("up_proj", "down_proj"),
        recipe=recipe,
        norm=norm.kind,
        eps=norm.eps,
        device=weight.device,
        dtype=weight.dtype,
        **memory,
    )
    made.load_state_dict(block.state_dict())
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


# name -> how it is made: in FP32
NETWORKS: dict[str, Callable[[Size], nn.Module]] = {
    "block": Block,
    "llama": lambda size: Model(size, True),
    "bert": lambda size: Model(size, False),
    "vit": lambda size: Model(size, False, PATCH),
}


def case(name: str, size: Size, tokens: int, sequence: int, target: float | None = None) -> Case:
    """One of NETWORKS to be trained on so many tokens, or patches, of random inputs in sequences of that length."""
    batch = max(tokens // sequence, 1)

    def inputs(random: torch.Generator) -> torch.Tensor:
        if name in ("llama", "bert"):
            return torch.randint(size.vocabulary, (batch, sequence), generator=random, device=random.device)
        side = PATCH * max(round(sequence**0.5), 1)
        shape = (batch, sequence, size.hidden) if name == "block" else (batch, 3, side, side)
        return torch.randn(shape, generator=random, device=random.device)

    about = {"network": name, "size": str(size), "tokens": tokens}
    return Case(about, lambda: NETWORKS[name](size), inputs, target)


def variants(where: torch.device, in_graphs: bool) -> dict[str, Variant]:
    """Those of steps.py, and "layer X": every block an fe.TransformerLayer, with its memory options."""
    layers = {f"layer current{label}": Variant(_layer(**memory)) for label, memory in MEMORY.items()}
    compiled = as_graphs({"layer current": layers["layer current"]}, where) if in_graphs else {}
    return {**steps_variants(where, in_graphs), **layers, **compiled}


def _layer(**memory: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda network: fused(network.bfloat16(), "current", **memory)
