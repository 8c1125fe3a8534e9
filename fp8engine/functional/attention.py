"""Attention between projections: rotary positions, masks, cached keys and values; the softmax is torch's SDPA.

    q, k <- R(position) q, R(position) k        R turns the pairs (x[i], x[i + D/2]) by position * theta^(-2 i / D)
    o = softmax(q k^T / sqrt(D) + mask) v       heads of q in groups share a head of k and v (grouped-query)

Rotation is in FP32 and rounded once to the inputs' dtype.  Source: Su et al. 2021 (arXiv 2104.09864), with the pairing
of GPT-NeoX and Llama; Ainslie et al. 2023 (arXiv 2305.13245), grouped queries.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fp8engine.errors import ShapeError


class Scores(NamedTuple):
    """How queries see keys.  causal: up to their own position.  dropout: of the softmax, in training."""

    causal: bool = False
    dropout: float = 0.0


class Cache:
    """Keys and values of the positions so far, [batch, heads of k, positions, D]; grows by what each call appends.

    >>> cache = Cache()
    >>> k = torch.ones(1, 2, 3, 4)
    >>> [part.shape[2] for _ in range(2) for part in cache.append(k, k)]
    [3, 3, 6, 6]
    """

    def __init__(self):
        self.key: torch.Tensor | None = None
        self.value: torch.Tensor | None = None

    def __len__(self) -> int:
        """Positions held."""
        return 0 if self.key is None else self.key.shape[2]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, the new ones last."""
        if self.key is not None and self.value is not None:
            k, v = torch.cat([self.key, k], 2), torch.cat([self.value, v], 2)
        self.key, self.value = k, v
        return k, v


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [batch, heads, T, D] turned by its positions, [T] or [batch, T].  Raises ShapeError for an odd D.

    >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
    >>> rotate(x, torch.tensor([0.0, torch.pi / 2]), theta=1e4).round(decimals=3).abs().tolist()
    [[[[1.0, 0.0], [0.0, 1.0]]]]
    """
    d = x.shape[-1]
    if d % 2:
        raise ShapeError(f"rotary positions turn pairs: heads of {d} have one element left over")
    frequency = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = positions.to(torch.float32)[..., None] * frequency  # [..., T, D/2]
    angle = angle[:, None] if positions.dim() == 2 else angle  # the same for every head
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scores: Scores = Scores(),  # noqa: B008 - a frozen value
) -> torch.Tensor:
    """[batch, heads, T, D] of q [batch, heads, T, D] and k, v [batch, heads of k, S, D]; S - T positions are cached.

    mask: bool, True where a key may be seen, [batch, S] (padding) or broadcastable to [batch, heads, T, S]; or floating
    point, added to the scores.  A query that may see no key gives zeros.
    Raises ShapeError for heads that are no multiple of k's, or a mask that does not fit.

    >>> q = torch.randn(2, 4, 3, 8)
    >>> k = v = torch.randn(2, 2, 3, 8)
    >>> attention(q, k, v, scores=Scores(causal=True)).shape
    torch.Size([2, 4, 3, 8])
    """
    heads, t, s = q.shape[1], q.shape[2], k.shape[2]
    if heads % k.shape[1]:
        raise ShapeError(f"attention: {heads} heads of queries do not share {k.shape[1]} of keys evenly")
    softmax = functools.partial(
        F.scaled_dot_product_attention, dropout_p=scores.dropout, enable_gqa=heads != k.shape[1]
    )
    if mask is None:
        if not scores.causal or t == 1:
            return softmax(q, k, v)
        if t == s:
            return softmax(q, k, v, is_causal=True)
    return softmax(q, k, v, attn_mask=_full_mask(mask, q, s, scores.causal))


def _full_mask(mask: torch.Tensor | None, q: torch.Tensor, s: int, causal: bool) -> torch.Tensor:
    """The mask with causality in it, broadcastable to [batch, heads, T, S]."""
    t = q.shape[2]
    earlier = torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device)
    if causal:
        earlier = earlier.tril(s - t)
    if mask is None:
        return earlier
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    if mask.dim() != 4 or mask.shape[-1] != s:
        raise ShapeError(f"attention: mask is {list(mask.shape)}; want [batch, {s}] or 4 dimensions ending in {s}")
    if mask.dtype == torch.bool:
        return mask & earlier
    return mask.to(q.dtype).masked_fill(~earlier, float("-inf")) if causal else mask.to(q.dtype)
