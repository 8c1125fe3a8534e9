"""Activation checkpointing changes nothing: losses, weights and scaling state are bitwise those of training without."""

import pytest
import torch
from blocks import net, train
from support import FP8_RECIPES, converted, same, tables
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8engine.ops import device


def counted(model):
    """History and live values; counters count a recomputed cast again."""
    return tables(model)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_recomputed_see_the_scales_of_their_first_forward(recipe, reentrant):
    plain, recomputed = net(recipe), net(recipe, reentrant)
    assert train(plain) == train(recomputed)
    assert same(list(plain.parameters()), list(recomputed.parameters()))
    assert same(counted(plain), counted(recomputed))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_whole_model_recomputed(recipe, reentrant):
    plain, recomputed = net(recipe), net(recipe)
    losses = train(recomputed, lambda x: checkpoint(recomputed, x, use_reentrant=reentrant))
    assert train(plain) == losses
    assert same(counted(plain), counted(recomputed))


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


def test_checkpoints_within_checkpoints():
    plain, nested = net("delayed"), net("delayed", reentrant=False)
    assert train(plain) == train(nested, lambda x: checkpoint(nested, x, use_reentrant=False))
    assert same(counted(plain), counted(nested))


def test_the_window_moves_under_a_reentrant_checkpoint():
    """Its first forward has no gradients, so nothing but the recompute can record: the history must still fill."""
    model = net("delayed", reentrant=True)
    train(model)
    history_HS = tables(model)[0]
    # Five steps, four updates: the fifth is entered when a sixth begins.
    assert torch.equal((history_HS > 0).sum(0), torch.full((history_HS.shape[1],), 4))
