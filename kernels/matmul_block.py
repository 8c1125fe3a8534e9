"""FP8 matmul with scales along K: 1x128 by 128x128 (forward, dgrad) and 1x128 by 1x128 (wgrad).

    y[M, N] = f(sum_g scale_a[m, g] scale_b[n, g] (sum_{k in g} a[m, k] b[n, k]) + bias[n])      g: 128 values of K

The inner sum is the Tensor Core's, the outer one FP32 registers': each 128 of K are promoted, and the scales ride on
the promotion, which costs one multiply-add an element where promoting alone costs an addition.
A scale covers `rows` rows of its operand: one per row (1), or one for a tile's 128 (128), read as one number where the
tile does not cross a block.  Tiles are 128 wide at most: a second accumulator of 128x256 would spill.

Cost: 2 M N K operations, and 2 M N K / 128 outside of the Tensor Core, which waits for them: all warps multiply, then
all scale.  So at most 69 % of its rate with 128x128 scales of b, 57 % with 1x128 (`make codegen`, column ceiling).
Twin: fp8engine/ops/reference/matmul.py.
Source: DeepSeek-V3, arXiv 2412.19437, section 3.3 (fine-grained quantisation, increased accumulation precision).
"""

import torch
import triton
import triton.language as tl

from fp8engine.kernels.encoded import encode_once
from fp8engine.kernels.epilogue import publish, store_result
from fp8engine.kernels.launch import (
    describable,
    parts,
    persistent_grid,
    reader,
    result_of,
    stages,
    triton_dtype,
    writer,
)
from fp8engine.kernels.split_k import sums_of
from fp8engine.kernels.tile import load_tile, part_of, place_of
from fp8engine.kernels.tuning import Config, capability, pick, plain, programs


@triton.jit
def scale_of(scale, index, row, ROWS, stride_row, stride_k, SCALE_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Scales of BLOCK_ROWS rows in one group of K: a vector, or one number where all rows share it."""
    if SCALE_ROWS % BLOCK_ROWS == 0:
        return tl.load(scale + (row // SCALE_ROWS) * stride_row + index * stride_k)
    else:
        rows = row + tl.arange(0, BLOCK_ROWS)
        where = (rows // SCALE_ROWS) * stride_row + index * stride_k
        return tl.load(scale + where, mask=rows < ROWS, other=0.0)


@triton.jit(do_not_specialize=["M"])  # the number of tokens changes from batch to batch; the code does not
def _matmul_block_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    output_scale,
    y,
    amax_ptr,
    counts_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_scale_am,
    stride_scale_ak,
    stride_scale_bn,
    stride_scale_bk,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    LOAD: tl.constexpr,
    STORE_BY_DESCRIPTOR: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS_A: tl.constexpr,
    ROWS_B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OUT: tl.constexpr,
    ADD: tl.constexpr,
):
    COUNT: tl.constexpr = amax_ptr is not None or counts_ptr is not None
    ONE_SCALE_A: tl.constexpr = ROWS_A % BLOCK_M == 0
    ONE_SCALE_B: tl.constexpr = ROWS_B % BLOCK_N == 0
    amax = 0.0
    saturated = 0
    nonfinite = 0
    SPLIT: tl.constexpr = depth is not None
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    items = tiles * tl.cdiv(K, depth) if SPLIT else tiles
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
        row, column = place_of(item % tiles if SPLIT else item, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        part, first, end = part_of(item, tiles, K, depth)
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(first, end, BLOCK_K):
            a_MK = load_tile(a, row, k, M, K, (stride_a, 1), BLOCK_M, BLOCK_K, LOAD)
            b_NK = load_tile(b, column, k, N, K, (stride_b, 1), BLOCK_N, BLOCK_K, LOAD)
            group = k // BLOCK_K
            s_a = scale_of(scale_a, group, row, M, stride_scale_am, stride_scale_ak, ROWS_A, BLOCK_M)
            s_b = scale_of(scale_b, group, column, N, stride_scale_bn, stride_scale_bk, ROWS_B, BLOCK_N)
            sums_MN = tl.dot(a_MK, b_NK.T)
            if ONE_SCALE_A and ONE_SCALE_B:
                acc_MN += sums_MN * (s_a * s_b)
            elif ONE_SCALE_B:
                acc_MN += sums_MN * (s_a * s_b)[:, None]
            elif ONE_SCALE_A:
                acc_MN += sums_MN * (s_a * s_b)[None, :]
            else:
                acc_MN += sums_MN * (s_a[:, None] * s_b[None, :])
        top, over, bad = store_result(
            y + part * (tl.cast(M, tl.int64) * N) if SPLIT else y, acc_MN, row, column, M, N,
            None, None, bias, output_scale,
            OUT, ACTIVATION, False, False, STORE_BY_DESCRIPTOR, PARTS, COUNT, ADD,
        )  # fmt: skip
        if COUNT:
            amax = tl.maximum(amax, top)
            saturated += over
            nonfinite += bad
    if COUNT:
        publish(amax_ptr, counts_ptr, amax, saturated, nonfinite)


def matmul_block(a, b, epilogue, config: Config | None = None, gluon: bool = True) -> torch.Tensor:
    """y [M, N] of `epilogue.out` from operands (data, scale, rows, cols, ...) of FP8 codes contiguous along K.

    Scales FP32, one per `rows` rows and `cols` of K; cols is the same for both, and rows 1 or a multiple of it.
    epilogue: bias_N, activation, out, scale (of an FP8 result), amax, counts, into, as in the twin's Epilogue.
    gluon: whether a configuration of Gluon's kernel is run by it; else plain Triton runs it.
    """
    (m, k), n, where = a.data.shape, b.data.shape[0], a.data.device
    if m == 0 or n == 0:
        return result_of(m, n, epilogue, where)
    if config is None:
        config = pick("matmul_block", capability(where), m, n, describable(a.data) and describable(b.data))
    if gluon and config.kernel == "gluon":  # experimental in Triton: imported only where used
        from fp8engine.kernels import matmul_gluon_scaled

        if matmul_gluon_scaled.unsupported(a, b, epilogue, config) is None:
            return matmul_gluon_scaled.matmul_gluon_scaled(a, b, epilogue, config)
    config = plain(config)
    load = "descriptor" if config.descriptors else "pointer"
    sums = sums_of(m, n, k, config._replace(block_k=a.cols), epilogue, where)
    end, cut = sums.epilogue, parts(config, sums.epilogue, sums.y)
    grid = persistent_grid(m, n, config, where, programs("matmul_block", config, where), sums.parts)
    launched = _matmul_block_kernel[grid](
        reader(a.data, load, config.block_m, a.cols), reader(b.data, load, config.block_n, a.cols),
        a.scale, b.scale, end.bias_N, end.scale,  # inputs
        writer(sums.y, sums.described, config.block_m, config.block_n // cut),
        end.amax, end.counts,  # outputs
        m, n, k, a.data.stride(0), b.data.stride(0), *a.scale.stride(), *b.scale.stride(), sums.depth,  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=a.cols, GROUP_M=config.group_m,  # constants
        LOAD=load, STORE_BY_DESCRIPTOR=sums.described, PARTS=cut, ROWS_A=a.rows, ROWS_B=b.rows,
        ACTIVATION=end.activation, OUT=triton_dtype(end.out), ADD=end.into is not None,
        FLATTEN=config.flatten, num_warps=config.warps, num_stages=stages(config, sums.y),
    )  # fmt: skip
    encode_once(launched)
    return sums.end((None, None), epilogue)
