"""Accuracy beside torchao: a 2-layer MLP in BF16 is not noisier than torchao's emulation of the same recipe."""

import copy
import warnings
from typing import Any

import pytest
import torch
from support import converted, sqnr
from torch import nn
from torchao.float8 import Float8LinearConfig

PAIRS = {"current": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}


def by_torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    return convert_to_float8_training(model, config=config)


def noise(model: Any, exact: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
    """SQNR in dB of the output, dX and every dW against the model in float64."""
    results = []
    for m, dtype in ((exact, torch.float64), (model, torch.bfloat16)):
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        y = m(leaf)
        y.backward(dy.to(dtype))
        results.append([y, leaf.grad, *(m[i].weight.grad for i in (0, 2))])
    return {name: sqnr(*pair) for name, pair in zip(["y", "dX", "dW0", "dW2"], zip(*results, strict=True), strict=True)}


@pytest.mark.parametrize("recipe", PAIRS)
def test_signal_to_noise_is_at_least_torchaos(recipe: str):
    base = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).bfloat16()
    x, dy = torch.randn(256, 512).bfloat16(), torch.randn(256, 512).bfloat16()
    exact = copy.deepcopy(base).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own deprecations
        theirs = noise(by_torchao(copy.deepcopy(base), PAIRS[recipe]), copy.deepcopy(exact), x, dy)
    ours = noise(converted(copy.deepcopy(base), recipe), copy.deepcopy(exact), x, dy)
    # 0.3 dB: torchao keeps scales in float64 before rounding, sums in another order; beyond that is a rounding too many
    for name in ours:
        assert ours[name] > theirs[name] - 0.3, f"{name}: {ours[name]:.2f} dB, torchao {theirs[name]:.2f} dB"
        assert theirs[name] > 20, "the peer ran as expected"
