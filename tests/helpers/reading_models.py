"""Modules whose code reads the weight of a layer that it never calls, seen by a dry run or hidden from it."""

import torch
from torch import nn
from torch.nn import functional as F


def kernel(x: torch.Tensor) -> torch.Tensor:
    """x, of code that runs where numbers are: a dry run ends here, and the first forward tells."""
    if x.is_meta:
        raise NotImplementedError("no meta device")  # what torch raises for a kernel that has no meta implementation
    return x


class Eva(nn.Module):
    """timm's EVA-02 attention, shortened: the weight of `qkv` is read, `proj` is called.  hidden: from a dry run."""

    def __init__(self, width: int = 16, hidden: bool = True):
        super().__init__()
        self.qkv, self.proj, self.hidden = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width), hidden

    def forward(self, x):
        return self.proj(F.linear(kernel(x) if self.hidden else x, weight=self.qkv.weight).chunk(3, -1)[0])


class Asks(nn.Module):
    """One of two layers is called, after its weight's dtype is asked for, as in T5."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.one(x.to(self.one.weight.dtype)) if len(x) else self.other(x)


class Keys(dict):
    """As many a config: its keys are attributes, and to ask for another attribute is a KeyError."""

    __getattr__ = dict.__getitem__


class Model(nn.Module):
    """Parts in turn; those of `unused` are there and are not called."""

    def __init__(self, *parts: nn.Module, unused: tuple[nn.Module, ...] = ()):
        super().__init__()
        self.parts, self.unused = nn.ModuleList(parts), nn.ModuleList(unused)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x
