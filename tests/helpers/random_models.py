"""Random small models and training programs, for the fuzzers of tests/nightly; all of a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import fp8engine as fe

RECIPES = {
    "current": fe.current,
    "delayed": lambda: fe.delayed(history=3, margin=1),
    "delayed, most recent": lambda: fe.delayed(history=4, algo="most_recent"),
    "delayed, no copies": lambda: replace(fe.delayed(history=2), cache_weights=False),
    "rowwise": fe.rowwise,
    "rowwise_exact": lambda: fe.rowwise(power_of_2=False),
    "rowwise_gw_hp": fe.rowwise_gw_hp,
    "blockwise": lambda: fe.blockwise(16),
    "blockwise_exact": lambda: fe.blockwise(16, power_of_2=False),
    "auto": lambda: fe.auto(interval=2),
    "auto, frozen": lambda: fe.auto(interval=2, freeze_after=4),
    "auto, speed": lambda: fe.auto(interval=3, objective="speed"),
    "auto, budget": lambda: fe.auto(interval=2, budget=0.01),
}
ACTIVATIONS = {"gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU, "tanh gelu": lambda: nn.GELU(approximate="tanh")}


class Siblings(nn.Module):
    """norm -> q, k, v -> o, as attention's projections read one tensor; between them what other code may do to it."""

    def __init__(self, width: int, heads: int, draw: random.Random):
        super().__init__()
        bias = draw.random() < 0.5
        self.norm = _norm(width, draw)
        self.q, self.k, self.v = (nn.Linear(width, heads, bias) for _ in range(3))
        self.o = nn.Linear(heads, width, draw.random() < 0.5)
        own = not isinstance(self.norm, nn.Identity)  # else what is written into is the block's input
        self.between = draw.choice(["nothing", "nothing", "another", *["in place", "data"] * own])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q = self.q(h)
        if self.between == "in place":
            with torch.no_grad():
                h.mul_(0.5)
        elif self.between == "data":
            h.data.add_(0.25)
        elif self.between == "another":
            h = h * 2
        mixed = torch.tanh(q) * torch.sigmoid(self.k(h)) + self.v(h)
        return x + self.o(mixed)


class Mlp(nn.Module):
    """norm -> down(act(gate) * up), or down(act(up))."""

    def __init__(self, width: int, hidden: int, draw: random.Random):
        super().__init__()
        self.norm, self.gated = _norm(width, draw), draw.random() < 0.5
        self.act = ACTIVATIONS[draw.choice(sorted(ACTIVATIONS))]()
        self.up = nn.Linear(width, hidden, draw.random() < 0.5)
        self.gate = nn.Linear(width, hidden, bias=False) if self.gated else None
        self.down = nn.Linear(hidden, width, draw.random() < 0.5)
        self.scaled = self.gated and draw.random() < 0.2  # torch needs an activation's own result again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y = self.act(self.gate(h)) * self.up(h) if self.gate is not None else self.act(self.up(h))
        if self.scaled:
            y *= 0.7  # in place, on what an activation has made
        return x + self.down(y)


class Twice(nn.Module):
    """One layer called twice, on one tensor and on another."""

    def __init__(self, width: int, draw: random.Random):
        super().__init__()
        self.one, self.same = nn.Linear(width, width), draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.one(x)
        return torch.tanh(first) + self.one(x if self.same else first)


class Tied(nn.Module):
    """Two layers of one weight: of an nn.Linear each, or of a Conv1D of transformers, whose weight is [K, N]."""

    def __init__(self, width: int, hidden: int, draw: random.Random):
        super().__init__()
        kind: Any = draw.choice([nn.Linear, Conv1D])
        self.norm = _norm(width, draw)
        # Conv1D's arguments are the other way round.
        one, two = (kind(hidden, width) if kind is Conv1D else kind(width, hidden) for _ in range(2))
        self.one, self.two, self.back = one, two, nn.Linear(hidden, width)
        if draw.random() < 0.7:
            two.weight = one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.back(torch.tanh(self.one(h)) * self.two(h))


class Experts(nn.Module):
    """Rows that are divided over experts, in the order of the rows; some of the experts may have none."""

    def __init__(self, width: int, hidden: int, draw: random.Random):
        super().__init__()
        self.count = draw.randint(1, 4)
        self.share = [draw.choice([0, 1, 1, 3]) for _ in range(self.count)]
        recipe = draw.choice([fe.current(), fe.rowwise(), fe.rowwise_gw_hp(), fe.blockwise(16)])
        self.up = fe.GroupedLinear(self.count, width, hidden, draw.random() < 0.5, recipe=recipe)
        self.down = fe.GroupedLinear(self.count, hidden, width, draw.random() < 0.5, recipe=recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        sizes = [len(rows) * share // max(sum(self.share), 1) for share in self.share]
        sizes[-1] += len(rows) - sum(sizes)
        return x + self.down(F.silu(self.up(rows, sizes)), sizes).view(x.shape)


class Model(nn.Module):
    """Blocks one after another, some of them checkpointed, and a head."""

    def __init__(self, draw: random.Random):
        super().__init__()
        width, hidden = draw.choice([8, 13, 24, 33]), draw.choice([5, 16, 40])
        kinds = [lambda: Siblings(width, hidden, draw), lambda: Mlp(width, hidden, draw), lambda: Twice(width, draw)]
        self.width = width
        self.blocks = nn.ModuleList(draw.choice(kinds)() for _ in range(draw.randint(1, 3)))
        if draw.random() < 0.5:
            self.blocks.append(draw.choice([Tied, Experts])(width, hidden, draw))
        self.checkpoints = [draw.choice([None, None, True, False]) for _ in self.blocks]
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, reentrant in zip(self.blocks, self.checkpoints, strict=True):
            if reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x)


def _norm(width: int, draw: random.Random) -> nn.Module:
    norm = draw.choice([nn.LayerNorm, nn.RMSNorm, lambda size: nn.Identity()])(width)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return norm


def batch(model: Any, draw: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """An input with outliers in some channels, of an odd number of rows, in two or three dimensions."""
    shape = draw.choice([(5,), (2, 9), (17,), (3, 4)])
    x = torch.randn(*shape, model.width) * 10.0 ** draw.uniform(-3, 2)
    if draw.random() < 0.4:
        x[..., draw.randrange(model.width)] *= 300
    if draw.random() < 0.2:
        x[0] = 0
    return x.to(dtype)


def loss_of(y: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A loss whose gradients have several sizes."""
    weights = torch.linspace(-1, 2, y.shape[-1], dtype=torch.float32)
    return (F.softsign(y.float()) * weights).sum() * 10.0 ** draw.uniform(-4, 4)
