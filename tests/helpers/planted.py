"""Tensors with planted trouble, and their statistics as a controller sees them: close, or per tensor alone."""

import functools

import torch

from fp8engine.scaling.choice import SlotKey, groupings
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import Measured


@functools.cache  # by identity: those below are made once
def look(x: torch.Tensor, role: str, closely: bool = True, sample: int = 65536) -> Measured:
    """The statistics of x [M, K] under every granularity of its role, or per tensor alone."""
    asked = groupings(role) if closely else ()
    return read(measure(x, asked, sample, x.abs().max().float()), asked)


@functools.cache
def normal(m: int = 128, k: int = 512, seed: int = 0) -> torch.Tensor:
    """What every format takes."""
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


@functools.cache
def channels(factor: float, m: int = 128, k: int = 512) -> torch.Tensor:
    """One channel that many times the others."""
    x = normal(m, k).clone()
    x[:, 7] *= factor
    return x


@functools.cache
def rows(decades: float, m: int = 128, k: int = 512) -> torch.Tensor:
    """Rows of sizes that spread over so many powers of ten, in random order."""
    order = torch.randperm(m, generator=torch.Generator().manual_seed(1))
    return normal(m, k) * torch.logspace(-decades, 0, m)[order][:, None]


@functools.cache
def elements(decades: float, m: int = 128, k: int = 512) -> torch.Tensor:
    """Elements whose logarithms are spread evenly over so many powers of ten."""
    spread = torch.rand(m, k, generator=torch.Generator().manual_seed(2))
    return normal(m, k).sign() * 10 ** (-decades * spread)


def looks(
    closely: bool = True, layer: int = 0, weight: torch.Tensor | None = None, **tensors: torch.Tensor
) -> dict[SlotKey, Measured]:
    """A layer's looks: input and grad_output as given, else normal."""
    weight = normal(64, 512, seed=3) if weight is None else weight
    given = {"input": normal(), "grad_output": normal(128, 64, seed=4), **tensors, "weight": weight}
    return {(layer, role): look(x, role, closely) for role, x in given.items()}
