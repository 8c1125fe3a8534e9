"""Attention in FP8, forward: S = q k^T and P v from E4M3 operands, softmax statistics and sums in FP32.

    s = factor scale_q scale_k (q8 k8^T), -Inf where masked
    p = E4M3(2^(s - m + log2 448)), m: the row's maximum in the block
    l <- l 2^(M_old - M) + 2^(m - M) sum p      o <- o 2^(M_old - M) + 2^(m - M) scale_v (p v8)      result o / l

A program has 64 queries of one head, and goes over the keys that any of them sees, 64 at a time: one warpgroup, so that
two or more programs of a multiprocessor overlap the softmax of one with the products of another.  v is read as
[columns, keys], because FP8 Tensor Cores read both operands contiguous along their sum.  Each block's P v is a product
of its own, added in FP32 registers: the Tensor Core's own accumulator is narrower.

Cost: 4 T S D operations a head, and T S exponentials: at D = 128 the exponential unit (16 a clock and multiprocessor)
takes as long as the products (8,192 operations a clock).
Twin: fp8engine/ops/reference/attention.py, with the mathematics.
Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from fp8engine.kernels.attention_cast import BLOCK
from fp8engine.kernels.constant import Constant
from fp8engine.kernels.rounding import E4M3_MAX, round_to_grid

LOG2_448 = Constant(8.807354922057604)
TINY = Constant(2.0**-126)  # a factor of 0 would make NaN of the -Inf of a masked score
WARPS, STAGES = 4, 3  # of a program with BLOCK queries, whose steps have BLOCK keys


@triton.jit
def keys_of(row, S, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """The first key of the first block of keys, and the end of the keys, that ROWS queries from `row` on see."""
    first = 0
    last = S
    if CAUSAL:
        last = tl.minimum(row + ROWS + offset, S)
    if WINDOW:
        first = tl.maximum(row + offset - window + 1, 0) // ROWS * ROWS
    return first, last


@triton.jit
def sees(i, j, S, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries i see keys j, for the shape that both give together."""
    seen = j < S
    if CAUSAL:
        seen = seen & (j <= i + offset)
    if WINDOW:
        seen = seen & (j > i + offset - window)
    return seen


@triton.jit
def finite(m):
    """m, with 0 where no key is seen: -Inf less -Inf is no number."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def weight_codes(p):
    """(E4M3 codes of p >= 0, saturating; their values in FP32).  NaN stays NaN.

    The values are of codes of their own (scaling.py, `rounded_again`): the sum with 0 keeps compilers from making one
    conversion of both.
    """
    p = tl.where(p > E4M3_MAX, E4M3_MAX, p)
    if not cuda_capability_geq(9, 0):
        p = round_to_grid(p, tl.float8e4nv)
    return p.to(tl.float8e4nv), (p + 0.0).to(tl.float8e4nv).to(tl.float32)


@triton.jit(do_not_specialize=["T", "S", "offset", "window"])  # they change from batch to batch; the code does not
def _attention_kernel(
    q, k, v, scale_q, scale_k, scale_v,
    o,
    T, S, H, GROUP,
    offset, window, factor,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    # The last block of queries first: under causality it has the most keys.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)  # of B * H
    of_keys = (head // H) * (H // GROUP) + head % H // GROUP
    row = block * ROWS
    key_blocks = tl.cdiv(S, ROWS)
    down = tl.arange(0, ROWS)
    across = tl.arange(0, W)
    place = tl.cast(head, tl.int64) * tl.num_programs(0) + block
    q_TD = tl.load(q + place * (ROWS * W) + (down[:, None] * W + across[None, :]))
    factor_q = tl.load(scale_q + place) * factor
    k += tl.cast(of_keys, tl.int64) * key_blocks * (ROWS * W)
    v += tl.cast(of_keys, tl.int64) * key_blocks * (ROWS * W)
    scale_k += tl.cast(of_keys, tl.int64) * key_blocks
    scale_v += tl.cast(of_keys, tl.int64) * key_blocks
    whole = key_blocks * ROWS
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o_TD = tl.zeros((ROWS, W), tl.float32)
    first, last = keys_of(row, S, offset, window, CAUSAL, WINDOW, ROWS)
    for key in tl.range(first, last, ROWS):
        k_SD = tl.load(k + tl.cast(key, tl.int64) * W + (down[:, None] * W + across[None, :]))
        f = tl.maximum(factor_q * tl.load(scale_k + key // ROWS), TINY)
        scores = tl.dot(q_TD, k_SD.T)
        seen = sees((row + down)[:, None], (key + down)[None, :], S, offset, window, CAUSAL, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        m = tl.fma(tl.max(scores, 1), f, 0.0)  # a plain product would be fused into `m - after`, and not cancel
        codes, p = weight_codes(tl.exp2(tl.fma(scores, f, (-finite(m) + LOG2_448)[:, None])))
        after = tl.maximum(top, m)
        kept = tl.exp2(top - finite(after))
        gained = tl.exp2(m - finite(after))
        top = after
        total = tl.fma(total, kept, gained * tl.sum(p, 1))
        v_DS = tl.load(v + key + (across[:, None] * whole + down[None, :]))
        weighted = tl.dot(codes, v_DS.T)
        weight = gained * tl.load(scale_v + key // ROWS)
        o_TD = tl.fma(weighted, weight[:, None], o_TD * kept[:, None])
    o_TD *= tl.where(total == 0, 0.0, tl.div_rn(1.0, total))[:, None]
    # Not by store_rows: of 64 columns it leaves the loop a lower ceiling.
    inside = (row + down)[:, None] < T
    if D < W:
        inside = inside & (across < D)[None, :]
    there = o + ((tl.cast(head // H, tl.int64) * T + row) * H + head % H) * D
    tl.store(there + (down[:, None] * (H * D) + across[None, :]), o_TD.to(o.dtype.element_ty), mask=inside)


def attention(q, k, v, form, factor: float, shape, dtype: torch.dtype) -> torch.Tensor:
    """o [B, T, H, D] of that dtype from cast queries, keys [B, H, Tp, W] and values [B, H, W, Sp]: (codes, scale) each.

    form: causal, window and offset, as in the twin's Form.  factor: of q8 k8^T, in units of log2.
    shape: (T, S, D) of what was cast.
    """
    t, s, d = shape
    b, h, padded, width = q[0].shape
    o = torch.empty(b, t, h, d, dtype=dtype, device=q[0].device)
    _attention_kernel[(padded // BLOCK, b * h)](
        q[0], k[0], v[0], q[1], k[1], v[1], o,  # inputs, output
        t, s, h, h // k[0].shape[1], form.offset, form.window, factor,  # sizes
        D=d, W=width, ROWS=BLOCK, CAUSAL=form.causal, WINDOW=form.causal and form.window > 0,  # constants
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return o
