"""A small gated transformer MLP stack, and a training loop whose every number can be compared."""

import support
import torch
from support import converted
from torch import nn

WIDTH = 64


class Net(support.Net):
    """support.Net of that width."""

    def __init__(self, reentrant: bool | None = None):
        super().__init__(WIDTH, reentrant)


def net(recipe: str, reentrant: bool | None = None) -> nn.Module:
    """The same weights every time, converted."""
    torch.manual_seed(0)
    return converted(Net(reentrant), recipe)


def train(model: nn.Module, call=None, rows=(24, 24, 24, 24, 24)) -> list[float]:
    """Losses of one SGD step for each of the batch sizes, through `call` (default the model)."""
    return support.train(model, call, len(rows), rows, WIDTH, growth=1.5)
