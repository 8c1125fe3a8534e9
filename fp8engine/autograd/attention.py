"""Attention between projections: rotary positions, masks, cached keys and values; the softmax is torch's SDPA.

    q, k <- R(position) q, R(position) k        R rotates pairs (x[i], x[i + W/2]) by position * f[i],  i < W/2 <= D/2
    f[i] = theta^(-2 i / W)                     long contexts slow the slow pairs down (Rotary)
    o = softmax(q k^T / sqrt(D) + mask) v       heads of q in groups share a head of k and v (grouped-query)

Rotation is in FP32 and rounded once to the inputs' dtype.  Source: Su et al. 2021 (arXiv 2104.09864), with the pairing
of GPT-NeoX and Llama; Ainslie et al. 2023 (arXiv 2305.13245), grouped queries; Beltagy et al. 2020 (arXiv 2004.05150),
windows.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fp8engine.autograd.packed import Packed, packed_attention
from fp8engine.errors import ShapeError, UnsupportedDtype


class Scores(NamedTuple):
    """Which keys a query sees, and the dropout of its softmax.

    causal: up to their own position; with window, that many positions of them.  dropout: of the softmax, in training.
    """

    causal: bool = False
    dropout: float = 0.0
    window: int | None = None


class Rotary(NamedTuple):
    """Rotation of rotary positions.  theta: its base.  width: how many columns of a head are rotated; None: all.

    factor: f is divided by it, for contexts that many times as long; with `trained`, the length that was trained, only
    where a full turn takes more than trained / low positions, in part down to trained / high (Llama 3.1).

    >>> Rotary(1e4).frequencies(4)
    tensor([1.0000, 0.0100])
    >>> Rotary(1e4, factor=4.0, trained=64).frequencies(4)  # turns of 6 and of 628 positions
    tensor([1.0000, 0.0025])
    """

    theta: float
    width: int | None = None
    factor: float = 1.0
    trained: int | None = None
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, width: int, device: torch.device | str | None = None) -> torch.Tensor:
        """f [width / 2], FP32."""
        f = self.theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        if self.trained is None:
            return f / self.factor
        turns = self.trained / (2 * math.pi) * f  # full ones within what was trained
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return f * (kept + (1 - kept) / self.factor)


class Cache:
    """Keys and values of the positions so far, [batch, heads of k, positions, D]; grows by what each call appends.

    >>> cache = Cache()
    >>> k = torch.ones(1, 2, 3, 4)
    >>> [part.shape[2] for _ in range(2) for part in cache.append(k, k)]
    [3, 3, 6, 6]

    of_context: keys and values of cross attention's context, as the projections gave them; made once.
    """

    of_context: tuple[torch.Tensor, torch.Tensor] | None = None

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

    def keep_context(self, k: torch.Tensor, v: torch.Tensor, width: int) -> None:
        """Keep keys and values of a context, [..., heads * width]; `of_context` gives them to later calls."""
        self.of_context = k, v


def angles(positions: torch.Tensor, head: int, rotary: Rotary | float) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [..., T, W / 2] of position * f in FP32, for heads of `head` columns and positions [T] or [batch, T].

    Raises ShapeError for a width that is odd or more than a head has.
    """
    rotary = rotary if isinstance(rotary, Rotary) else Rotary(rotary)
    width = head if rotary.width is None else rotary.width
    if width % 2 or width > head:
        raise ShapeError(
            f"rotary positions turn pairs: {width} of heads of {head} columns; want an even number of them"
        )
    angle = positions.to(torch.float32)[..., None] * rotary.frequencies(width, positions.device)
    angle = angle[:, None] if positions.dim() == 2 else angle  # the same for every head
    return angle.cos(), angle.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, T, D] rotated by what `angles` gave; columns beyond its width stay."""
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].float().chunk(2, -1)
    y = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return y if width == x.shape[-1] else torch.cat([y, x[..., width:]], -1)


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary | float) -> torch.Tensor:
    """x [batch, heads, T, D] rotated by its positions, [T] or [batch, T].  rotary: the rotation, or its base.

    Raises as `angles` does.

    >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)
    >>> rotate(x, torch.tensor([0.0, torch.pi / 2]), 1e4).round(decimals=3).abs().tolist()
    [[[[1.0, 0.0], [0.0, 1.0]]]]
    """
    return rotated(x, *angles(positions, x.shape[-1], rotary))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | Packed | None = None,
    scores: Scores = Scores(),  # noqa: B008 - a frozen value
) -> torch.Tensor:
    """[batch, heads, T, D] of q [batch, heads, T, D] and k, v [batch, heads of k, S, D]; S - T positions are cached.

    mask: bool, True where a key may be seen, [batch, S] (padding) or broadcastable to [batch, heads, T, S]; or floating
    point, added to the scores.  A query that may see no key gives zeros.  Or a Packed: sequences one after another.
    Raises ShapeError for heads that are no multiple of k's, or a mask that does not fit, UnsupportedDtype for a mask of
    integers; as `packed_attention` does.

    >>> q = torch.randn(2, 4, 3, 8)
    >>> k = v = torch.randn(2, 2, 3, 8)
    >>> attention(q, k, v, scores=Scores(causal=True)).shape
    torch.Size([2, 4, 3, 8])
    """
    heads, t, s = q.shape[1], q.shape[2], k.shape[2]
    if heads % k.shape[1]:
        raise ShapeError(f"attention: {heads} heads of queries do not share {k.shape[1]} of keys evenly")
    if isinstance(mask, Packed):
        return packed_attention(q, k, v, mask, scores)
    softmax = functools.partial(
        F.scaled_dot_product_attention, dropout_p=scores.dropout, enable_gqa=heads != k.shape[1]
    )
    if mask is None and not (scores.causal and scores.window is not None and scores.window < s):
        if not scores.causal or t == 1:
            return softmax(q, k, v)
        if t == s:
            return softmax(q, k, v, is_causal=True)
    return softmax(q, k, v, attn_mask=_full_mask(mask, q, s, scores))


def _full_mask(mask: torch.Tensor | None, q: torch.Tensor, s: int, scores: Scores) -> torch.Tensor:
    """The mask with causality in it, broadcastable to [batch, heads, T, S]."""
    t = q.shape[2]
    earlier = torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device)
    if scores.causal:
        earlier = earlier.tril(s - t)
        if scores.window is not None:
            earlier = earlier.triu(s - t - scores.window + 1)
    if mask is None:
        return earlier
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UnsupportedDtype(
            f"attention: mask is {mask.dtype}; want bool, True where a key may be seen (mask.bool(), of a tokenizer's "
            "attention_mask), or floating point, added to the scores"
        )
    if mask.dim() not in (2, 4) or mask.shape[-1] != s:
        raise ShapeError(f"attention: mask is {list(mask.shape)}; want [batch, {s}] or 4 dimensions ending in {s}")
    mask = mask[:, None, None, :] if mask.dim() == 2 else mask
    if mask.dtype == torch.bool:
        return mask & earlier
    return mask.to(q.dtype).masked_fill(~earlier, float("-inf")) if scores.causal else mask.to(q.dtype)
