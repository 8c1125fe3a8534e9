"""A table of small models, one row for each feature of a layer, under which every law of tests/laws is checked.

A new feature adds one row.  Every row takes x [batch, T, WIDTH] in FP32 and gives a tensor of that shape, so that one
training loop and one comparison serve all of them (trials.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from chains import storing
from support import Block, converted
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.numerics.recipe import Recipe

WIDTH, INNER = 32, 48
SIZES = [5, 0, 3]  # rows of the first experts; the last one has all others


class Scenario(NamedTuple):
    """A row of the table.

    make: recipe, fuse (an option of fe.convert) -> the model.
    converts: whether fe.convert makes it, so that fuse means something.
    excludes: laws that do not hold for it, and recipes that it has not, as "recipe bf16"; the row says why.
    """

    name: str
    make: Callable[[Recipe, bool | None], nn.Module]
    converts: bool
    excludes: tuple[str, ...] = ()

    def build(self, recipe: Recipe, fuse: bool | None = None) -> Any:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        return self.make(recipe, fuse)


def plain(name: str, make: Callable[[], nn.Module], *excludes: str, **options: Any) -> Scenario:
    """A row of a model that fe.convert converts with those options."""
    return Scenario(name, lambda recipe, fuse: converted(make(), recipe, fuse=fuse, **options), True, excludes)


def ours(name: str, make: Callable[[Recipe], nn.Module], *excludes: str) -> Scenario:
    """A row of a model that takes its recipe itself."""
    return Scenario(name, lambda recipe, _: make(recipe), False, excludes)


def stack(bias: bool = True) -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, INNER, bias), nn.Tanh(), nn.Linear(INNER, WIDTH, bias))


class Siblings(nn.Module):
    """Three layers that read one tensor, as q, k and v do; norm: what makes it."""

    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        self.norm = norm or nn.Identity()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return x + self.q(h) * self.k(h).sigmoid() + self.v(h)


class Gated(nn.Module):
    """An MLP with a gate, as fe.convert's probe knows it."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Repeated(nn.Module):
    """One layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Attention(nn.Module):
    """Attention of somebody's own block: one head of 64 columns, the fewest that FP8 attention takes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 64)).transpose(1, 2).chunk(3, 1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Four experts, each of two layers."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.up = GroupedLinear(4, WIDTH, INNER, recipe=recipe)
        self.down = GroupedLinear(4, INNER, WIDTH, recipe=recipe)

    def forward(self, x):
        rows = math.prod(x.shape[:-1])
        sizes = torch.tensor([*SIZES, rows - sum(SIZES)])
        return self.down(self.up(x.reshape(rows, WIDTH), sizes).tanh(), sizes).view(x.shape)


class InBfloat16(nn.Module):
    """A model in BF16 among tensors of FP32."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, x):
        return self.inner(x.bfloat16()).float()


class UnderAutocast(nn.Module):
    """A model in FP32 whose matmuls are in BF16."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def smoothed(recipe: Recipe, fuse: bool | None) -> nn.Module:
    return fe.smooth(converted(nn.Sequential(nn.RMSNorm(WIDTH, 1e-6), Gated()), recipe, fuse=fuse), "1.down")


def transformer(recipe: Recipe, **options: Any) -> nn.Module:
    heads = fe.Heads(4, of_keys=2, theta=1e4, causal=True)
    return fe.TransformerLayer(WIDTH, INNER, heads, "swiglu", recipe=recipe, norm="rms", **options)


PARTS = tuple(f"checkpoint of {which}" for which in ("parts", "parts, reentrant", "whole and parts"))

TABLE = [
    plain("linear", stack),
    plain("linear without bias", lambda: stack(bias=False)),
    ours("one layer without a root", lambda recipe: fe.Linear(WIDTH, WIDTH, recipe=recipe)),
    plain("conv1d", lambda: nn.Sequential(Conv1D(INNER, WIDTH), nn.GELU(), Conv1D(WIDTH, INNER))),
    # Its input's gradient is a sum of five, in the order in which a backward pass comes to them.
    plain("siblings", Siblings, "checkpoint of parts, reentrant"),
    plain("siblings behind RMSNorm", lambda: Siblings(nn.RMSNorm(WIDTH, 1e-6)), "checkpoint of parts, reentrant"),
    plain("siblings behind LayerNorm", lambda: Siblings(nn.LayerNorm(WIDTH))),
    plain("activation", lambda: nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))),
    plain("gated mlp", lambda: nn.Sequential(nn.RMSNorm(WIDTH, 1e-6), Gated())),
    plain("two blocks", lambda: nn.Sequential(Block(WIDTH), Block(WIDTH))),
    # It notes in which format it ran, on itself: Dynamo allows no such write in a checkpoint's body.
    plain("attention in fp8", Attention, "checkpoint in a graph", attention="fp8"),
    # In 16 bits there are no codes to freeze.  A frozen layer, whose scales are never predicted, shows the amax of what
    # it read last, of an evaluation too; a graph shows none.  gloo sends no FP8 tensor, and ranks do not divide codes.
    plain("frozen codes and an adapter", Adapted, "recipe bf16", "evaluation", "compiled", "ranks", frozen="fp8"),
    plain("tied weights", Tied),
    # It is described by the call that was cast last, which is the first one where a backward pass repeats both; without
    # gradients its weight is cast once for both.
    plain("a layer called twice", Repeated, "checkpoint of whole, reentrant", *PARTS),
    plain("overrides", stack, overrides={"2": "rowwise_gw_hp"}),
    plain("one layer in 16 bits", lambda: Siblings(nn.LayerNorm(WIDTH)), overrides={"k": "bf16"}),
    # A graph stores 16 bits where eager code stores codes; a reentrant checkpoint of the reader alone detaches its
    # input, whose amax then stays with the layer that has stored it.  Its first layer's scales are each rank's own.
    plain(
        "stored results",
        lambda: nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)),
        "compiled",
        "checkpoint of parts, reentrant",
        "ranks",
        overrides={"0": storing()},
    ),
    # There is nothing to convert to BF16; torch sums a BF16 norm's gradients in another order than ours.
    plain("bf16", lambda: InBfloat16(Block(WIDTH)), "recipe bf16", "fused"),
    plain("autocast", lambda: UnderAutocast(Block(WIDTH))),
    Scenario("smooth", smoothed, True, ("ranks",)),  # outliers are shared as each rank's own input asks
    ours("experts", Experts, "ranks"),  # its SIZES are of a whole batch
    ours("layer norm and linear", lambda recipe: fe.LayerNormLinear(WIDTH, WIDTH, recipe=recipe)),
    ours("layer norm and mlp", lambda recipe: fe.LayerNormMLP(WIDTH, INNER, "gelu", recipe=recipe)),
    # A layer whose operand is made again from what the norm has kept is not checkpointed by itself.
    ours(
        "layer norm and mlp, recomputed from fp8",
        lambda recipe: fe.LayerNormMLP(WIDTH, INNER, "swiglu", recipe=recipe, recompute=True, store="fp8"),
        *PARTS,
    ),
    ours(
        "layer norm and mlp, recomputed",
        lambda recipe: fe.LayerNormMLP(WIDTH, INNER, "swiglu", recipe=recipe, recompute=True),
        *PARTS,
    ),
    ours(
        "layer norm and linear, recomputed from fp8",
        lambda recipe: fe.LayerNormLinear(WIDTH, WIDTH, recipe=recipe, recompute=True, store="fp8"),
        *PARTS,
    ),
    ours("transformer", transformer),
    ours(
        "transformer with norms at the end, recomputed from fp8",
        lambda recipe: transformer(recipe, placement="post", recompute=True, store="fp8"),
        *PARTS,
    ),
    # A graph draws other numbers, and so do ranks.
    ours("transformer with dropout", lambda recipe: transformer(recipe, dropout=0.3), "compiled", "ranks"),
    ours(
        "transformer with norms at the end and dropout, recomputed",
        lambda recipe: transformer(recipe, placement="post", dropout=0.3, recompute=True),
        "compiled",
        "ranks",
        *PARTS,
    ),
]
