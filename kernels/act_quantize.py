"""Activations, plain and gated, with the FP8 codes of the result that the next matmul reads; and their backward.

    plain      y[m, n] = f(x[m, n])                    dx = dy f'(x)
    gated      y[m, n] = f(gate[m, n]) u(up[m, n])     dgate = dy u(up) f'(gate)    dup = dy f(gate) u'(up)
               x[m, 2 n] = [gate | up], whose dx is [dgate | dup]; or two matrices in any strides, as two layers make
               them, whose gradients are two
    backward   dbias[k] = sum_m dx[m, k] in FP32, of dx as it was rounded

f and u of each kind: activations.py.  All of it in FP32, then rounded to x's dtype; codes as produce.py says.  Bytes an
element of BF16: 2 read of each input, 2 written of each result.  dbias is summed within a tile of rows, then over
tiles, in a fixed order; it adds 4 / ROWS bytes written and read.
Twin: fp8engine/ops/reference/act_quantize.py, and activations.py beside it, which names the sources.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8engine.kernels.activations import FUNCTIONS, GATED, LIMIT, activate, gradient, linear_part
from fp8engine.kernels.column_sums import column_sums, partial_sums
from fp8engine.kernels.launch import MULTIPLE
from fp8engine.kernels.produce import GROUP_COLUMNS, WIDEST_ROW, Target, Tile, begin, by_128, end, put, read, row_tile


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _act_kernel(
    dy, x, up, part, dup, y, q, q_t, scale, work, live, counts,
    M, N, stride_dm, stride_dn, stride_m, stride_n, stride_um, stride_un, index, stride_live, stride_counts,
    ACTIVATION: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    POWER_OF_2: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Forward, where dy is None, or backward, where y is dx.  x: of a gated kind its gate, beside up; None else.

    Backward of a gated kind: tile n makes columns n of dgate and of dup, which is one half of dx, or a matrix of its
    own.  part: sums over each tile's rows; None forward, and where dup is its own matrix.
    """
    K = N
    if dy is not None and up is not None and dup is None:
        K = 2 * N
    NOTE: tl.constexpr = COUNT or RECORD
    slot = (work, live, counts, index, stride_live, stride_counts)
    s, seen = begin(q, slot, HOW)
    across = tl.cdiv(N, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS) * across, tl.num_programs(0)):
        down = tile // across
        rows = (down * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        first = tile % across * COLUMNS
        columns = first + tl.arange(0, COLUMNS)
        outputs = (y, q, q_t, scale, part, down)
        if dy is None:
            y_MN = activate(read(x, rows, columns, M, N, stride_m, stride_n), ACTIVATION)
            if up is not None:
                y_MN *= linear_part(read(up, rows, columns, M, N, stride_um, stride_un), ACTIVATION)
        else:
            dy_MN = read(dy, rows, columns, M, N, stride_dm, stride_dn)
            x_MN = read(x, rows, columns, M, N, stride_m, stride_n)
            if up is not None:
                dup_MN = dy_MN * activate(x_MN, ACTIVATION)
                if ACTIVATION == "clamped":  # read here, and again below: it is not held in registers between
                    up_MN = read(up, rows, columns, M, N, stride_um, stride_un)
                    dup_MN = tl.where(tl.abs(up_MN) > LIMIT, 0.0, dup_MN)
                other = outputs if dup is None else (dup, q, q_t, scale, part, down)
                seen = put(dup_MN, rows, first + (K - N), K, M, K, s, other, seen, HOW, GROUP, OUT, POWER_OF_2, NOTE)
                tl.debug_barrier()  # one half's registers are free before the other's are taken
                if ACTIVATION == "sigmoid":  # read again, as above: held, they spill with Triton 3.6 and 3.7
                    dy_MN = read(dy, rows, columns, M, N, stride_dm, stride_dn)
                    x_MN = read(x, rows, columns, M, N, stride_m, stride_n)
                up_MN = read(up, rows, columns, M, N, stride_um, stride_un)
                dy_MN *= linear_part(up_MN, ACTIVATION)
            y_MN = gradient(dy_MN, x_MN, ACTIVATION)
        seen = put(y_MN, rows, first, N, M, K, s, outputs, seen, HOW, GROUP, OUT, POWER_OF_2, NOTE)
    end(seen, slot, tl.cast(M, tl.int64) * K, HOW, COUNT, RECORD)


def act_quantize(x_MK: torch.Tensor, kind: str, to, up_MN: torch.Tensor | None = None) -> tuple:
    """(y, (q, scale), (q^T, scale)), as the twin; None for codes that the caller makes.

    x_MK, up_MN: FP32, BF16 or FP16, any strides.  kind: of FUNCTIONS.  to: the reference's Store.
    """
    x_MN, up_MN = _halves(x_MK, kind, up_MN)
    n, cast = x_MN.shape[1], to.cast
    by_row = cast is not None and (cast.rows, cast.cols) == (1, -1) and not to.transposed and n <= WIDEST_ROW
    tile = row_tile(n) if by_row else _tile(cast, n)
    target = Target(tuple(x_MN.shape), x_MN, to, tile.n, turns=True)
    return _launched(target, tile, (None, x_MN, up_MN, None, None), kind)


def act_quantize_backward(
    dy_MN: torch.Tensor, x_MK: torch.Tensor, kind: str, to, up_MN: torch.Tensor | None = None
) -> tuple:
    """(dx, (q, scale), (q^T, scale), dup, dbias), as the twin's ActGradients; None for codes that the caller makes."""
    n, (m, k), apart = dy_MN.shape[1], x_MK.shape, up_MN is not None
    if k != n and n % GROUP_COLUMNS and by_128(to.cast):
        to = to._replace(cast=None)  # a group would lie across dgate and dup
    tile, target = _tile(to.cast, n), Target((m, k), x_MK, to, turns=True)
    dup_MN = torch.empty_like(target.data) if apart else None
    part_PK = None if apart else partial_sums(target.data, tile.m)
    made = _launched(target, tile, (dy_MN, *_halves(x_MK, kind, up_MN), part_PK, dup_MN), kind)
    return *made, dup_MN, None if part_PK is None else column_sums(part_PK, torch.float32)


def _launched(target: Target, tile: Tile, given: tuple, kind: str) -> tuple:
    """given: dy or None, x, up or None, and what backward writes beside dx."""
    strides = [stride for x in given[:3] for stride in ((0, 1) if x is None else x.stride())]
    return target.launch(_act_kernel, tile, given, (*given[1].shape, *strides), ACTIVATION=FUNCTIONS[kind])


def _halves(x_MK: torch.Tensor, kind: str, up_MN: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """(x, None) of a plain kind, (gate, up) of a gated one, as views."""
    if kind not in GATED or up_MN is not None:
        return x_MK, up_MN
    return x_MK.chunk(2, 1)


def _tile(cast, n: int) -> Tile:
    """16 elements a thread; 4 of rows that are read and written element by element."""
    if by_128(cast):
        return Tile(32, GROUP_COLUMNS, 8)
    return Tile(64, 16, 8) if n % MULTIPLE else Tile(64, 64, 8)
