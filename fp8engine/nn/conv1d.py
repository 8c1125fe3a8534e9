"""GPT-2's Conv1D from transformers in FP8, for training and for inference; its weight is stored [K, N].

Imported only where a model has such a layer, because it needs transformers.
"""

from __future__ import annotations

import torch
from torch.fx import Proxy
from transformers.pytorch_utils import Conv1D

from fp8engine.autograd import Layer, linear
from fp8engine.autograd.features import CONV1D
from fp8engine.nn.linear import Float8Module, leaf
from fp8engine.nn.serving import Served


class Float8Conv1D(Float8Module, Conv1D):
    """A transformers Conv1D in FP8, made by `fe.convert`: y [..., nf] = x [..., nx] @ weight [nx, nf] + bias."""

    transposed = True
    kinds = (CONV1D,)

    def __repr__(self) -> str:
        return f"{super().__repr__().removesuffix(')')}{self.extra_repr()})"

    def as_layer(self) -> Layer:
        """Weight [N, K], bias and numerics."""
        return Layer(self.weight.t(), self.bias, self.numerics)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Proxy):
            return leaf(self, x)  # pyright: ignore[reportReturnType]
        run = linear if self.numerics.feature is None else self.numerics.feature.run
        return run(x, self.weight.t(), self.bias, self.numerics)


class ServedConv1D(Served, Conv1D):
    """y [..., nf] = x [..., nx] @ (codes [nx, nf] * scale) + bias; in memory the codes lie along nx."""

    transposed = True

    def __repr__(self) -> str:
        return f"ServedConv1D(nf={self.nf}, nx={self.nx}{self.extra_repr()})"
