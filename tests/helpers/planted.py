"""Tensors with planted trouble, and how a controller sees the casts of a layer that has them."""

import functools

import torch

from fp8engine.scaling.reads import Part, Reads, judge, layout_of


def part_of(tensor: torch.Tensor, role: str, shape: tuple[int, ...]) -> Part:
    """What is sampled of an operand of a layer whose weight has that shape."""
    layout = layout_of(shape, role)
    flat = torch.zeros(layout.length, device=tensor.device)
    layout.write(tensor, flat)
    return layout.part(flat)


def tried(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor | None = None) -> Reads:
    """What is predicted of a layer's casts: x [M, K], w [N, K], dy [M, N]."""
    third = None if dy is None else part_of(dy, "grad_output", w.shape)
    return Reads(judge(part_of(x, "input", w.shape), part_of(w, "weight", w.shape), third).double().numpy())


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


@functools.cache
def deaf(factor: float) -> torch.Tensor:
    """A weight that takes little of channel 7: so many times less than of others."""
    w = normal(256, 512, seed=3).clone()
    w[:, 7] /= factor
    return w


@functools.cache  # by identity of the tensors: those above are made once
def looks(
    layer: int = 0,
    input: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    grad_output: torch.Tensor | None = None,
) -> dict[int, Reads]:
    """What is remembered of a layer after one sample: normal tensors, but for those given."""
    x = normal() if input is None else input
    w = normal(256, 512, seed=3) if weight is None else weight
    dy = normal(len(x), 256, seed=4) / len(x) if grad_output is None else grad_output
    return {layer: tried(x, w, dy)}
