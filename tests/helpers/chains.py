"""Two linear layers, the first of which stores its result in FP8 for the second."""

from dataclasses import replace

import torch
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.numerics.formats import Format
from fp8engine.numerics.recipe import Recipe


def storing(recipe: Recipe | None = None, format: Format = fe.E4M3, **fields) -> Recipe:
    """A recipe (current) that stores its results."""
    return replace(recipe or fe.current(), stored=fe.Cast(format, fe.PerTensor(), "delayed"), **fields)


class Chain(nn.Module):
    """x [..., K] to [..., N] to [..., P], nothing between."""

    def __init__(self, sizes=(40, 50, 30), bias: bool = True, dtype=torch.float32):
        super().__init__()
        k, n, p = sizes
        self.up, self.down = nn.Linear(k, n, bias, dtype=dtype), nn.Linear(n, p, bias, dtype=dtype)

    def forward(self, x):
        return self.down(self.up(x))


def chain(recipe: Recipe | str = "current", up: Recipe | None = None, warm: int = 2, **options) -> Chain:
    """A converted Chain whose scales are known, by forwards of normal numbers (`warm` of them)."""
    model = converted(Chain(**options), recipe, overrides={"up": up or storing()})
    k, dtype = model.up.in_features, model.up.weight.dtype
    generator = torch.Generator().manual_seed(7)
    for _ in range(warm):
        model(torch.randn(64, k, generator=generator).to(dtype)).sum().backward()
    model.zero_grad()
    return model
