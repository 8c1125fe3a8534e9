"""Attention in FP8, backward: dO V^T from E4M3 operands, every other product in 16 bits, softmax and sums in FP32.

    by queries   p = 2^(s - M), l = sum p, A = sum (p dP) k, B = sum p k      dQ = scale (A - delta B) / l
                 delta = sum p dP / l, L = M + log2 l are kept for the second kernel
    by keys      P = 2^(s - L), dS = P (dP - delta)      dK = scale dS^T q      dV = P^T do

The first kernel has 64 queries of a head a program; the second 64 keys of a head of keys, and goes over the queries of
all heads that share them, one head after the other.  No atomics: two runs agree bit for bit.

Cost: 16 T S D operations a head, of them 4 in FP8; one product more than with the forward's o and L, whose rounding to
FP8 would be worth 4 dB of dQ and dK here.
Twin: fp8engine/ops/reference/attention_backward.py.  Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.attention import finite, keys_of, sees
from fp8engine.kernels.attention_cast import BLOCK, load_rows, store_rows

WARPS, STAGES = 8, 2


@triton.jit(do_not_specialize=["T", "S", "offset", "window"])
def _by_queries_kernel(
    q, k, do8, v8, scale_do, scale_v,
    dq, level, delta,
    T, S, H, GROUP,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    offset, window, factor, scale, turn,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last block first: under causality it has the most keys
    head = tl.program_id(1)
    batch = head // H
    of_keys = head % H // GROUP
    row = block * ROWS
    key_blocks = tl.cdiv(S, ROWS)
    down = tl.arange(0, ROWS)
    across = tl.arange(0, W)
    place = tl.cast(head, tl.int64) * tl.num_programs(0) + block
    corner = q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head % H, tl.int64) * stride_qh
    q_TD = load_rows(corner, row, T, stride_qt, D, W, ROWS).to(HALF)
    do_TD = tl.load(do8 + place * (ROWS * W) + (down[:, None] * W + across[None, :]))
    scale_dp = tl.load(scale_do + place) * turn
    k += tl.cast(batch, tl.int64) * stride_kb + tl.cast(of_keys, tl.int64) * stride_kh
    shared = tl.cast(batch, tl.int64) * (H // GROUP) + of_keys
    v8 += shared * key_blocks * (ROWS * W)
    scale_v += shared * key_blocks
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    a = tl.zeros((ROWS, W), tl.float32)
    b = tl.zeros((ROWS, W), tl.float32)
    first, last = keys_of(row, S, offset, window, CAUSAL, WINDOW, ROWS)
    for key in tl.range(first, last, ROWS):
        k_SD = load_rows(k, key, S, stride_kt, D, W, ROWS).to(HALF)
        v_SD = tl.load(v8 + tl.cast(key, tl.int64) * W + (down[:, None] * W + across[None, :]))
        scores = tl.dot(q_TD, k_SD.T)
        seen = sees((row + down)[:, None], (key + down)[None, :], S, offset, window, CAUSAL, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        after = tl.maximum(top, tl.max(scores, 1) * factor)
        kept = tl.exp2(top - finite(after))
        p = tl.exp2(tl.fma(scores, factor, -finite(after)[:, None]))
        w = p * (tl.dot(do_TD, v_SD.T) * (scale_dp * tl.load(scale_v + key // ROWS)))
        top = after
        total = tl.fma(total, kept, tl.sum(p, 1))
        weighted = tl.fma(weighted, kept, tl.sum(w, 1))
        a = tl.dot(w.to(HALF), k_SD, a * kept[:, None])
        b = tl.dot(p.to(HALF), k_SD, b * kept[:, None])
    inverse = tl.where(total == 0, 0.0, tl.div_rn(1.0, total))
    mean = weighted * inverse
    tl.store(level + place * ROWS + down, tl.where(total == 0, 0.0, top + tl.log2(total)))
    tl.store(delta + place * ROWS + down, mean)
    dq_TD = tl.fma(-mean[:, None], b, a) * (inverse * scale)[:, None]
    store_rows(dq + (tl.cast(batch, tl.int64) * T * H + head % H) * D, dq_TD, row, T, H * D, D)


@triton.jit(do_not_specialize=["T", "S", "offset", "window"])
def _by_keys_kernel(
    q, k, do, do8, v8, scale_do, scale_v, level, delta,
    dk, dv,
    T, S, H, GROUP,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_ot,
    offset, window, factor, scale, turn,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)  # under causality the first keys are seen by the most queries
    shared = tl.program_id(1)  # of B * heads of keys
    count = H // GROUP
    batch = shared // count
    key = block * ROWS
    query_blocks = tl.cdiv(T, ROWS)
    down = tl.arange(0, ROWS)
    across = tl.arange(0, W)
    place = tl.cast(shared, tl.int64) * tl.num_programs(0) + block
    corner = k + tl.cast(batch, tl.int64) * stride_kb + tl.cast(shared % count, tl.int64) * stride_kh
    k_SD = load_rows(corner, key, S, stride_kt, D, W, ROWS).to(HALF)
    v_SD = tl.load(v8 + place * (ROWS * W) + (down[:, None] * W + across[None, :]))
    scale_vt = tl.load(scale_v + place) * turn
    first = 0
    last = T
    if CAUSAL:
        first = tl.maximum(key - offset, 0) // ROWS * ROWS
    if WINDOW:
        last = tl.minimum(T, key + ROWS - 1 + window - offset)
    dk_SD = tl.zeros((ROWS, W), tl.float32)
    dv_SD = tl.zeros((ROWS, W), tl.float32)
    for member in tl.range(GROUP):
        head = shared % count * GROUP + member
        from_q = q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
        from_do = do + tl.cast(batch, tl.int64) * stride_ob + tl.cast(head, tl.int64) * stride_oh
        blocks = (tl.cast(batch, tl.int64) * H + head) * query_blocks
        for row in tl.range(first, last, ROWS):
            at = blocks + row // ROWS
            q_TD = load_rows(from_q, row, T, stride_qt, D, W, ROWS).to(HALF)
            do_TD = load_rows(from_do, row, T, stride_ot, D, W, ROWS).to(HALF)
            codes = tl.load(do8 + at * (ROWS * W) + (down[:, None] * W + across[None, :]))
            floor = tl.load(level + at * ROWS + down)
            mean = tl.load(delta + at * ROWS + down)
            scores = tl.dot(k_SD, q_TD.T)
            seen = sees((row + down)[None, :], (key + down)[:, None], S, offset, window, CAUSAL, WINDOW)
            seen = seen & ((row + down)[None, :] < T)
            p = tl.where(seen, tl.exp2(tl.fma(scores, factor, -floor[None, :])), 0.0)
            ds = p * tl.fma(tl.dot(v_SD, codes.T), tl.load(scale_do + at) * scale_vt, -mean[None, :])
            dv_SD = tl.dot(p.to(HALF), do_TD, dv_SD)
            dk_SD = tl.dot(ds.to(HALF), q_TD, dk_SD)
    there = (tl.cast(batch, tl.int64) * S * count + shared % count) * D
    store_rows(dk + there, dk_SD * scale, key, S, count * D, D)
    store_rows(dv + there, dv_SD, key, S, count * D, D)


def attention_backward(do, q, k, do8, v8, form, factor: float):
    """(dq [B, T, H, D], dk, dv [B, S, heads of k, D]) in q's dtype.

    do, q [B, H, T, D], k [B, heads of k, S, D]: columns together.  do8, v8: (codes, scale), both rotated or neither.
    factor: of q k^T, in units of log2.
    """
    (b, h, t, d), (_, of_keys, s, _) = q.shape, k.shape
    padded, width = do8[0].shape[2:]
    dq = torch.empty(b, t, h, d, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(b, s, of_keys, d, dtype=q.dtype, device=q.device) for _ in "kv")
    level, delta = (torch.empty(b, h, padded, dtype=torch.float32, device=q.device) for _ in "ld")
    half = {torch.float16: tl.float16}.get(q.dtype, tl.bfloat16)
    turn = 1 / width if form.rotated else 1.0  # R R^T = W I
    constants = {"D": d, "W": width, "ROWS": BLOCK, "HALF": half, "CAUSAL": form.causal, "num_warps": WARPS}
    constants |= {"WINDOW": form.causal and form.window > 0, "num_stages": STAGES}
    numbers = form.offset, form.window, factor, form.scale, turn
    given = t, s, h, h // of_keys, *q.stride()[:3], *k.stride()[:3]
    _by_queries_kernel[(padded // BLOCK, b * h)](
        q, k, do8[0], v8[0], do8[1], v8[1], dq, level, delta,  # inputs, outputs
        *given, *numbers, **constants,  # sizes, constants
    )  # fmt: skip
    _by_keys_kernel[(math.ceil(s / BLOCK), b * of_keys)](
        q, k, do, do8[0], v8[0], do8[1], v8[1], level, delta, dk, dv,
        *given, *do.stride()[:3], *numbers, **constants,
    )  # fmt: skip
    return dq, dk, dv
