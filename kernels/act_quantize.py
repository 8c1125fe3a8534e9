"""Activations, plain and gated, with the FP8 codes of the result that the next matmul reads; and their backward.

    plain      y[m, n] = f(x[m, n])                    dx = dy f'(x)
    gated      y[m, n] = f(gate[m, n]) u(up[m, n])     dgate = dy u(up) f'(gate)    dup = dy f(gate) u'(up)
               x[m, 2 n] = [gate | up], whose dx is [dgate | dup]; or two matrices in any strides, as two layers make
               them, whose gradients are two
    backward   dbias[k] = sum_m dx[m, k] in FP32, of dx as it was rounded

f and u of each kind: activations.py.  All of it in FP32, then rounded to x's dtype; codes as produce.py says.  Bytes an
element of BF16: 2 read of each input, 2 written of each result.  dbias is summed within a tile of rows, then over
tiles, in a fixed order; it adds 4 / BLOCK_M bytes written and read.
Twin: fp8engine/ops/reference/act_quantize.py, and activations.py beside it, which names the sources.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8engine.kernels.activations import FUNCTIONS, GATED, LIMIT, activate, gradient, linear_part
from fp8engine.kernels.column_sums import column_sums, partial_sums
from fp8engine.kernels.launch import MULTIPLE
from fp8engine.kernels.produce import GROUP_COLUMNS, Target, begin, end, programs, put

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
    x, up, y, q, q_t, scale, work, live, counts,
    M, N, stride_m, stride_n, stride_um, stride_un, index, stride_live, stride_counts,
    ACTIVATION: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    POWER_OF_2: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x: of a gated kind its gate, beside up; None else."""
    outputs = (y, q, q_t, scale, None, 0)
    slot = (work, live, counts, index, stride_live, stride_counts)
    s, seen = begin(q, slot, HOW)
    across = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        rows = (tile // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        first = tile % across * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        y_MN = activate(read(x, rows, columns, M, N, stride_m, stride_n), ACTIVATION)
        if up is not None:
            y_MN *= linear_part(read(up, rows, columns, M, N, stride_um, stride_un), ACTIVATION)
        seen = put(y_MN, rows, first, N, M, N, s, outputs, seen, HOW, GROUP, OUT, POWER_OF_2, COUNT or RECORD)
    end(seen, slot, tl.cast(M, tl.int64) * N, HOW, COUNT, RECORD)


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _act_backward_kernel(
    dy, x, up, part, dup, dx, q, q_t, scale, work, live, counts,
    M, N, stride_dm, stride_dn, stride_m, stride_n, stride_um, stride_un, index, stride_live, stride_counts,
    ACTIVATION: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    POWER_OF_2: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gated: tile n makes columns n of dgate and of dup, which is one half of dx, or a matrix of its own.

    part: sums over each tile's rows; None where dup is its own matrix.
    """
    K = N
    if up is not None and dup is None:
        K = 2 * N
    slot = (work, live, counts, index, stride_live, stride_counts)
    s, seen = begin(q, slot, HOW)
    across = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * across, tl.num_programs(0)):
        down = tile // across
        rows = (down * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        first = tile % across * BLOCK_N
        columns = first + tl.arange(0, BLOCK_N)
        outputs = (dx, q, q_t, scale, part, down)
        dy_MN = read(dy, rows, columns, M, N, stride_dm, stride_dn)
        x_MN = read(x, rows, columns, M, N, stride_m, stride_n)
        if up is not None:
            dup_MN = dy_MN * activate(x_MN, ACTIVATION)
            if ACTIVATION == "clamped":  # read here, and again below: it is not held in registers between
                up_MN = read(up, rows, columns, M, N, stride_um, stride_un)
                dup_MN = tl.where(tl.abs(up_MN) > LIMIT, 0.0, dup_MN)
            if dup is not None:
                inside = (rows[:, None] < M) & (columns[None, :] < N)
                tl.store(dup + (rows[:, None] * N + columns[None, :]), dup_MN.to(dup.dtype.element_ty), mask=inside)
            else:
                seen = put(
                    dup_MN, rows, first + N, K, M, K, s, outputs, seen,
                    HOW, GROUP, OUT, POWER_OF_2, COUNT or RECORD,
                )  # fmt: skip
            tl.debug_barrier()  # one half's registers are free before the other's are taken
            if ACTIVATION == "sigmoid":  # read again, as above: held, they spill with Triton 3.6 and 3.7
                dy_MN = read(dy, rows, columns, M, N, stride_dm, stride_dn)
                x_MN = read(x, rows, columns, M, N, stride_m, stride_n)
            up_MN = read(up, rows, columns, M, N, stride_um, stride_un)
            dy_MN *= linear_part(up_MN, ACTIVATION)
        seen = put(
            gradient(dy_MN, x_MN, ACTIVATION), rows, first, N, M, K, s, outputs, seen,
            HOW, GROUP, OUT, POWER_OF_2, COUNT or RECORD,
        )  # fmt: skip
    end(seen, slot, tl.cast(M, tl.int64) * K, HOW, COUNT, RECORD)


def act_quantize(x_MK: torch.Tensor, kind: str, to, up_MN: torch.Tensor | None = None) -> tuple:
    """(y, (q, scale), (q^T, scale)), as the twin; None for codes that the caller makes.

    x_MK, up_MN: FP32, BF16 or FP16, any strides.  kind: of FUNCTIONS.  to: the reference's Store.
    """
    x_MN, up_MN = _halves(x_MK, kind, up_MN)
    m, n = x_MN.shape
    by_row = to.cast is not None and (to.cast.rows, to.cast.cols) == (1, -1) and not to.transposed and n <= WIDEST_ROW
    tile = _row_tile(n) if by_row else _tile(to, n)
    target = Target((m, n), x_MN, to, tile.n if by_row else 0, turns=True)
    if x_MN.numel() == 0:
        return target.result(0)
    grid = programs(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.warps, x_MN.device)
    _act_kernel[(grid,)](
        x_MN, up_MN,  # inputs
        *target.pointers,  # outputs
        m, n, *x_MN.stride(), *_strides(up_MN), *target.place,  # sizes
        ACTIVATION=FUNCTIONS[kind], **target.constants,  # constants
        BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps,
    )  # fmt: skip
    return target.result(grid)


def act_quantize_backward(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to, up_MN: torch.Tensor | None = None
) -> tuple:
    """(dx, (q, scale), (q^T, scale), dup, dbias), as the twin's ActGradients; None for codes that the caller makes."""
    (m, n), k, apart = dy_MN.shape, x_MK.shape[1], up_MN is not None
    if k != n and n % GROUP_COLUMNS and _by_128(to):
        to = to._replace(cast=None)  # a group would lie across dgate and dup
    tile = _tile(to, n)
    target = Target((m, k), x_MK, to, turns=True)
    dup_MN = torch.empty_like(target.data) if apart else None
    part_PK = None if apart else partial_sums(target.data, tile.m)
    grid = programs(triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile.warps, x_MK.device)
    if x_MK.numel():
        gate_MN, up_MN = _halves(x_MK, kind, up_MN)
        _act_backward_kernel[(grid,)](
            dy_MN, gate_MN, up_MN,  # inputs
            part_PK, dup_MN, *target.pointers,  # outputs
            m, n, *dy_MN.stride(), *gate_MN.stride(), *_strides(up_MN), *target.place,  # sizes
            ACTIVATION=FUNCTIONS[kind], **target.constants,  # constants
            BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps,
        )  # fmt: skip
    return *target.result(grid), dup_MN, None if part_PK is None else column_sums(part_PK, torch.float32)


def _halves(x_MK: torch.Tensor, kind: str, up_MN: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x, None) of a plain kind, (gate, up) of a gated one, as views."""
    if kind not in GATED or up_MN is not None:
        return x_MK, up_MN
    n = x_MK.shape[1] // 2
    return x_MK[:, :n], x_MK[:, n:]


def _strides(up_MN: torch.Tensor | None) -> tuple[int, int]:
    return (0, 1) if up_MN is None else up_MN.stride()


def _by_128(to) -> bool:
    return to.cast is not None and to.cast.cols == GROUP_COLUMNS


def _tile(to, n: int) -> Tile:
    """16 elements a thread; 4 of rows that are read and written element by element."""
    if _by_128(to):
        return Tile(32, GROUP_COLUMNS, 8)
    return Tile(64, 16, 8) if n % MULTIPLE else Tile(64, 64, 8)


def _row_tile(n: int) -> Tile:
    """Whole rows, 16 elements a thread, 32 of the widest."""
    width = max(128, triton.next_power_of_2(n))
    return Tile(max(1, 2048 // width), width, min(16, max(4, width // 512)))
