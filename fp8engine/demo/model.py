"""A small GPT of plain nn modules; nothing in it is about FP8 until `convert` is called on it.

    x = token[id]
    x = x + proj(attention(norm1(x)))        pre-norm decoder blocks, causal attention, rotary positions
    x = x + down(gelu(up(norm2(x))))
    logits = head(norm(x))                   [batch, time, 256]: the next byte

Weights are drawn from N(0, 1 / fan_in), residual projections narrower by sqrt(2 x layers), so that the sum of the
blocks starts at the width of one (Radford et al. 2019, section 2.3).  A few hundred steps are all that the demo has:
with learned positions and GPT-2's 0.02 the validation loss stops at 2.17 nats a byte, with these at 1.48 (400 steps).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fp8engine.errors import UnknownName

BYTES = 256  # the vocabulary: any text in any encoding


@dataclass(frozen=True)
class Size:
    """How wide and deep a GPT is, how many bytes it sees at once (context), and AdamW's peak rate that suits it."""

    width: int
    layers: int
    heads: int
    context: int
    lr: float


# Widths are multiples of 16 (FP8 Tensor Cores' unit) and, from small on, of 128 (one block of the blockwise recipe).
SIZES = {
    "tiny": Size(width=64, layers=2, heads=2, context=64, lr=4e-3),
    "small": Size(width=128, layers=3, heads=4, context=128, lr=3e-3),
    "medium": Size(width=384, layers=6, heads=6, context=256, lr=1e-3),
}


def size_named(name: str) -> Size:
    """A size by its name.  Raises UnknownName, with the nearest name.

    >>> size_named("tiny").context
    64
    """
    if name not in SIZES:
        raise UnknownName("size", name, SIZES)
    return SIZES[name]


class Rotary(nn.Module):
    """Turns pairs of channels by an angle that grows with the position (Su et al. 2021): q.k then tells distances."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, channels: int, context: int, base: float = 1000.0):
        super().__init__()
        speed = base ** -(torch.arange(0, channels, 2) / channels)
        angle = torch.arange(context).outer(speed)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x_BHTC: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: x_BHTC.shape[-2]], self.sin[: x_BHTC.shape[-2]]
        a, b = x_BHTC.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x_BHTC)


class Block(nn.Module):
    """One decoder block: attention, then a two-layer MLP, each added to what came in."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        self.rotary = Rotary(size.width // size.heads, size.context)
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x_BTD)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x_BTD = x_BTD + self.proj(mixed.transpose(1, 2).flatten(-2))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    >>> model = GPT(SIZES["tiny"])
    >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, size: Size):
        super().__init__()
        self.size = size
        self.token = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, BYTES, bias=False)
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear):
                narrower = (2 * size.layers) ** 0.5 if name.endswith(("proj", "down")) else 1.0
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5 / narrower)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.token(ids_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.lm_head(self.norm(x_BTD))


def loss_of(model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats a byte, of each byte but the first from those before it; the softmax is in FP32."""
    logits = model(ids_BT[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids_BT[:, 1:].flatten())
