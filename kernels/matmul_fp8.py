"""FP8 matmul on Hopper's Tensor Cores, scales per tensor or per row, with the format decided before the store.

    y[M, N] = f(sum_k a[m, k] b[n, k] * (scale_a[m] * scale_b[n]) + bias[n])    stored as the epilogue says

Both operands are contiguous along K: FP8 wgmma reads nothing else (PTX ISA, wgmma.mma_async, matrix descriptors).
Persistent: a program, or the two that fit, on each multiprocessor walk the tiles, neighbours at the same time.  Under
`flatten` the first loads of a tile are issued before the epilogue of the one before, else behind it.  Promoted sums do
not overlap the products: at most 72 % of the Tensor Core's rate (`make codegen`, column ceiling).  A result of few
tiles is summed in parts of K (split_k.py).

    fast       the Tensor Core adds into one accumulator of about 13 mantissa bits below its largest term
    promoted   each BLOCK_K products are summed there, and the sums in FP32 registers

Cost: 2 M N K operations; from L2 (BLOCK_M + BLOCK_N) * BLOCK_K bytes for every 2 * BLOCK_M * BLOCK_N * BLOCK_K of them,
48 bytes per clock and multiprocessor at 128x256x128 and full rate.
Twin: fp8engine/ops/reference/matmul.py.
Source of the accumulator's width: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
"""

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

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


# M is the number of tokens: no machine code depends on what divides it, and it changes from batch to batch.
@triton.jit(do_not_specialize=["M"])
def _matmul_fp8_kernel(
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
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    LOAD: tl.constexpr,
    STORE_BY_DESCRIPTOR: tl.constexpr,
    PARTS: tl.constexpr,
    PROMOTED: tl.constexpr,
    BY_ROW_A: tl.constexpr,
    BY_ROW_B: tl.constexpr,
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
            a_MK = load_tile(a, row, k, M, K, (stride_a, 1), BLOCK_M, BLOCK_K, LOAD)
            b_NK = load_tile(b, column, k, N, K, (stride_b, 1), BLOCK_N, BLOCK_K, LOAD)
            if PROMOTED and cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
                acc_MN += tl.dot(a_MK, b_NK.T)
            elif PROMOTED:  # everywhere else Triton folds the addition into the accumulator of mma.sync or tcgen05
                acc_MN += tl.dot(a_MK, b_NK.T, max_num_imprecise_acc=BLOCK_K)
            else:
                acc_MN = tl.dot(a_MK, b_NK.T, acc_MN)
        top, over, bad = store_result(
            y + part * (tl.cast(M, tl.int64) * N) if SPLIT else y, acc_MN, row, column, M, N,
            scale_a, scale_b, bias, output_scale,
            OUT, ACTIVATION, BY_ROW_A, BY_ROW_B, STORE_BY_DESCRIPTOR, PARTS, COUNT, ADD,
        )  # fmt: skip
        if COUNT:
            amax = tl.maximum(amax, top)
            saturated += over
            nonfinite += bad
    if COUNT:
        publish(amax_ptr, counts_ptr, amax, saturated, nonfinite)


def matmul_fp8(
    a, b, epilogue, promoted: bool = False, config: Config | None = None, gluon: bool = True
) -> torch.Tensor:
    """y [M, N] of `epilogue.out` from operands (data, scale, ...) of FP8 codes contiguous along K.

    a.data [M, K], b.data [N, K]: E4M3 by E4M3, E5M2 by E4M3 or E4M3 by E5M2.  Scales FP32: (), or [M, 1] and [N, 1].
    epilogue: bias_N, activation, out, scale (of an FP8 result), amax, counts, into, as in the twin's Epilogue.
    gluon: whether a configuration of Gluon's kernels is run by them; else plain Triton runs it.
    """
    (m, k), n, where = a.data.shape, b.data.shape[0], a.data.device
    if m == 0 or n == 0:
        return result_of(m, n, epilogue, where)
    operation = "matmul_fp8_promoted" if promoted else "matmul_fp8"
    if config is None:
        config = pick(operation, capability(where), m, n, describable(a.data) and describable(b.data))
    if gluon and config.kernel == "gluon":  # experimental in Triton: imported only where used
        from fp8engine.kernels import matmul_gluon, matmul_gluon_scaled

        if promoted and matmul_gluon_scaled.unsupported(a, b, epilogue, config) is None:
            return matmul_gluon_scaled.matmul_gluon_scaled(a, b, epilogue, config)
        if not promoted and matmul_gluon.unsupported(a, b, epilogue) is None:
            return matmul_gluon.matmul_gluon(a, b, epilogue, config)
    config = plain(config)
    load = "descriptor" if config.descriptors else "pointer"
    sums = sums_of(m, n, k, config, epilogue, where)
    whole, end, cut = sums.depth is None, sums.epilogue, parts(config, sums.epilogue, sums.y)
    grid = persistent_grid(m, n, config, where, programs(operation, config, where), sums.parts)
    launched = _matmul_fp8_kernel[grid](
        reader(a.data, load, config.block_m, config.block_k), reader(b.data, load, config.block_n, config.block_k),
        a.scale if whole else None, b.scale if whole else None, end.bias_N, end.scale,  # inputs
        writer(sums.y, sums.described, config.block_m, config.block_n // cut),
        end.amax, end.counts,  # outputs
        m, n, k, a.data.stride(0), b.data.stride(0), sums.depth,  # sizes
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        LOAD=load, STORE_BY_DESCRIPTOR=sums.described, PARTS=cut, PROMOTED=promoted,
        BY_ROW_A=whole and a.scale.dim() == 2, BY_ROW_B=whole and b.scale.dim() == 2,
        ACTIVATION=end.activation, OUT=triton_dtype(end.out), ADD=end.into is not None,
        FLATTEN=config.flatten, num_warps=config.warps, num_stages=stages(config, sums.y),
    )  # fmt: skip
    encode_once(launched)
    return sums.end((a.scale, b.scale), epilogue)
