"""Casts of queries, keys and values for attention: E4M3, one scale for each head and block of 64 rows.

    y = x R, or x       R: a Hadamard matrix with random signs, entries 1 and -1
    s = 448 / max |y|   over 64 rows and all columns        q = saturate(RNE(y s))        stored scale = 1 / s

A program casts one block.  Heads are filled up with zeros to W = 64 or 128 columns, rows to a multiple of 64, so that
the kernels that read the codes need no masks.  TRANSPOSED stores [W, rows]: P V sums over keys, and FP8 Tensor Cores
read operands contiguous along their sum.

Cost: 3 bytes an element of BF16; a rotation is one product of the block by R, on the Tensor Core.
Twin: `attention_cast` in fp8engine/ops/reference/attention.py.
Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.rounding import saturating_cast
from fp8engine.kernels.scaling import magnitude, peak, scale_factor, scale_of

BLOCK = 64  # rows that share a scale
WARPS = 4


@triton.jit
def _rows(x, row, T, stride_t, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
    """Addresses of x[row : row + ROWS] of a head whose columns lie together, [ROWS, W], and which lie in T x D."""
    down = tl.arange(0, ROWS)[:, None]
    across = tl.arange(0, W)[None, :]
    corner = x + tl.cast(row, tl.int64) * stride_t
    inside = down < T - row
    if D < W:
        inside = inside & (across < D)
    return corner + (down * stride_t + across), inside


@triton.jit
def load_rows(x, row, T, stride_t, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr):
    """x[row : row + ROWS, :D], zeros outside of T x D, [ROWS, W]."""
    at, inside = _rows(x, row, T, stride_t, D, W, ROWS)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(x, value, row, T, stride_t, D: tl.constexpr):
    """x[row : row + ROWS, :D] = value [ROWS, W], cut off at T x D."""
    at, inside = _rows(x, row, T, stride_t, D, value.shape[1], value.shape[0])
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _attention_cast_kernel(
    x, rotation,
    codes, scale,
    T, H, stride_b, stride_h, stride_t,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1)
    corner = x + tl.cast(head // H, tl.int64) * stride_b + tl.cast(head % H, tl.int64) * stride_h
    y = load_rows(corner, block * ROWS, T, stride_t, D, W, ROWS)
    if rotation is not None:
        across = tl.arange(0, W)
        turn = tl.load(rotation + across[:, None] * W + across[None, :])  # R^T, row by row
        y = tl.dot(y.to(turn.dtype), turn.T)
    y = y.to(tl.float32)
    s = scale_factor(peak(magnitude(y)), tl.float8e4nv, False)
    q = saturating_cast(y * s, y, tl.float8e4nv)
    tl.store(scale + tl.cast(head, tl.int64) * tl.num_programs(0) + block, scale_of(s))
    down = tl.arange(0, ROWS)
    across = tl.arange(0, W)
    if TRANSPOSED:
        whole = tl.num_programs(0) * ROWS
        there = codes + tl.cast(head, tl.int64) * W * whole + block * ROWS
        tl.store(there + (across[:, None] * whole + down[None, :]), q.T)
    else:
        there = codes + (tl.cast(head, tl.int64) * tl.num_programs(0) + block) * (ROWS * W)
        tl.store(there + (down[:, None] * W + across[None, :]), q)


def attention_cast(x: torch.Tensor, rotation: torch.Tensor | None, width: int, transposed: bool = False):
    """(codes [B, H, Tp, W], or [B, H, W, Tp] where transposed; scale [B, H, Tp / 64]) of x [B, H, T, D <= width].

    x: any strides, columns together.  rotation: R^T [W, W] in 16 bits, x's own dtype where that has 16.
    """
    b, h, t, d = x.shape
    blocks = math.ceil(t / BLOCK)
    shape = (b, h, width, blocks * BLOCK) if transposed else (b, h, blocks * BLOCK, width)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(b, h, blocks, dtype=torch.float32, device=x.device)
    _attention_cast_kernel[(blocks, b * h)](
        x, rotation, codes, scale, t, h, *x.stride()[:3],
        D=d, W=width, ROWS=BLOCK, TRANSPOSED=transposed, num_warps=WARPS,
    )  # fmt: skip
    return codes, scale
