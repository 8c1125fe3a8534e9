"""Attention of packed sequences: tokens of several sequences one after another, [T, ...], without padding ("THD").

    sequence i holds tokens cu_seqlens[i] up to cu_seqlens[i + 1], not included; a token sees keys of its own sequence

| where | how |
| --- | --- |
| a card from sm_80 on, FP16 or BF16 | torch's varlen_attn (FlashAttention-2): the work of the sequences apart |
| a CPU | torch's SDPA under a mask of T x S: right, and as slow as one sequence of T tokens; said once |
| a card otherwise | BackendError, which says what is missing: the mask would take T x S of its memory |

Source of the layout: FlashAttention's varlen functions (arXiv 2307.08691), TransformerEngine's qkv_format="thd".
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fp8engine.autograd.groups import on_host
from fp8engine.errors import BackendError, ShapeError
from fp8engine.ops import device

FLASH_FROM = (8, 0)  # capability of the cards that torch's varlen attention runs on
WIDEST, MULTIPLE = 256, 8  # columns of a head that it takes
PAD = "or pad the sequences into a batch [batch, T, hidden] with a mask"


class Packed(NamedTuple):
    """Where packed sequences begin and end, in place of a mask.

    cu_seqlens: INT32 [sequences + 1] on the tokens' device, from 0 to T, never falling.  longest: of the sequences, in
    tokens, or more.  of_keys, longest_key: the same of the keys, where they are another sequence's (cross attention).

    >>> Packed(torch.tensor([0, 2, 5]), 3).positions(5)
    tensor([0, 1, 0, 1, 2])
    """

    cu_seqlens: torch.Tensor
    longest: int
    of_keys: torch.Tensor | None = None
    longest_key: int | None = None

    def positions(self, tokens: int) -> torch.Tensor:
        """The position of each token in its sequence, [T]."""
        return _places(self.cu_seqlens, tokens)[1]

    def seen(self, tokens: int, keys: int, causal: bool, window: int | None) -> torch.Tensor:
        """Which keys each token sees, bool [T, S]; causal: up to its own position, counted from the sequences' ends.

        >>> Packed(torch.tensor([0, 2, 3]), 2).seen(3, 3, True, None).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
        """
        (which, _, left), (which_key, _, left_key) = (
            _places(cu_seqlens, size) for cu_seqlens, size in ((self.cu_seqlens, tokens), (self._keys, keys))
        )
        found = which[:, None] == which_key
        if causal:
            back = left_key - left[:, None]
            found &= back >= 0
            if window is not None:
                found &= back < window
        return found

    @property
    def _keys(self) -> torch.Tensor:
        return self.cu_seqlens if self.of_keys is None else self.of_keys


def _places(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(number of its sequence, position in it, tokens left in it) of each token."""
    at = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    which = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True).clamp(max=max(len(cu_seqlens) - 2, 0))
    return which, at - cu_seqlens[which], cu_seqlens[which + 1] - at


def packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, scores: Any) -> torch.Tensor:
    """[1, heads, T, D] of q [1, heads, T, D] and k, v [1, heads of k, S, D]; scores: `attention`'s.

    Raises ShapeError for sequences that do not fit (their values only on a CPU, where reading them waits for nothing),
    BackendError on a card without varlen attention for these.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> from fp8engine.autograd.attention import Scores
    >>> packed_attention(q, q, q, Packed(torch.tensor([0, 2, 5]), 3), Scores()).shape
    torch.Size([1, 2, 5, 8])
    """
    _check(q, k, packed)
    if q.device.type != "cuda":
        seen = packed.seen(q.shape[2], k.shape[2], scores.causal, scores.window)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, seen, scores.dropout, enable_gqa=grouped)
    if why := refused(q, scores.dropout):
        raise BackendError(f"attention: packed sequences on {device.name(q.device)}: {why}")
    window = -1 if scores.window is None or not scores.causal else scores.window - 1
    cu_seqlens, of_keys = (each.to(torch.int32) for each in (packed.cu_seqlens, packed._keys))
    longest_key = packed.longest if packed.longest_key is None else packed.longest_key
    found = _varlen()(
        *(part[0].transpose(0, 1) for part in (q, k, v)),
        cu_seqlens,
        of_keys,
        packed.longest,
        longest_key,
        window_size=(window, 0 if scores.causal else -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return found.transpose(0, 1)[None]


def slow(q: torch.Tensor) -> str:
    """Why packed sequences there are attended to under a mask; "": they are not."""
    if q.device.type == "cuda":
        return ""
    return (
        f"packed sequences on {q.device.type} go by a mask of all pairs of tokens, {q.shape[2]} x {q.shape[2]}: torch "
        f"has varlen attention for CUDA alone; use a card, {PAD}"
    )


def refused(q: torch.Tensor, dropout: float) -> str | None:
    """Why torch's varlen attention does not take these on a card, with the remedy; None where it does."""
    width = q.shape[3]
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"torch's varlen attention takes FP16 and BF16, and q is {q.dtype}; run under torch.autocast, {PAD}"
    if dropout:
        return f"torch's varlen attention has no dropout, and {dropout} is asked for; set Heads(dropout=0.0), {PAD}"
    if width % MULTIPLE or width > WIDEST:
        return f"heads of {width} columns; torch's varlen attention takes multiples of {MULTIPLE} up to {WIDEST}: {PAD}"
    if device.capability(q.device) < FLASH_FROM:
        return f"torch's varlen attention needs sm_80 or later: {PAD}"
    if _varlen() is None:
        return f"torch {torch.__version__} has no varlen_attn with windows and grouped keys; install torch 2.13, {PAD}"
    return None


@functools.cache
def _varlen() -> Any:
    """torch's varlen_attn with all that is asked of it, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if "window_size" in known and "enable_gqa" in known else None


def _check(q: torch.Tensor, k: torch.Tensor, packed: Packed) -> None:
    if packed.of_keys is not None and packed.longest_key is None:
        raise ShapeError("attention: packed sequences with of_keys, their keys' ends, want longest_key beside them")
    for what, cu_seqlens, size, longest in (
        ("cu_seqlens", packed.cu_seqlens, q.shape[2], packed.longest),
        ("of_keys", packed._keys, k.shape[2], packed.longest if packed.longest_key is None else packed.longest_key),
    ):
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ShapeError(
                f"attention: {what} is {list(cu_seqlens.shape)}, {cu_seqlens.dtype}; want int32 [sequences + 1]"
            )
        if cu_seqlens.device != q.device:
            raise ShapeError(f"attention: {what} is on {cu_seqlens.device} and the tokens on {q.device}: move it there")
        if on_host(cu_seqlens):
            ends = cu_seqlens.tolist()
            if ends[0] != 0 or ends[-1] != size or sorted(ends) != ends:
                raise ShapeError(f"attention: {what} is {ends}; want numbers that rise from 0 to {size}, the tokens")
            if (found := max(end - begin for begin, end in itertools.pairwise(ends))) > longest:
                raise ShapeError(
                    f"attention: {what} is {ends}, whose longest sequence has {found} tokens, not {longest}"
                )
