"""Activation checkpointing where a CPU multiplies BF16; that it changes nothing is a law (tests/laws)."""

import functools

import pytest
import torch
from support import FP8_RECIPES, converted
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.ops import device


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_result_does_not_depend_on_what_is_kept_for_backward(recipe, reentrant, monkeypatch):
    """Sums are rounded to BF16 on CPUs that multiply it, for tensors from 2^14 elements on: for every call or none."""
    monkeypatch.setattr(device, "product_dtype", lambda where: torch.bfloat16)
    torch.manual_seed(0)
    layer = converted(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), recipe, skip=lambda *_: False)
    x = torch.randn(8, 256, requires_grad=True)  # few tokens: held in FP32, beside a weight in BF16
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert torch.equal(checkpoint(layer, x, use_reentrant=reentrant), y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_on_saved_tensors_may_be_any_callables(reentrant: bool):
    """Which are set while a forward runs again is looked at; a partial has no name."""
    model = converted(nn.Sequential(nn.Linear(32, 32)), "delayed", skip=lambda *_: False)
    x, keep = torch.randn(8, 32, requires_grad=True), functools.partial(torch.clone)
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None


class Halves(nn.Module):
    """Two parts with a result each.  how: whether each is checkpointed, reentrantly or not; None: it is not."""

    def __init__(self, how: bool | None):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(2))
        self.how = how

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self.how is None or not torch.is_grad_enabled():
            return [part(x) for part in self.parts]
        return [checkpoint(part, x, use_reentrant=self.how) for part in self.parts]


@pytest.mark.parametrize("made", [fe.delayed(history=3), fe.auto(interval=2)], ids=["delayed", "auto"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_evaluation_after_or_between_backward_passes_is_no_step(reentrant: bool, made):
    """What is computed again in backward ends no step: neither evaluations nor gradients differ by it."""
    found = []
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = converted(Halves(how), made)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        seen: list[torch.Tensor] = []
        for step in range(6):
            x = (torch.randn(48, 32) * 3.0**-step).requires_grad_()
            first, second = model(x)
            first.square().mean().backward()
            with torch.no_grad():
                seen += model(x[:8])  # between
            second.square().mean().backward()
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen += model(x[:8])  # after
        found.append(seen)
    assert len(found[0]) == len(found[1]) > 60
    assert all(map(torch.equal, *found))
