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
    writable,
    writer,
)
from fp8engine.kernels.tile import load_tile, place_of
from fp8engine.kernels.tuning import Config, capability, pick


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
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
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_MK = load_tile(a, row, k, M, K, (stride_am, stride_ak), BLOCK_M, BLOCK_K, LOAD_A)
            b_NK = load_tile(b, column, k, N, K, (stride_bn, stride_bk), BLOCK_N, BLOCK_K, LOAD_B)
            acc_MN = tl.dot(a_MK, b_NK.T, acc_MN)
        top, over, bad = store_result(
            y, acc_MN, row, column, M, N, None, None, bias, output_scale,
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
    m, k = a_MK.shape
    n = b_NK.shape[0]
    y_MN = result_of(m, n, epilogue, a_MK.device)
    if m == 0 or n == 0:
        return y_MN
    loads = load_of(a_MK), load_of(b_NK)
    if config is None:
        config = pick("matmul_fp16", capability(y_MN.device), m, n, POINTER not in loads)
    load_a, load_b = loads if config.descriptors else (POINTER, POINTER)
    store_by_descriptor, cut = writable(y_MN, config, epilogue), parts(config, epilogue, y_MN)
    _matmul_fp16_kernel[persistent_grid(m, n, config, y_MN.device)](
        reader(a_MK, load_a, config.block_m, config.block_k), reader(b_NK, load_b, config.block_n, config.block_k),
        epilogue.bias_N, epilogue.scale,  # inputs
        writer(y_MN, store_by_descriptor, config.block_m, config.block_n // cut),
        epilogue.amax, epilogue.counts,  # outputs
        m, n, k, *a_MK.stride(), *b_NK.stride(),  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        LOAD_A=load_a, LOAD_B=load_b, STORE_BY_DESCRIPTOR=store_by_descriptor, PARTS=cut,
        ACTIVATION=epilogue.activation, OUT=triton_dtype(epilogue.out), ADD=epilogue.into is not None,
        num_warps=config.warps, num_stages=stages(config, y_MN),
    )  # fmt: skip
    return y_MN
