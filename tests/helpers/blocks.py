"""A small gated transformer MLP stack, and a training loop whose every number can be compared."""

import torch
from support import Block, converted
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class Net(nn.Module):
    """Two blocks.  reentrant: None for no checkpointing, else which kind of torch.utils.checkpoint."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def net(recipe: str, reentrant: bool | None = None) -> nn.Module:
    """The same weights every time, converted."""
    torch.manual_seed(0)
    return converted(Net(reentrant), recipe)


def train(model: nn.Module, call=None, rows=(24, 24, 24, 24, 24)) -> list[float]:
    """Losses of a few SGD steps through `call` (default the model), one batch size each, inputs always the same.

    The inputs grow from step to step, so that delayed scaling has something to get wrong.
    """
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, m in enumerate(rows):
        x = (torch.randn(m, WIDTH, generator=generator) * 1.5**step).requires_grad_()
        loss = (model if call is None else call)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
