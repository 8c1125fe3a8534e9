"""FP16 and BF16 matmul on Tensor Cores from sm_80 on, operands in any layout: the baseline that FP8 is measured by.

    y[M, N] = f(sum_k a[m, k] b[n, k] + bias[n])      sums in FP32, rounded once; stored as the epilogue says

a[M, K] and b[N, K] are views of any strides: nn, nt, tn and tt are this with one or both transposed, and nothing is
copied.  Where K is contiguous a tile is read as [rows, K]; where the rows are, as [K, rows] and turned by the Tensor
Core's own operand descriptor (16-bit wgmma reads either; PTX ISA, wgmma.mma_async, tnspA and tnspB).

Persistent, as matmul_fp8 is.  Cost: 2 M N K operations.  Twin: fp8engine/ops/reference/matmul.py.
"""

import torch
import triton
import triton.language as tl

from fp8engine.kernels.epilogue import publish, store_result
from fp8engine.kernels.launch import (
    POINTER,
    load_of,
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
from fp8engine.kernels.tuning import Config, capability, pick, programs


@triton.jit
def _matmul_fp16_kernel(
    a,
    b,
    bias,
    output_scale,
    y,
    amax_ptr,
    counts_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    LOAD_A: tl.constexpr,
    LOAD_B: tl.constexpr,
    STORE_BY_DESCRIPTOR: tl.constexpr,
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OUT: tl.constexpr,
    ADD: tl.constexpr,
):
    COUNT: tl.constexpr = amax_ptr is not None or counts_ptr is not None
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
            a_MK = load_tile(a, row, k, M, K, (stride_am, stride_ak), BLOCK_M, BLOCK_K, LOAD_A)
            b_NK = load_tile(b, column, k, N, K, (stride_bn, stride_bk), BLOCK_N, BLOCK_K, LOAD_B)
            acc_MN = tl.dot(a_MK, b_NK.T, acc_MN)
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


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, epilogue, config: Config | None = None) -> torch.Tensor:
    """y [M, N] of `epilogue.out` from a [M, K] and b [N, K], both FP16 or both BF16, of any strides.

    epilogue: bias_N, activation, out, scale (of an FP8 result), amax, counts, into, as in the twin's Epilogue.
    """
    (m, k), n, where = a_MK.shape, b_NK.shape[0], a_MK.device
    if m == 0 or n == 0:
        return result_of(m, n, epilogue, where)
    loads = load_of(a_MK), load_of(b_NK)
    if config is None:
        config = pick("matmul_fp16", capability(where), m, n, POINTER not in loads)
    load_a, load_b = loads if config.descriptors else (POINTER, POINTER)
    sums = sums_of(m, n, k, config, epilogue, where)
    end, cut = sums.epilogue, parts(config, sums.epilogue, sums.y)
    _matmul_fp16_kernel[persistent_grid(m, n, config, where, programs("matmul_fp16", config, where), sums.parts)](
        reader(a_MK, load_a, config.block_m, config.block_k), reader(b_NK, load_b, config.block_n, config.block_k),
        end.bias_N, end.scale,  # inputs
        writer(sums.y, sums.described, config.block_m, config.block_n // cut),
        end.amax, end.counts,  # outputs
        m, n, k, *a_MK.stride(), *b_NK.stride(), sums.depth,  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        LOAD_A=load_a, LOAD_B=load_b, STORE_BY_DESCRIPTOR=sums.described, PARTS=cut,
        ACTIVATION=end.activation, OUT=triton_dtype(end.out), ADD=end.into is not None,
        FLATTEN=config.flatten, num_warps=config.warps, num_stages=stages(config, sums.y),
    )  # fmt: skip
    return sums.end((None, None), epilogue)
