"""Gradients of attention: scores and sums of the exact softmax in 16 bits and FP32, dO V^T in FP8.

    s       factor (q k^T) from q and k in 16 bits;  P = 2^(s - L),  L = log2 sum 2^s
    dP      scale_do scale_v (do8 v8^T)              do and v rotated as the forward's q and k: it cancels
    delta   sum_j P dP                               dS = P (dP - delta)
    dQ      scale dS K        dK = scale dS^T Q        dV = P^T dO            P, P dP and dS rounded to 16 bits

L and delta are found in the pass that finds dQ, which so needs two sums and neither o nor L of the forward:

    dQ = scale (A - delta B) / l      p = 2^(s - M), M the largest score so far
    A = sum_j (p dP) k                B = sum_j p k            l = sum_j p

Why only dP is in FP8: scores in FP8 as well leave fewer than 25 dB of dQ and dK (docs/layers.md has the table).  In
place of dP they would cost as much on normal inputs, and more where outliers make scores large.  And the forward's own
o and L, which rounding to FP8 has moved, would leave a dS that does not sum to zero over the keys.

dQ goes over keys, dK and dV over the queries of all heads that share them, in a fixed order: two runs are equal.
Products are exact in chunks (32 columns of FP8, 16 of 16 bits), which are added in FP32 in order.
Source: FlashAttention-2, arXiv 2307.08691, section 3.1 for the backward; arXiv 2407.08608 for the rotation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fp8engine.ops.reference.attention import (
    BLOCK,
    FP8_STEP,
    LOG2_E,
    STEP,
    Form,
    as_given,
    cast_heads,
    exp2,
    finite,
    fused,
    halved,
    heads,
    product,
    steps,
    visible,
    width_of,
)


class Gradients(NamedTuple):
    """dq [B, T, H, D], dk and dv [B, S, heads of k, D], in the inputs' dtype."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class _Given(NamedTuple):
    """q, k and do in 16 bits; do and v in FP8, as codes in FP32 and scales of rows.

    All but the factor, which turns products into scores in units of log2, are [B, heads of k, heads that share one, T,
    W], k and v with one head that shares.
    """

    q: torch.Tensor
    k: torch.Tensor
    do: torch.Tensor
    do8: tuple[torch.Tensor, torch.Tensor]
    v8: tuple[torch.Tensor, torch.Tensor]
    form: Form
    keys: int
    factor: torch.Tensor

    def visible(self, rows: slice, keys: slice) -> torch.Tensor:
        """Whether queries see keys."""
        return visible(self.form, rows, keys, self.keys, self.q.device)

    def dp(self, rows: slice, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """do v^T of the codes of some rows and keys, and its scale."""
        (do, scale_do), (v, scale_v) = self.do8, self.v8
        scale = scale_do[..., rows, :] * scale_v[..., keys, :].mT
        return product(do[..., rows, :], v[..., keys, :], FP8_STEP), scale


def attention_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> Gradients:
    """Gradients of `attention` by q [B, H, T, D], k and v [B, heads of k, S, D]; do [B, H, T, D].

    >>> q, v = torch.zeros(1, 1, 1, 64), torch.eye(64)[None, None, :2]
    >>> found = attention_backward(torch.ones(1, 1, 1, 64), q, v, v, Form(0.125, rotated=False))
    >>> (found.dq.abs() < 1e-6).all().item(), found.dv[0, :, 0, 0].tolist()  # one score is as good as the other
    (True, [0.5, 0.5])
    """
    t, s, d, of_keys = q.shape[2], k.shape[2], q.shape[3], k.shape[1]
    q16, k16, do16 = (heads(_filled(halved(x)), of_keys) for x in (q, k, do))
    (do8, scale), v8 = (cast_heads(x, form.rotated, of_keys) for x in (do, v))
    do8 = do8, scale / (do8.shape[-1] if form.rotated else 1)  # R R^T = W I
    factor = torch.tensor(form.scale * LOG2_E, dtype=torch.float32, device=q.device)
    given = _Given(q16, k16, do16, do8, v8, form, s, factor)
    dq, level, delta = _of_queries(given, t)
    dk, dv = _of_keys(given, level, delta, t)
    return Gradients(*(as_given(x, n, d, q.dtype) for x, n in ((dq, t), (dk, s), (dv, s))))


def _of_queries(given: _Given, t: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, L and delta, FP32."""
    q, k, factor = given.q, given.k, given.factor
    top = torch.full_like(q[..., :1], -math.inf, dtype=torch.float32)
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    a, b = (torch.zeros_like(q, dtype=torch.float32) for _ in "ab")
    for rows, keys in steps(given.form, t, given.keys):
        at = (..., rows, slice(None))
        scores = product(q[at], k[..., keys, :], STEP).masked_fill(~given.visible(rows, keys), -math.inf)
        after = torch.maximum(top[at], scores.amax(-1, keepdim=True) * factor)
        kept = exp2(top[at] - finite(after))
        p = exp2(fused(scores, factor, -finite(after)))
        dp, scale = given.dp(rows, keys)
        w = p * (dp * scale)
        top[at] = after
        total[at] = fused(total[at], kept, p.sum(-1, keepdim=True))
        weighted[at] = fused(weighted[at], kept, w.sum(-1, keepdim=True))
        turned = k[..., keys, :].mT
        a[at] = product(w.to(q.dtype), turned, STEP, a[at] * kept)
        b[at] = product(p.to(q.dtype), turned, STEP, b[at] * kept)
    inverse = torch.where(total == 0, 0.0, torch.ones_like(total) / total)
    level = torch.where(total == 0, 0.0, top + total.double().log2().float())
    delta = weighted * inverse
    return fused(-delta, b, a) * (inverse * given.form.scale), level, delta


def _of_keys(given: _Given, level: torch.Tensor, delta: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV, FP32: a block of keys at a time, over the queries of one head after the other."""
    dk, dv = (torch.zeros_like(given.k, dtype=torch.float32) for _ in "kv")
    real = torch.arange(given.q.shape[3], device=dk.device)[:, None] < t  # but queries that fill up the last block
    for head in range(given.q.shape[2]):
        q, do, codes, scales, floor, mean = (x[:, :, head, None] for x in (given.q, given.do, *given.do8, level, delta))
        one = given._replace(do8=(codes, scales))
        for rows, keys in steps(given.form, t, given.keys):
            at, here = (..., rows, slice(None)), (..., keys, slice(None))
            seen = given.visible(rows, keys) & real[rows]
            scores = product(q[at], given.k[here], STEP)
            p = exp2(fused(scores, given.factor, -floor[at])).masked_fill(~seen, 0.0)
            dp, scale = one.dp(rows, keys)
            ds = p * fused(dp, scale, -mean[at])
            dv[here] = product(p.to(q.dtype).mT, do[at].mT, STEP, dv[here])
            dk[here] = product(ds.to(q.dtype).mT, q[at].mT, STEP, dk[here])
    return dk * given.form.scale, dv


def _filled(x: torch.Tensor) -> torch.Tensor:
    """x with zeros up to whole blocks of rows and the width of a cast."""
    return torch.nn.functional.pad(x, (0, width_of(x.shape[3]) - x.shape[3], 0, -x.shape[2] % BLOCK))
