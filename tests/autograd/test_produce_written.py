"""Writes around producers that torch counts nowhere, or that a module of torch allows; and second derivatives."""

import copy

import pytest
import torch
from support import FP8_RECIPES, converted, same
from torch import nn

import fp8engine as fe
from fp8engine.errors import GradientError


class WrittenBetween(nn.Module):
    """Two layers read a norm's result, and one element of it changes between them, without a word to torch."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(x)
        q = self.q(h)
        h.data[3, 5] = 1000.0
        return q, self.k(h)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_write_through_data_into_what_a_producer_made_is_seen(recipe: str):
    fused = converted(WrittenBetween(), recipe).requires_grad_(False)
    plain = converted(fe.revert(copy.deepcopy(fused)), recipe, fuse=False)
    x = torch.randn(64, 32)
    for mine, wanted in zip(fused(x), plain(x), strict=True):
        assert torch.equal(mine, wanted)


class PreActivation(nn.Module):
    """x is added to after an activation has read it: torch's ReLU keeps its result and needs x no more."""

    def __init__(self, through_data: bool):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)
        self.through_data = through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        h = self.second(self.act(x))
        if self.through_data:
            x.data.add_(h.data)
            return h
        x += h
        return x


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_a_relu_has_read_may_be_written(recipe: str, through_data: bool):
    torch.manual_seed(0)
    model, x = PreActivation(through_data), torch.randn(64, 32)
    runs = [converted(copy.deepcopy(model), recipe, fuse=fuse) for fuse in (None, False)]
    for each in runs:
        each(x).square().sum().backward()
    assert same(*([p.grad for p in each.parameters()] for each in runs))


@pytest.mark.parametrize("part", [nn.LayerNorm(32), nn.GELU()], ids=["norm", "activation"])
def test_a_second_derivative_is_refused_with_its_remedy(part: nn.Module):
    """Though no FP8 matmul is involved; the remedy works."""
    for fuse in (None, False):
        model = converted(nn.Sequential(copy.deepcopy(part), nn.Linear(32, 1)), "current", fuse=fuse)
        h = torch.randn(4, 32, requires_grad=True)
        run = model[0](h).square().sum()  # behind it nothing of ours
        if fuse is None:
            with pytest.raises(GradientError, match=r"create_graph=True.*fe\.convert\(\.\.\., fuse=False\)"):
                torch.autograd.grad(run, h, create_graph=True)
        else:
            (g,) = torch.autograd.grad(run, h, create_graph=True)
            g.square().sum().backward()
            assert h.grad is not None
