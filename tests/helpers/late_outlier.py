"""A training in which one channel of a gated MLP's product grows, for a tenth of the tokens, and what that costs.

Feature 0 of the input says whether a token is one of them: the planted channel's gate is 12 for those and -12, which
silu makes 7e-5, for the ordinary ones.  Its row of `up` is doubled before every step.
"""

from typing import Any

import torch
from support import Block, converted, sqnr
from torch import nn
from torch.nn import functional as F

import fp8engine as fe

WIDTH, CHANNEL, TOKENS = 64, 7, 512


def batch(step: int) -> torch.Tensor:
    """x [TOKENS, WIDTH]; ordinary tokens have x[:, 0] = -1."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    x[:, 0] = torch.where(torch.rand(TOKENS, generator=generator) < 0.1, 1.0, -1.0)
    return x


class MLP(Block):
    """A Block without norm and residual, its planted gate opened by feature 0 alone."""

    def __init__(self):
        super().__init__(WIDTH)
        del self.norm
        with torch.no_grad():
            self.gate.weight[CHANNEL] = 0.0
            self.gate.weight[CHANNEL, 0] = 12.0
            self.gate.bias[CHANNEL] = 0.0

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def grown(recipe: Any, octaves: int, smooth: bool = False) -> Any:
    """The MLP after a step of SGD for each octave that the channel grew."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(MLP()), recipe)
    if smooth:
        fe.smooth(model, "0.down")
    for step in range(octaves):
        with torch.no_grad():
            model[0].up.weight[CHANNEL] *= 2
            model[0].up.bias[CHANNEL] *= 2
        (model(batch(step)) - batch(step)).tanh().square().mean().backward()  # bounded, whatever grows
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
    return model


def ordinary_tokens(model: Any) -> float:
    """SQNR in dB of the down-projection's result for the ordinary tokens, against float64 of what it was given."""
    seen: list[torch.Tensor] = []
    hook = model[0].down.register_forward_hook(lambda module, given, y: seen.extend([given[0], y]))
    x = batch(1000)
    with torch.no_grad():
        model(x)
    hook.remove()
    down, ordinary = model[0].down, x[:, 0] < 0
    wanted = F.linear(seen[0].double(), down.weight.double(), down.bias.double())
    return sqnr(wanted[ordinary], seen[1][ordinary])
