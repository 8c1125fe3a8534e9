"""Matmuls on Tensor Cores: FP8 with scales per tensor, per row or along K, and FP16 and BF16 without scales.

    y[M, N] = f(sum_g s_a[m, g] s_b[n, g] (sum_{k in g} a[m, k] b[n, k]) * (scale_a[m] * scale_b[n]) + bias[n])

The format is decided before the store: f and what is stored are the epilogue's.  SUMS is what becomes of the Tensor
Core's sum of BLOCK_K values of K:

    kept       it stays in the Tensor Core's accumulator; for FP8 that has about 13 mantissa bits below its largest term
    promoted   it is added in FP32 registers
    scaled     it is multiplied by the scales of its group g and added in FP32 registers; BLOCK_K is the group

Both FP8 operands are contiguous along K: FP8 wgmma reads nothing else (PTX ISA, wgmma.mma_async, matrix descriptors).
16-bit operands have any strides, and nothing is copied: nn, nt, tn and tt are this with one or both transposed.  Where
rows are contiguous a tile is read as [K, rows] and turned by the Tensor Core's operand descriptor (tnspA and tnspB).

Persistent: a program, or the two that fit, on each multiprocessor walk the tiles, neighbours at the same time.  Under
`flatten` the first loads of a tile are issued before the epilogue of the one before, else behind it.  A result of few
tiles is summed in parts of K (split_k.py).  The tiles may be those of all experts (walk.py).  Promoted and scaled sums
do not overlap the products, because all warps multiply and then all add: at most 72 % of the Tensor Core's rate
promoted, 69 % with 128x128 scales of b, 57 % with 1x128 (`make codegen`, column ceiling).  Their tiles are 128 wide at
most: a second accumulator of 128x256 would spill.

Cost: 2 M N K operations, and 2 M N K / 128 more outside of the Tensor Core where sums are scaled; from L2
(BLOCK_M + BLOCK_N) * BLOCK_K bytes for every 2 * BLOCK_M * BLOCK_N * BLOCK_K operations, which are 48 bytes per clock
and multiprocessor at 128x256x128 and full rate.
Twin: fp8engine/ops/reference/matmul.py.
Source of the accumulator's width and of scales along K: DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from fp8engine.kernels.constant import Constant
from fp8engine.kernels.encoded import encode_once
from fp8engine.kernels.epilogue import publish, store_result
from fp8engine.kernels.launch import (
    MULTIPLE,
    POINTER,
    describable,
    load_of,
    parts,
    persistent_grid,
    reader,
    stages,
    triton_dtype,
    writer,
)
from fp8engine.kernels.split_k import Sums, sums_of
from fp8engine.kernels.tile import load_tile, part_of, store_tile
from fp8engine.kernels.tuning import Config, capability, pick, plain, programs
from fp8engine.kernels.walk import ONE, Walk, scale_rows, tile_at, tiles_of

CLEARED = Constant(16)  # rows that a program clears at a time, of those that belong to no expert
OPERATIONS = {"kept": "matmul_fp8", "promoted": "matmul_fp8_promoted", "scaled": "matmul_block"}  # in the tuning table


class Scales(NamedTuple):
    """SUMS as above; the scales of a and b, FP32, None for 16 bits; how many rows of each share one, -1 for all."""

    sums: str = "kept"
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    rows: tuple[int, int] = (-1, -1)


def sums_of_products(a, promoted: bool) -> str:
    """SUMS of an FP8 matmul whose first operand is a."""
    return "scaled" if a.scaled_along_k else "promoted" if promoted else "kept"


@triton.jit
def scale_of(scale, group, row, ROWS, strides, SHARE: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Scales of BLOCK rows in one group of K, to be broadcast along DIM; one number where all these rows share it.

    strides: of `scale`, along rows and along groups.  SHARE: rows that share a scale.
    """
    if SHARE % BLOCK == 0:
        return tl.load(scale + (row // SHARE) * strides[0] + group * strides[1])
    else:
        rows = row + tl.arange(0, BLOCK)
        where = (rows // SHARE) * strides[0] + group * strides[1]
        return tl.expand_dims(tl.load(scale + where, mask=rows < ROWS, other=0.0), DIM)


@triton.jit
def add_product(acc_MN, a_MK, b_NK, s, SUMS: tl.constexpr):
    """acc + a b^T: kept, promoted, or scaled by s."""
    if SUMS == "kept":
        return tl.dot(a_MK, b_NK.T, acc_MN)
    elif SUMS == "scaled":
        return acc_MN + tl.dot(a_MK, b_NK.T) * s
    elif cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
        return acc_MN + tl.dot(a_MK, b_NK.T)
    else:  # everywhere else Triton folds the addition into the accumulator of mma.sync or tcgen05
        return acc_MN + tl.dot(a_MK, b_NK.T, max_num_imprecise_acc=a_MK.shape[1])


# M is the number of tokens: machine code depends on what divides it in one case (WHOLE), and it changes from batch to
# batch.
@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    a, b, scale_a, scale_b, bias, output_scale, bounds,
    y, amax_ptr, counts_ptr,
    M, N, K, EXPERTS, stride_am, stride_ak, stride_bn, stride_bk,
    stride_scale_am, stride_scale_ak, stride_scale_bn, stride_scale_bk, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, FLATTEN: tl.constexpr,
    LOAD_A: tl.constexpr, LOAD_B: tl.constexpr, WHOLE: tl.constexpr, STORE_BY_DESCRIPTOR: tl.constexpr,
    PARTS: tl.constexpr, SUMS: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
    ACTIVATION: tl.constexpr, OUT: tl.constexpr, WAY: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """ROWS_A, ROWS_B: rows that share a scale; -1: all of them.  WHOLE: 16 divides M.  WAY, LEVELS: walk.py."""
    COUNT: tl.constexpr = amax_ptr is not None or counts_ptr is not None
    SPLIT: tl.constexpr = depth is not None
    SCALED: tl.constexpr = SUMS == "scaled"
    amax = 0.0
    saturated = 0
    nonfinite = 0
    walk = (bounds, EXPERTS)
    tiles = tiles_of(walk, M, N, WAY, BLOCK_M, BLOCK_N)
    items = tiles * tl.cdiv(K, depth) if SPLIT else tiles
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
        tile = item % tiles if SPLIT else item
        row, end, column, expert, place, first, last = tile_at(
            tile, walk, M, N, K, WAY, LEVELS, BLOCK_M, BLOCK_N, GROUP_M
        )
        part = 0
        if SPLIT:
            part, first, last = part_of(item, tiles, K, depth)
        if WAY == "rows" and BLOCK_M < 128:
            last = tl.where(row < end, K, 0)  # a tile behind the rows of its expert multiplies nothing
        # Of which the compiler knows that 16 divides it: M itself is not specialised.
        end_a = end // 16 * 16 if WHOLE else end
        at_a, scales_end, at_b = scale_rows(row, end_a, column, expert, place, N, WAY, ROWS_A, ROWS_B, BLOCK_M)
        row_b = column + expert * N if WAY == "rows" else column
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(first, last, BLOCK_K):
            a_MK = load_tile(a, row, k, end_a, K, (stride_am, stride_ak), BLOCK_M, BLOCK_K, LOAD_A)
            b_NK = load_tile(b, row_b, k, row_b - column + N, K, (stride_bn, stride_bk), BLOCK_N, BLOCK_K, LOAD_B)
            s = 1.0
            if SCALED:
                group = k // BLOCK_K
                end_b = at_b - column + N
                s_a = scale_of(scale_a, group, at_a, scales_end, (stride_scale_am, stride_scale_ak), ROWS_A, BLOCK_M, 1)
                s_b = scale_of(scale_b, group, at_b, end_b, (stride_scale_bn, stride_scale_bk), ROWS_B, BLOCK_N, 0)
                s = s_a * s_b
            acc_MN = add_product(acc_MN, a_MK, b_NK, s, SUMS)
        bias_N = bias
        if bias is not None:
            bias_N = bias + expert * N
        scale_aM = scale_a + expert * M if WAY == "sums" and ROWS_A == 1 and not SCALED else scale_a
        scale_bN = scale_b + expert * N if WAY != "one" and ROWS_B == 1 and not SCALED else scale_b
        y_MN = y
        if SPLIT or WAY == "sums":
            y_MN = y + (part + expert) * (tl.cast(M, tl.int64) * N)
        top, over, bad = store_result(
            y_MN, acc_MN, row, column, end, N,
            None if SCALED else scale_aM, None if SCALED else scale_bN, bias_N, output_scale,
            OUT, ACTIVATION, ROWS_A == 1, ROWS_B == 1, STORE_BY_DESCRIPTOR, PARTS, COUNT,
        )  # fmt: skip
        if COUNT:
            amax = tl.maximum(amax, top)
            saturated += over
            nonfinite += bad
    if WAY == "rows":  # those behind the last expert's
        nothing = tl.zeros((CLEARED, BLOCK_N), dtype=OUT)
        for cleared in range(tl.load(bounds + EXPERTS) + tl.program_id(0) * CLEARED, M, tl.num_programs(0) * CLEARED):
            for across in range(0, N, BLOCK_N):
                store_tile(y, nothing, cleared, across, M, N, False)
    if COUNT:
        publish(amax_ptr, counts_ptr, amax, saturated, nonfinite)


def matmul_fp8(
    a, b, epilogue, promoted: bool = False, config: Config | None = None, gluon: bool = True, walk: Walk = ONE
) -> torch.Tensor:
    """y [M, N] of `epilogue.out` from operands (data, scale, rows, cols, ...) of FP8 codes contiguous along K.

    a.data [M, K], b.data [N, K]: E4M3 by E4M3, E5M2 by E4M3 or E4M3 by E5M2.  Scales FP32: (); [M, 1] and [N, 1]; or
    along K, one per `rows` rows and `cols` of K, where cols is the same for both, and rows 1 or a multiple of it.
    epilogue: bias_N, activation, out, scale (of an FP8 result), amax, counts, as in the twin's Epilogue.
    promoted: whether sums are; under scales along K they always are.
    gluon: whether a configuration of Gluon's kernel is run by it where it can; else plain Triton runs it.
    walk: of one matrix, or of experts: y is then what matmul_grouped.py says.
    """
    sums, (shape, m) = sums_of_products(a, promoted), walk.result(a.data, b.data)
    if config is None:
        aligned = describable(a.data) and describable(b.data)
        config = pick(OPERATIONS[sums], capability(a.data.device), m, shape[-1], aligned)
    if gluon and config.kernel == "gluon" and sums != "kept":
        from fp8engine.kernels import matmul_gluon  # experimental in Triton: only where used

        if matmul_gluon.unsupported(a, b, epilogue, config, walk) is None:
            return matmul_gluon.matmul_gluon(a, b, epilogue, config, walk)
    config, rows = plain(config), (1 if a.scale.dim() == 2 else -1, 1 if b.scale.dim() == 2 else -1)
    if sums == "scaled":
        config, rows = config._replace(block_k=a.cols), (a.rows, b.rows)
    return _launch(OPERATIONS[sums], a.data, b.data, Scales(sums, a.scale, b.scale, rows), epilogue, config, walk)


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, epilogue, config: Config | None = None) -> torch.Tensor:
    """y [M, N] of `epilogue.out` from a [M, K] and b [N, K], both FP16 or both BF16, of any strides.

    epilogue: bias_N, activation, out, scale (of an FP8 result), amax, counts, as in the twin's Epilogue.
    """
    m, n, described = a_MK.shape[0], b_NK.shape[0], POINTER not in (load_of(a_MK), load_of(b_NK))
    config = config or pick("matmul_fp16", capability(a_MK.device), m, n, described)
    return _launch("matmul_fp16", a_MK, b_NK, Scales(), epilogue, config)


def _launch(
    operation: str, a_MK: torch.Tensor, b_NK: torch.Tensor, scales: Scales, epilogue, config: Config, walk: Walk = ONE
) -> torch.Tensor:
    (m, k), where, scaled = a_MK.shape, a_MK.device, scales.sums == "scaled"
    shape, rows = walk.result(a_MK, b_NK)
    n = shape[-1]
    if 0 in shape:
        return a_MK.new_empty(shape, dtype=epilogue.out)
    load_a, load_b = (load_of(a_MK), load_of(b_NK)) if config.descriptors else (POINTER, POINTER)
    # Where its rows, or scales of its rows, may be what is read side by side.
    whole = m % MULTIPLE == 0 and (walk.way == "sums" or (load_a == POINTER and a_MK.itemsize == 2))
    if walk.bounds is None:
        sums = sums_of(m, n, k, config, epilogue, where)
        end, cut = sums.epilogue, parts(config, sums.epilogue, sums.y)
    else:  # y is written by pointers, whose masks end with an expert
        crowded = walk.way == "sums" and scaled and not config.descriptors  # 4 warps spill on sm_89
        config = config._replace(flatten=False, warps=8 if crowded else config.warps)
        sums = Sums(a_MK.new_empty(shape, dtype=epilogue.out), epilogue)
        end, cut = epilogue, parts(config._replace(descriptors=False), epilogue, sums.y.flatten(0, -2))
    late = (None, None) if scaled else (scales.a, scales.b)  # of parts: when they are added
    if sums.depth is not None and not scaled:
        scales = Scales(scales.sums)
    grid = persistent_grid(rows, n, config, where, programs(operation, config, where), sums.parts)
    launched = _matmul_kernel[grid](
        reader(a_MK, load_a, config.block_m, config.block_k), reader(b_NK, load_b, config.block_n, config.block_k),
        scales.a, scales.b, end.bias_N, end.scale, walk.bounds,  # inputs
        writer(sums.y, sums.described, config.block_m, config.block_n // cut),
        end.amax, end.counts,  # outputs
        m, n, k, walk.experts, *a_MK.stride(), *b_NK.stride(),  # sizes
        *((*scales.a.stride(), *scales.b.stride()) if scaled else (0, 0, 0, 0)), sums.depth,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,  # constants
        LOAD_A=load_a, LOAD_B=load_b, WHOLE=whole, STORE_BY_DESCRIPTOR=sums.described, PARTS=cut,
        SUMS=scales.sums, ROWS_A=scales.rows[0], ROWS_B=scales.rows[1],
        ACTIVATION=end.activation, OUT=triton_dtype(end.out), WAY=walk.way, LEVELS=walk.levels,
        FLATTEN=config.flatten, num_warps=config.warps, num_stages=stages(config, sums.y),
    )  # fmt: skip
    encode_once(launched)
    return sums.end(late, epilogue)
