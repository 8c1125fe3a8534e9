"""Activations, plain and gated, stored in the format that the next matmul reads; and their backward with dbias.

    plain      y[m, n] = f(x[m, n])                    dx = dy f'(x)
    gated      y[m, n] = f(gate[m, n]) u(up[m, n])     dgate = dy u(up) f'(gate)    dup = dy f(gate) u'(up)
               x[m, 2 n] = [gate | up]
    backward   dbias[k] = sum_m dx[m, k] in FP32, before dx is rounded

f and u of each kind: activations.py.  All of it in FP32.  Bytes an element of BF16: 2 read and 1 written
(+ 1 transposed) under a predicted scale, 1 x 128 scales, or row scales of rows up to 16,384; 2 more read where the
scale has to be measured first.  dbias is summed within a tile of rows, then over tiles, in a fixed order; it adds
4 / BLOCK_M bytes written and read.
Twin: fp8engine/ops/reference/act_quantize.py, and activations.py beside it, which names the sources.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.activations import FUNCTIONS, GATED, LIMIT, activate, gradient, linear_part
from fp8engine.kernels.column_sums import column_sums
from fp8engine.kernels.launch import MULTIPLE
from fp8engine.kernels.produce import GROUP_COLUMNS, Target, begin, cannot_store, end, nothing_seen, programs, put

WIDEST_ROW = 16384  # a whole row in the registers of one program


class Tile(NamedTuple):
    """Rows and columns of a tile, warps of a program."""

    m: int
    n: int
    warps: int


@triton.jit
def read(x, rows, columns, M, N, stride_m, stride_n):
    """A tile of x in FP32, 0 beyond its edges."""
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    at = rows[:, None] * stride_m + columns[None, :].to(tl.int64) * stride_n
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _act_kernel(
    x, q, q_t, scale, scale_t, amax_M, amax_K, work, live, counts,
    M, N, stride_m, stride_n, index, stride_live, stride_counts,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr, SECOND: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    outputs = (q, q_t, scale, scale_t, amax_M, amax_K)
    slot = (work, live, counts, index, stride_live, stride_counts)
    elements = tl.cast(M, tl.int64) * N
    s, todo = begin(scale, slot, elements, HOW, OUT, POWER_OF_2, DELAYED, SECOND, COUNT, RECORD)
    seen = nothing_seen()
    across = tl.cdiv(N, BLOCK_N)
    tiles = tl.where(todo, tl.cdiv(M, BLOCK_M) * across, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        first = tile % across * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        y_MN = activate(read(x, rows, columns, M, N, stride_m, stride_n), ACTIVATION)
        if IS_GATED:
            up_MN = read(x + tl.cast(N, tl.int64) * stride_n, rows, columns, M, N, stride_m, stride_n)
            y_MN *= linear_part(up_MN, ACTIVATION)
        seen = put(
            y_MN, rows, first, N, M, N, s, outputs, seen,
            HOW, GROUP, OUT, POWER_OF_2, DELAYED, SECOND, COUNT or RECORD,
        )  # fmt: skip
    end(seen, slot, elements, HOW, SECOND, COUNT, RECORD)


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _act_backward_kernel(
    dy, x, part, q, q_t, scale, scale_t, amax_M, amax_K, work, live, counts,
    M, N, stride_dm, stride_dn, stride_m, stride_n, index, stride_live, stride_counts,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    POWER_OF_2: tl.constexpr, DELAYED: tl.constexpr, SECOND: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gated: tile n makes columns n of both halves of dx [M, 2 N].  part: sums over each tile's rows."""
    K = 2 * N if IS_GATED else N
    outputs = (q, q_t, scale, scale_t, amax_M, amax_K)
    slot = (work, live, counts, index, stride_live, stride_counts)
    elements = tl.cast(M, tl.int64) * K
    s, todo = begin(scale, slot, elements, HOW, OUT, POWER_OF_2, DELAYED, SECOND, COUNT, RECORD)
    seen = nothing_seen()
    across = tl.cdiv(N, BLOCK_N)
    tiles = tl.where(todo, tl.cdiv(M, BLOCK_M) * across, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        down = tile // across
        rows = (down * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        first = tile % across * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        dy_MN = read(dy, rows, columns, M, N, stride_dm, stride_dn)
        x_MN = read(x, rows, columns, M, N, stride_m, stride_n)
        if IS_GATED:
            dup_MN = dy_MN * activate(x_MN, ACTIVATION)
            if ACTIVATION == "clamped":  # read here, and again below: it is not held in registers between
                up_MN = read(x + tl.cast(N, tl.int64) * stride_n, rows, columns, M, N, stride_m, stride_n)
                dup_MN = tl.where(tl.abs(up_MN) > LIMIT, 0.0, dup_MN)
            if not SECOND:
                tl.store(part + down.to(tl.int64) * K + N + columns, tl.sum(dup_MN, 0), mask=columns < N)
            seen = put(
                dup_MN, rows, first + N, K, M, K, s, outputs, seen,
                HOW, GROUP, OUT, POWER_OF_2, DELAYED, SECOND, COUNT or RECORD,
            )  # fmt: skip
            tl.debug_barrier()  # one half's registers are free before the other's are taken
            if ACTIVATION == "sigmoid":  # read again, as above: held, they spill with Triton 3.6 and 3.7
                dy_MN = read(dy, rows, columns, M, N, stride_dm, stride_dn)
                x_MN = read(x, rows, columns, M, N, stride_m, stride_n)
            up_MN = read(x + tl.cast(N, tl.int64) * stride_n, rows, columns, M, N, stride_m, stride_n)
            dy_MN *= linear_part(up_MN, ACTIVATION)
        dx_MN = gradient(dy_MN, x_MN, ACTIVATION)
        if not SECOND:
            tl.store(part + down.to(tl.int64) * K + columns, tl.sum(dx_MN, 0), mask=columns < N)
        seen = put(
            dx_MN, rows, first, N, M, K, s, outputs, seen,
            HOW, GROUP, OUT, POWER_OF_2, DELAYED, SECOND, COUNT or RECORD,
        )  # fmt: skip
    end(seen, slot, elements, HOW, SECOND, COUNT, RECORD)


def unsupported(shape: tuple[int, int], kind: str, to, backward: bool = False) -> str | None:
    """Why the kernels do not do it (the caller stores FP32 and quantises it), or None.  shape: of x."""
    if kind not in FUNCTIONS:
        return f"no activation {kind!r}"
    if kind in GATED and shape[1] % 2:
        return "a gated activation of an odd number of columns"
    if (
        backward
        and kind in GATED
        and to.how is not None
        and to.how.cols == GROUP_COLUMNS
        and shape[1] // 2 % GROUP_COLUMNS
    ):
        return f"a group of {GROUP_COLUMNS} columns that lies across dgate and dup"
    return cannot_store(to)


def act_quantize(x_MK: torch.Tensor, kind: str, to) -> tuple:
    """(y, y transposed where asked), as the twin; a quantised one as `produce.Quantized`.  Ask `unsupported` first.

    x_MK: FP32, BF16 or FP16, any strides.  to: the reference's Store.
    """
    m, k = x_MK.shape
    n = k // 2 if kind in GATED else k
    by_row = to.how is not None and (to.how.rows, to.how.cols) == (1, -1) and not to.transposed and n <= WIDEST_ROW
    tile = _row_tile(n) if by_row else _tile(to, n)
    target = Target((m, n), x_MK.dtype, x_MK.device, to, tile.n if by_row else 0)
    if target.elements == 0:
        return target.empty()
    for second in target.launches:
        _act_kernel[(programs(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.warps, x_MK.device),)](
            x_MK,  # input
            *target.pointers,  # outputs
            m, n, *x_MK.stride(), *target.place,  # sizes
            ACTIVATION=FUNCTIONS[kind], IS_GATED=kind in GATED, **target.constants,  # constants
            SECOND=second, BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps,
        )  # fmt: skip
    return target.result()


def act_quantize_backward(dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to) -> tuple:
    """(dx, dx transposed where asked, dbias in FP32), as the twin's ActGradients.  Ask `unsupported` first."""
    (m, k), n = x_MK.shape, dy_MN.shape[1]
    tile = _tile(to, n)
    target = Target((m, k), x_MK.dtype, x_MK.device, to, 0)
    if target.elements == 0:
        return *target.empty(), torch.zeros(k, dtype=torch.float32, device=x_MK.device)
    part = torch.empty(triton.cdiv(m, tile.m), k, dtype=torch.float32, device=x_MK.device)
    for second in target.launches:
        _act_backward_kernel[(programs(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.warps, x_MK.device),)](
            dy_MN, x_MK,  # inputs
            part, *target.pointers,  # outputs
            m, n, *dy_MN.stride(), *x_MK.stride(), *target.place,  # sizes
            ACTIVATION=FUNCTIONS[kind], IS_GATED=kind in GATED, **target.constants,  # constants
            SECOND=second, BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps,
        )  # fmt: skip
    return *target.result(), column_sums(part, torch.float32)


def _by_128(to) -> bool:
    return to.how is not None and to.how.cols == GROUP_COLUMNS


def _tile(to, n: int) -> Tile:
    """16 elements a thread; 4 of rows that are read and written element by element."""
    if _by_128(to):
        return Tile(32, GROUP_COLUMNS, 8)
    return Tile(64, 16, 8) if n % MULTIPLE else Tile(64, 64, 8)


def _row_tile(n: int) -> Tile:
    """Whole rows, 16 elements a thread, 32 of the widest."""
    width = max(128, triton.next_power_of_2(n))
    return Tile(max(1, 2048 // width), width, min(16, max(4, width // 512)))
