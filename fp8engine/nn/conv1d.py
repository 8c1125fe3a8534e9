"""GPT-2's Conv1D from transformers, a linear layer whose weight is stored [K, N]: the same in FP8, stored the same.

Imported only where a model has such a layer, because it needs transformers.
"""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from fp8engine.autograd import Layer, linear
from fp8engine.nn.lazy import UNREAL, read
from fp8engine.nn.linear import Float8Module


class Float8Conv1D(Float8Module, Conv1D):
    """A transformers Conv1D in FP8, made by `fe.convert`: y [..., nf] = x [..., nx] @ weight [nx, nf] + bias."""

    def __repr__(self) -> str:
        return f"{super().__repr__().removesuffix(')')}{self.extra_repr()})"

    def as_layer(self) -> Layer:
        """What the fused functions take of it."""
        return Layer(self.weight.t(), self.bias, self.numerics)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None or isinstance(x, UNREAL):
            return read(self, x)
        return linear(x, self.weight.t(), self.bias, self.numerics)
