"""Attention in FP8, forward: scores and weighted values from E4M3 operands, softmax statistics and sums in FP32.

    q8, k8, v8   q R, k R and v in E4M3, one scale for each head and block of 64 rows; R a rotation, or nothing
    s            factor scale_q scale_k (q8 k8^T), in units of log2;  -Inf where a query does not see a key
    p            2^(s - m + log2 448) in E4M3;  m: the largest score of the row in this block of 64 keys
    M            the largest m so far
    l <- l 2^(M_old - M) + 2^(m - M) sum p
    o <- o 2^(M_old - M) + 2^(m - M) scale_v (p v8)          result: o / l

Each block of keys has a largest p of 448 in every row, so that no block loses small weights to a large one elsewhere.
l adds the rounded p, so the weights of a row sum to one; a sum of 64 codes is exact in FP32, in whatever order.  The
result is divided by l once.  R is a Hadamard matrix with random signs: q R (k R)^T = D q k^T, and an outlier of q or k
is spread over all columns.  Head dims are filled up with zeros to 64 or 128 columns.

A product is exact in chunks of 32 columns (one step of the Tensor Core), which are added in FP32 in order; 2^x and
log2 x are rounded to the nearest.  The emulated card does the same (tests/emulator), so the kernel is this bit for bit.
Source: FlashAttention-3, arXiv 2407.08608, section 3.3 (block quantisation, incoherent processing); sums of blocks as
in DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fp8engine._torch import FakeTensor
from fp8engine.ops.reference.rounding import decode, saturating_cast
from fp8engine.ops.reference.scale import scale_factor

E4M3 = torch.float8_e4m3fn
BLOCK = 64  # rows that share a scale, and keys of one step of the loop
HEAD_DIMS = (64, 96, 128)
LOG2_448 = math.log2(448)
TINY = 2.0**-126  # a factor of 0 would make NaN of the -Inf of a masked score
LOG2_E = math.log2(math.e)
FP8_STEP, STEP = 32, 16  # columns that one instruction of the Tensor Core multiplies and sums, of FP8 and of 16 bits


class Form(NamedTuple):
    """Which keys a query sees, and how the scores are made.

    scale: of q k^T before the softmax, from 2^-126 to 2^126.  causal: query i sees keys up to i + offset; window: only
    the last so many of them (0: all).  rotated: whether q and k are rotated before their cast.
    """

    scale: float
    causal: bool = False
    window: int = 0
    offset: int = 0
    rotated: bool = True


def width_of(head_dim: int) -> int:
    """The columns that a head is cast to: 64 or 128."""
    return 64 if head_dim <= 64 else 128


def factor_of(form: Form, head_dim: int) -> float:
    """What turns products of the cast q and k, rotated or not, into scores in units of log2."""
    return form.scale * LOG2_E / (width_of(head_dim) if form.rotated else 1)


def _hadamard(width: int) -> torch.Tensor:
    rotation = torch.ones(1, 1)
    while len(rotation) < width:
        rotation = torch.cat([torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)])
    generator = torch.Generator().manual_seed(448)  # any: the signs only have to be the same in every process
    return rotation * (torch.randint(0, 2, (width, 1), generator=generator) * 2 - 1)


@functools.cache
def rotation_of(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """R^T [width, width], entries 1 and -1, R R^T = width I: Sylvester's Hadamard matrix, rows of R of random sign."""
    return _hadamard(width).t().contiguous().to(device, dtype)


def halved(x: torch.Tensor) -> torch.Tensor:
    """x in 16 bits: as it is, or rounded to BF16."""
    return x if x.dtype in (torch.bfloat16, torch.float16) else x.to(torch.bfloat16)


def product(a: torch.Tensor, b: torch.Tensor, step: int, acc: torch.Tensor | None = None) -> torch.Tensor:
    """a [..., M, K] b [..., N, K]^T in FP32, added to acc: exact for `step` of K, which are added in order."""
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64).mT
    for k in range(0, a.shape[-1], step):
        part = wide_a[..., k : k + step] @ wide_b[..., k : k + step, :]
        acc = (part if acc is None else part + acc).to(torch.float32)
    return torch.zeros(*a.shape[:-1], b.shape[-2]) if acc is None else acc


def fused(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a b + c of FP32 numbers, rounded once."""
    return (a.double() * b + c).float()


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x, rounded to the nearest FP32 number."""
    return x.double().exp2().float()


def attention_cast(x: torch.Tensor, rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [B, H, Tp, W], scale [B, H, Tp / 64] in FP32) of x [B, H, T, D]; Tp: T filled up to a multiple of 64.

    rotated: the codes are of x R, whose entries are sums of D of x's: of FP32 rounded to BF16.

    >>> codes, scale = attention_cast(torch.ones(1, 1, 3, 64), rotated=False)
    >>> codes.shape, codes[0, 0, 2:4, 0].tolist(), (448 * scale).tolist()
    (torch.Size([1, 1, 64, 64]), [448.0, 0.0], [[[1.0]]])
    """
    b, h, t, d = x.shape
    width = width_of(d)
    x = torch.nn.functional.pad(x, (0, width - d, 0, -t % BLOCK))
    if rotated:
        x = halved(x)
        # Not from the cache where x is fake, of a step that is planned: a fake rotation would stay there.
        make = rotation_of.__wrapped__ if isinstance(x, FakeTensor) else rotation_of
        x = product(x, make(width, x.dtype, x.device), STEP)
    groups = x.float().reshape(b, h, -1, BLOCK * width)
    amax = torch.where(groups.isfinite(), groups.abs(), 0.0).amax(-1)
    s = scale_factor(amax, 448.0)
    codes = saturating_cast(groups * s[..., None], groups, E4M3)
    return codes.reshape(b, h, -1, width), torch.ones((), device=s.device) / s


def cast_heads(x: torch.Tensor, rotated: bool, of_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x cast, as (codes in FP32, scales of rows): [B, heads of k, heads that share one, Tp, W or 1]."""
    codes, scale = attention_cast(x, rotated)
    return heads(decode(codes, torch.float32), of_keys), heads(scale.repeat_interleave(BLOCK, 2)[..., None], of_keys)


def heads(x: torch.Tensor, of_keys: int) -> torch.Tensor:
    """[B, heads of k, heads that share one, ...] of x [B, heads, ...]."""
    return x.unflatten(1, (of_keys, -1))


def as_given(x: torch.Tensor, t: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """A result [B, t, heads, d] of x [B, heads of k, heads that share one, Tp, W]."""
    return x.flatten(1, 2)[:, :, :t, :d].to(dtype).transpose(1, 2).contiguous()


def visible(form: Form, rows: slice, columns: slice, s: int, device: torch.device) -> torch.Tensor:
    """[rows, columns] of booleans: whether query i sees key j."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + form.offset
    j = torch.arange(columns.start, columns.stop, device=device)[None, :]
    seen = (j < s) & (i >= i)
    if form.causal:
        seen = seen & (j <= i)
        if form.window:
            seen = seen & (j > i - form.window)
    return seen


def steps(form: Form, t: int, s: int) -> Iterator[tuple[slice, slice]]:
    """(rows of queries, keys) of each block of keys and the blocks of queries that see any of it."""
    for key in range(0, s, BLOCK):
        first, last = 0, t
        if form.causal:
            first = max(key - form.offset, 0)
            if form.window:
                last = min(t, key + BLOCK - 1 + form.window - form.offset)
        if first < last:
            yield slice(first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK), slice(key, key + BLOCK)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
    """softmax(q k^T) v [B, T, H, D] of q [B, H, T, D] and k, v [B, heads of k, S, D], in q's dtype.

    A query that sees no key gives zeros.

    >>> q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 2, 64)
    >>> v = torch.tensor([1.0, 2.0])[:, None].expand(1, 1, 2, 64)
    >>> attention(q, k, v, Form(0.125))[0, 0, 0, :2]
    tensor([1.5000, 1.5000])
    """
    t, s, d, of_keys = q.shape[2], k.shape[2], q.shape[3], k.shape[1]
    (q8, scale_q), (k8, scale_k), (v8, scale_v) = (
        cast_heads(x, rotated, of_keys) for x, rotated in ((q, form.rotated), (k, form.rotated), (v, False))
    )
    factor_q = scale_q * torch.tensor(factor_of(form, d), dtype=torch.float32, device=q.device)
    top = torch.full_like(factor_q, -math.inf)
    total, o = torch.zeros_like(factor_q), torch.zeros_like(q8)
    for rows, keys in steps(form, t, s):
        at, here = (..., rows, slice(None)), (..., keys, slice(None))
        of_block = (..., keys.start, None, slice(None))  # the row of a scale that all rows of the block have
        f = (factor_q[at] * scale_k[of_block]).clamp(min=TINY)
        scores = product(q8[at], k8[here], FP8_STEP)
        scores = scores.masked_fill(~visible(form, rows, keys, s, q.device), -math.inf)
        m = scores.amax(-1, keepdim=True) * f
        codes = exp2(fused(scores, f, LOG2_448 - finite(m))).clamp(max=448).to(E4M3).float()
        after = torch.maximum(top[at], m)
        kept, gained = exp2(top[at] - finite(after)), exp2(m - finite(after))
        top[at] = after
        total[at] = fused(total[at], kept, gained * codes.sum(-1, keepdim=True))
        weighted = product(codes, v8[here].mT, FP8_STEP)
        o[at] = fused(weighted, gained * scale_v[of_block], o[at] * kept)
    return as_given(o * torch.where(total == 0, 0.0, torch.ones_like(total) / total), t, d, q.dtype)


def finite(m: torch.Tensor) -> torch.Tensor:
    """m, with 0 where no key is seen: -Inf less -Inf is no number."""
    return torch.where(m == -math.inf, 0.0, m)
