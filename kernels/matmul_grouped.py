"""FP8 matmuls of all experts in one launch; how many rows an expert has is read on the card.

    rows    y[t, n]     = sum_k a[t, k] b[e(t), n, k] * scale_a scale_b + bias[e(t), n]      forward, dgrad
    sums    dw[e, m, n] = sum_{t of e} a[m, t] b[n, t] * scale_a scale_b                     wgrad

e(t): the expert of row t.  Persistent: programs walk the tiles of all experts, which `bounds` (expert_rows.py) tells
them; the host knows only a bound of how many there are.

    rows    a tile is 128 rows of one expert, or a part of them.  TMA reads beyond the expert's last row, and the result
            is stored with a mask: rows of the next expert are multiplied and not kept
    sums    a and b are laid out in blocks with zeros behind each expert's rows: whole blocks are multiplied, without a
            mask in the loop.  An expert without rows gets zeros

Scales per tensor; per row (of a: each row; of b: each row of each expert; in sums one per expert and row of a or b);
or along what is summed, 1 x 128 or 128 x 128 (or 32, 64), promoted as in matmul.py.  A row that belongs to no
expert, behind the last one, gets zeros.

Cost: 2 T N K operations each; of a ragged tile all 128 rows are multiplied: an expert of 17 rows costs what 64 cost.
Twin: fp8engine/ops/reference/grouped.py.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.epilogue import store_result
from fp8engine.kernels.expert_rows import BLOCK, expert_of, experts_of, last_blocks, most_blocks, rows_of, width
from fp8engine.kernels.launch import DESCRIPTOR, POINTER, describable, parts, processors, reader, stages, triton_dtype
from fp8engine.kernels.matmul import OPERATIONS, add_product, scale_of, sums_of_products
from fp8engine.kernels.tile import load_tile, place_of, store_tile
from fp8engine.kernels.tuning import Config, capability, pick, plain, programs

CLEARED = 16  # rows that a program clears at a time, of those that belong to no expert


@triton.jit
def _sums(
    a, b, scale_a, scale_b, row_a, row_b, scale_row_a, scale_row_b, first, last, LIMIT_A, LIMIT_B, LIMIT_SCALE_A,
    LIMIT_SCALE_B, LIMIT_K, stride_a, stride_b, strides_a, strides_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LOAD: tl.constexpr, SUMS: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
):  # fmt: skip
    """A tile's sums over [first, last): rows from row_a of a times rows from row_b of b, as FP32 [BLOCK_M, BLOCK_N].

    scale_row_a, scale_row_b: the tile's first rows within the scales.  LIMIT_*: where rows, and rows of scales, end.
    """
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first, last, BLOCK_K):
        a_MK = load_tile(a, row_a, k, LIMIT_A, LIMIT_K, (stride_a, 1), BLOCK_M, BLOCK_K, LOAD)
        b_NK = load_tile(b, row_b, k, LIMIT_B, LIMIT_K, (stride_b, 1), BLOCK_N, BLOCK_K, LOAD)
        s = 1.0
        if SUMS == "scaled":
            group = k // BLOCK_K
            s_a = scale_of(scale_a, group, scale_row_a, LIMIT_SCALE_A, strides_a, ROWS_A, BLOCK_M, 1)
            s_b = scale_of(scale_b, group, scale_row_b, LIMIT_SCALE_B, strides_b, ROWS_B, BLOCK_N, 0)
            s = s_a * s_b
        acc_MN = add_product(acc_MN, a_MK, b_NK, s, SUMS)
    return acc_MN


@triton.jit(do_not_specialize=["M"])  # the number of tokens changes from batch to batch; the code does not
def _grouped_rows_kernel(
    a, b, scale_a, scale_b, bias, bounds,
    y,
    M, N, K, EXPERTS, stride_a, stride_b, stride_scale_am, stride_scale_ak, stride_scale_bn, stride_scale_bk,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    LOAD: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, CLEAR: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """ROWS_A, ROWS_B: rows that share a scale; -1: all of them."""
    SCALED: tl.constexpr = SUMS == "scaled"
    BY_ROW_A: tl.constexpr = ROWS_A == 1
    BY_ROW_B: tl.constexpr = ROWS_B == 1
    ends = last_blocks(bounds, EXPERTS, WIDTH)
    down = tl.load(bounds + 2 * EXPERTS + 1) * 128  # rows of all blocks
    tiles = (down // BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        place, column = place_of(tile, down, N, BLOCK_M, BLOCK_N, GROUP_M)
        block = place // 128
        expert = expert_of(block, ends)
        row, end, _ = rows_of(bounds, EXPERTS, expert, block)
        row += place % 128
        row_b = expert * N + column
        scale_row_a = place if ROWS_A > 1 else row
        here = tl.where(row < end, K, 0)  # a tile behind the rows of its expert multiplies nothing
        b_scales = tl.cdiv(N, 128) * 128 * expert if ROWS_B > 1 else expert * N
        acc_MN = _sums(
            a, b, scale_a, scale_b, row, row_b, scale_row_a, b_scales + column, 0, here, end, EXPERTS * N,
            down if ROWS_A > 1 else end, b_scales + N, K, stride_a, stride_b,
            (stride_scale_am, stride_scale_ak), (stride_scale_bn, stride_scale_bk),
            BLOCK_M, BLOCK_N, BLOCK_K, LOAD, SUMS, ROWS_A, ROWS_B,
        )  # fmt: skip
        bias_N = bias
        if bias is not None:
            bias_N = bias + tl.cast(expert, tl.int64) * N
        scale_bN = scale_b + b_scales if BY_ROW_B else scale_b
        store_result(
            y, acc_MN, row, column, end, N, None if SCALED else scale_a, None if SCALED else scale_bN, bias_N, None,
            OUT, "none", BY_ROW_A, BY_ROW_B, False, PARTS, False,
        )  # fmt: skip
    zeros = tl.zeros((CLEAR, BLOCK_N), dtype=OUT)
    for row in range(tl.load(bounds + EXPERTS) + tl.program_id(0) * CLEAR, M, tl.num_programs(0) * CLEAR):
        for column in range(0, N, BLOCK_N):
            store_tile(y, zeros, row, column, M, N, False)


@triton.jit
def _grouped_sums_kernel(
    a, b, scale_a, scale_b, bounds,
    y,
    M, N, T, EXPERTS, stride_a, stride_b, stride_scale_am, stride_scale_at, stride_scale_bn, stride_scale_bt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    LOAD: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """y [E, M, N] of a [M, T] and b [N, T] in blocks: T columns.  ROWS_A, ROWS_B: rows that share a scale, -1: all."""
    SCALED: tl.constexpr = SUMS == "scaled"
    BY_ROW_A: tl.constexpr = ROWS_A == 1
    BY_ROW_B: tl.constexpr = ROWS_B == 1
    of_one = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), of_one * EXPERTS, tl.num_programs(0)):
        expert = tile // of_one
        row, column = place_of(tile % of_one, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        first = tl.load(bounds + EXPERTS + 1 + expert) * 128
        last = tl.load(bounds + EXPERTS + 2 + expert) * 128
        acc_MN = _sums(
            a, b, scale_a, scale_b, row, column, row, column, first, last, M, N, M, N, T, stride_a, stride_b,
            (stride_scale_am, stride_scale_at), (stride_scale_bn, stride_scale_bt),
            BLOCK_M, BLOCK_N, BLOCK_K, LOAD, SUMS, ROWS_A, ROWS_B,
        )  # fmt: skip
        y_MN = y + tl.cast(expert, tl.int64) * M * N
        scale_aM = scale_a + expert * M if BY_ROW_A else scale_a
        scale_bN = scale_b + expert * N if BY_ROW_B else scale_b
        store_result(
            y_MN, acc_MN, row, column, M, N, None if SCALED else scale_aM, None if SCALED else scale_bN, None, None,
            OUT, "none", BY_ROW_A, BY_ROW_B, False, PARTS, False,
        )  # fmt: skip


def grouped_rows(a, b, bounds_2E1, epilogue, promoted: bool = False, config: Config | None = None) -> torch.Tensor:
    """y [T, N] of rows a.data [T, K] and a stack of experts' matrices b.data [E * N, K], both contiguous along K.

    Scales FP32: (); a [T, 1] and b [E * N, 1]; or along K, a [T, G] or [128 * blocks / rows, G], where groups span
    rows of an expert, and b [E * (ceil(N / 128) * 128 / rows), G].
    epilogue: out, and as bias_N a bias [E, N]; nothing else of the twin's Epilogue.
    """
    (t, k), experts = a.data.shape, experts_of(bounds_2E1)
    n = b.data.shape[0] // experts
    y_TN = torch.empty(t, n, dtype=epilogue.out, device=a.data.device)
    if t == 0 or n == 0:
        return y_TN
    blocks = most_blocks(t, experts)
    sums, config = _how(a, b, promoted, config, (blocks * BLOCK, n))
    tiles = blocks * (BLOCK // config.block_m) * math.ceil(n / config.block_n)
    _grouped_rows_kernel[_grid(tiles, a.data.device, sums, config)](
        *_readers(a, b, config), a.scale, b.scale, epilogue.bias_N, bounds_2E1,  # inputs
        y_TN,  # output
        t, n, k, experts, a.data.stride(0), b.data.stride(0), *_scale_strides(a, b, sums),  # sizes
        WIDTH=width(experts), CLEAR=CLEARED, **_constants(a, b, epilogue, config, sums, y_TN),  # constants
    )  # fmt: skip
    return y_TN


def grouped_sums(a, b, bounds_2E1, epilogue, promoted: bool = True, config: Config | None = None) -> torch.Tensor:
    """y [E, M, N] of a.data [M, 128 * blocks] and b.data [N, 128 * blocks], laid out in blocks (expert_rows.py).

    Scales FP32: (); a [E, M] and b [E, N], of which a `rows` of 1 says so; or along the sums, [M / rows, G] and
    [N / rows, G], a group for each `cols` of the columns.  epilogue: out; nothing else of the twin's Epilogue.
    """
    (m, t), n, experts = a.data.shape, b.data.shape[0], experts_of(bounds_2E1)
    y_EMN = torch.empty(experts, m, n, dtype=epilogue.out, device=a.data.device)
    if m == 0 or n == 0:
        return y_EMN
    sums, config = _how(a, b, promoted, config, (m * experts, n))
    tiles = experts * math.ceil(m / config.block_m) * math.ceil(n / config.block_n)
    _grouped_sums_kernel[_grid(tiles, a.data.device, sums, config)](
        *_readers(a, b, config), a.scale, b.scale, bounds_2E1,  # inputs
        y_EMN,  # output
        m, n, t, experts, a.data.stride(0), b.data.stride(0), *_scale_strides(a, b, sums),  # sizes
        **_constants(a, b, epilogue, config, sums, y_EMN.flatten(0, 1)),  # constants
    )  # fmt: skip
    return y_EMN


def _how(a, b, promoted: bool, config: Config | None, size: tuple[int, int]) -> tuple[str, Config]:
    """SUMS (matmul.py), and the configuration: where none is given, of a dense matmul of that size (M, N)."""
    sums = sums_of_products(a, promoted)
    if config is None:
        aligned = describable(a.data) and describable(b.data)
        config = plain(pick(OPERATIONS[sums], capability(a.data.device), *size, aligned))
    return sums, config._replace(block_k=a.cols) if sums == "scaled" else config


def _grid(tiles: int, where: torch.device, sums: str, config: Config) -> tuple[int]:
    """A program for each tile that there may be, as many as the card surely holds at once."""
    return (min(tiles, processors(where) * programs(OPERATIONS[sums], config, where)),)


def _load(config: Config) -> str:
    return DESCRIPTOR if config.descriptors else POINTER


def _readers(a, b, config: Config) -> tuple:
    """What the kernel is given to read tiles of a and b."""
    load = _load(config)
    return reader(a.data, load, config.block_m, config.block_k), reader(b.data, load, config.block_n, config.block_k)


def _scale_strides(a, b, sums: str) -> tuple[int, ...]:
    """Of both operands' scales, along rows and along groups."""
    return (*a.scale.stride(), *b.scale.stride()) if sums == "scaled" else (0, 0, 0, 0)


def _constants(a, b, epilogue, config: Config, sums: str, y_MN: torch.Tensor) -> dict:
    """Constants and options of both kernels.  y is written by pointers, whose masks end with an expert."""
    return {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "LOAD": _load(config), "PARTS": parts(config._replace(descriptors=False), epilogue, y_MN), "SUMS": sums,
        "ROWS_A": a.rows, "ROWS_B": b.rows, "OUT": triton_dtype(epilogue.out),
        "num_warps": config.warps, "num_stages": stages(config, y_MN),
    }  # fmt: skip
