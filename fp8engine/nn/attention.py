"""fe.Attention, multi-head and grouped-query attention whose four projections follow a recipe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from fp8engine.autograd.attention import Cache, Rotary, Scores, angles, rotated
from fp8engine.autograd.packed import Packed
from fp8engine.autograd.produce import norm_in_16_bits
from fp8engine.errors import ShapeError, UnknownName
from fp8engine.nn.fp8_attention import Softmax
from fp8engine.nn.layernorm_linear import UNTIL_SHARED, norm_of, share_state
from fp8engine.nn.linear import Linear
from fp8engine.nn.produce import sharing
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Recipe, resolve

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Heads:
    """Division of the width into heads, and which keys a query sees.

    count: heads of queries.  of_keys: heads of keys and values (None: as many).  width: of a head (None: hidden size /
    count).  theta: base of rotary positions, or a `fp8engine.autograd.attention.Rotary`; None for none.
    causal: a query sees up to its own position; window: only that many of them, in causal heads alone.
    dropout: of the softmax.
    qk_norm: eps of an RMSNorm of each head of q and k, before rotation (Qwen3); None for none.
    softmax: format of its two products, q k^T and P v: "16 bits", "fp8", "fp8 unrotated" or "auto" (fp8_attention.py).
    context_size: width of the context that keys and values are made of (cross attention); None: hidden size.
    """

    count: int
    of_keys: int | None = None
    width: int | None = None
    theta: float | Rotary | None = None
    causal: bool = False
    dropout: float = 0.0
    window: int | None = None
    qk_norm: float | None = None
    softmax: str = "16 bits"
    context_size: int | None = None


def with_bias(bias: bool | Collection[str], names: Collection[str]) -> Collection[str]:
    """The layers that have a bias: all, none, or those named.  Raises UnknownName for a name that is none of them."""
    if isinstance(bias, bool):
        return names if bias else ()
    for name in bias:
        if name not in names:
            raise UnknownName("layer in bias", name, names)
    return bias


class Attention(nn.Module):
    """Attention: q_proj, k_proj, v_proj and o_proj in FP8, the softmax between them torch's SDPA in 16 bits, or FP8.

    hidden_size: width of input and output [batch, T, hidden_size].  heads: a number, or a `Heads`.  bias: of the four
    projections, or the names of those that have one.  recipe: a Recipe or its name.  The three that read the input
    share one quantised copy of it.
    Called with a context, k_proj and v_proj read that and share one quantised copy of it (cross attention).
    Raises ShapeError for a width that heads do not divide, or an input that is not 3-D; UnknownName for a recipe or a
    name in bias.

    >>> layer = Attention(32, Heads(4, of_keys=2, theta=1e4, causal=True), bias=False, recipe="current")
    >>> layer(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    >>> sorted(dict(layer.named_parameters()))
    ['k_proj.weight', 'o_proj.weight', 'q_proj.weight', 'v_proj.weight']
    >>> cross = Attention(32, Heads(4, context_size=48), recipe="current")
    >>> cross(torch.randn(2, 5, 32), context=torch.randn(2, 7, 48)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        heads: Heads | int,
        bias: bool | Collection[str] = True,
        *,
        recipe: Recipe | RecipeName,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.heads = heads = Heads(heads) if isinstance(heads, int) else heads
        of_keys = heads.count if heads.of_keys is None else heads.of_keys
        counts = (heads.count, of_keys, 1 if heads.width is None else heads.width)
        if min(counts) < 1 or heads.count % of_keys or (heads.width is None and hidden_size % heads.count):
            raise ShapeError(
                f"Attention: {hidden_size} columns, {heads.count} heads, {of_keys} of keys: heads divide the columns "
                "(or have a width of their own), the heads of keys divide the heads, and there is one or more of each"
            )
        if heads.window is not None and (heads.window < 1 or not heads.causal):
            raise ShapeError(
                f"Attention: a window of {heads.window} in {heads}: a query sees the last so many keys up to its own "
                "position, 1 or more, in heads that are causal"
            )
        self.width = width = hidden_size // heads.count if heads.width is None else heads.width
        self.softmax = Softmax(heads.softmax, "Attention")
        biased = with_bias(bias, PROJECTIONS)
        common = {"recipe": UNTIL_SHARED, "device": device, "dtype": dtype}
        self.q_proj = Linear(hidden_size, heads.count * width, "q_proj" in biased, **common)
        read = heads.context_size or hidden_size
        self.k_proj = Linear(read, of_keys * width, "k_proj" in biased, **common)
        self.v_proj = Linear(read, of_keys * width, "v_proj" in biased, **common)
        self.o_proj = Linear(heads.count * width, hidden_size, "o_proj" in biased, **common)
        if heads.qk_norm is not None:
            self.q_norm, self.k_norm = (nn.RMSNorm(width, heads.qk_norm, device=device, dtype=dtype) for _ in "qk")
        share_state([(name, getattr(self, name)) for name in PROJECTIONS], resolve(recipe))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | Packed | None = None,
        positions: torch.Tensor | None = None,
        cache: Cache | None = None,
        context: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [batch, T, hidden] -> [batch, T, hidden]; [T, hidden] of packed sequences.

        mask: as autograd.attention.attention; a Packed for sequences one after another.  positions: of rotary, [T] or
        [batch, T]; None: counted on from the cache, or in each packed sequence.  cache: keys and values of earlier
        calls; this call's are appended.
        context: [batch, S, context_size], of which keys and values are made (cross attention); a cache holds these
        after the first call, and a later call's context is not read.
        Raises ShapeError for heads with an order (causal, window, theta) or for another batch beside a context, and for
        positions of other tokens.
        """
        with sharing(self.q_proj):
            if context is None:
                return self.o_proj(self._mix((self.q_proj(x), self.k_proj(x), self.v_proj(x)), mask, positions, cache))
            return self.o_proj(self._mix((self.q_proj(x), *self._of_context(x, context, mask, cache)), mask))

    def _of_context(self, x: torch.Tensor, context: torch.Tensor, mask, cache: Cache | None) -> tuple:
        """k and v of the context, before they are divided into heads; those that the cache holds, if it does."""
        heads = self.heads
        if heads.causal or heads.window is not None or heads.theta is not None:
            raise ShapeError(
                f"Attention: x and context are two sequences without an order between them, and {heads} has one; make "
                "the layer for cross attention with a Heads without causal, window and theta"
            )
        if isinstance(mask, Packed):
            if context.dim() != 2 or mask.of_keys is None:
                raise ShapeError(
                    f"Attention: context is {list(context.shape)} beside packed sequences; want [S, context_size], "
                    "packed too, and its sequences in Packed(..., of_keys, longest_key)"
                )
        elif context.dim() != 3 or context.shape[0] != x.shape[0]:
            raise ShapeError(f"Attention: context is {list(context.shape)}; want [{x.shape[0]}, S, context_size]")
        if cache is not None and (kept := cache.of_context) is not None:
            if x.dim() == 3 and kept[0].shape[0] != x.shape[0]:
                raise ShapeError(
                    f"Attention: the cache holds a context of {kept[0].shape[0]} rows, and the input has {x.shape[0]}: "
                    "a cache serves one batch, make another"
                )
            return kept
        k, v = self.k_proj(context), self.v_proj(context)
        if cache is not None:
            cache.keep_context(k, v, self.width)
        return k, v

    def _mix(self, projected: tuple, mask=None, positions=None, cache: Cache | None = None) -> torch.Tensor:
        heads = self.heads
        packed = mask if isinstance(mask, Packed) else None
        if projected[0].dim() != (2 if packed else 3) or (packed and cache is not None):
            raise ShapeError(
                f"Attention: input of {projected[0].dim()} dimensions; want [batch, T, hidden_size], or with a Packed "
                "as mask [T, hidden_size] and no cache"
            )
        if packed:
            projected = tuple(part[None] for part in projected)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in projected)
        if heads.qk_norm is not None:
            q, k = self._of_heads(q, self.q_norm), self._of_heads(k, self.k_norm)
        if heads.theta is not None:
            if positions is None and packed:
                positions = packed.positions(q.shape[2])
            elif positions is None:
                start = 0 if cache is None else len(cache)
                positions = torch.arange(start, start + q.shape[2], device=q.device)
            elif (
                positions.dim() not in (1, 2)
                or positions.shape[-1] != q.shape[2]
                or (positions.dim() == 2 and positions.shape[0] != 1 and positions.shape[0] != q.shape[0])
            ):  # not of tuples: Dynamo takes a torch.Size for another than an equal tuple
                raise ShapeError(
                    f"Attention: positions are {list(positions.shape)}; want [{q.shape[2]}] or "
                    f"[{q.shape[0]}, {q.shape[2]}], of this call's tokens"
                )
            cos_sin = angles(positions, self.width, heads.theta)
            q, k = rotated(q, *cos_sin), rotated(k, *cos_sin)
        if cache is not None:
            k, v = cache.append(k, v)
        scores = Scores(heads.causal, heads.dropout if self.training else 0.0, heads.window)
        mixed = self.softmax.attend(q, k, v, mask, scores).transpose(1, 2).flatten(-2)
        return mixed[0] if packed else mixed

    def _of_heads(self, x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        """The norm of each head; where ranks divide the heads, its weight's gradient is summed over them."""
        shard = self.q_proj.numerics.shard
        return norm(x) if shard is None else norm_in_16_bits(x, shard.own(norm_of(norm)))
