"""Activation checkpointing where a CPU multiplies BF16; that it changes nothing is a law (tests/laws)."""

import pytest
import torch
from support import FP8_RECIPES, converted
from torch import nn
from torch.utils.checkpoint import checkpoint

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
