"""Modules that call torch's scaled_dot_product_attention, and what a test of FP8 attention asks of them."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
from torch import nn
from torch.nn import functional as F


class Plain(nn.Module):
    """Attention of somebody's own block."""

    def __init__(self, heads: int = 2, width: int = 64):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(heads * width, 3 * heads * width)
        self.out = nn.Linear(heads * width, heads * width)
        self.options: dict[str, Any] = {"is_causal": True}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, T, columns]."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


class InMethod(Plain):
    """The same; its forward calls a method that calls torch's function."""

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """What `Plain` computes."""
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, T, columns]."""
        return self.attend(x)


class Model(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Plain(), InMethod()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, T, 128]."""
        x = x + self.first(x)
        return x + self.second(x)


def llama(**options: Any) -> nn.Module:
    """One block of transformers, whose heads FP8 attention takes."""
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny_models.llama(**{"num_key_value_heads": 2, **size, "max_position_embeddings": 64, **options})


def x_of(rows: int = 70) -> torch.Tensor:
    return torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(1))


def step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradient of each parameter."""
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def near(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
