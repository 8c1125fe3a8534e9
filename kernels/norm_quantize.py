"""RMSNorm and LayerNorm, with the FP8 codes of the result that the next matmuls read; and their backward.

    n[m, k] = (x[m, k] - mu[m]) r[m]     y = n w + b        mu: the row's mean, 0 for RMSNorm
    g = dy w     dx = r (g - n mean_k(g n) [- mean_k(g)])   dw[k] = sum_m dy n     db[k] = sum_m dy

A program takes whole rows, one after another: a row is read once and stays in registers.  All of it in FP32.  Bytes an
element of BF16: forward 2 read and 2 written, and its codes as produce.py says; backward 4 read and 2 written.  dw and
db are summed over a program's rows in registers, then over programs in a fixed order; rows over 4,096 leave no
registers for that: a launch of its own reads dy and x again (4).
Twin: fp8engine/ops/reference/norm_quantize.py, which names the papers.
"""

import math

import torch
import triton
import triton.language as tl

from fp8engine.kernels.column_sums import column_sums
from fp8engine.kernels.launch import MULTIPLE, describable
from fp8engine.kernels.produce import WIDEST_ROW, Target, begin, end, programs, put, read, row_tile

WIDEST_ODD = 4096  # of rows read and written element by element, each with an address and a mask of its own
WIDEST_WITH_SUMS = 4096  # with sums for dw and db, and dy, beside them
SUM_COLUMNS, SUM_ROWS = 64, 32  # a tile of the launch that only sums: 16 elements a thread
STRIPES = 32  # of rows that it sums: 16,384 columns make 8,192 programs


@triton.jit
def row_means(x_RK, K):
    """mean_k x[m, k]; the division correctly rounded, as torch's."""
    sums_R = tl.sum(x_RK, 1)
    return tl.div_rn(sums_R, tl.zeros_like(sums_R) + K)


@triton.jit
def gamma(weight, columns, K, stride, ZERO_CENTERED: tl.constexpr):
    """w in FP32."""
    w_K = tl.load(weight + columns.to(tl.int64) * stride, mask=columns < K, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        w_K += 1.0
    return w_K


@triton.jit
def normed(x_RK, rows, M, rstd_R, mean):
    """n of rows of x, by what forward has kept of them."""
    if mean is not None:
        x_RK -= tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
    return x_RK * rstd_R[:, None]


@triton.jit(do_not_specialize=["index", "stride_live", "stride_counts"])
def _norm_kernel(
    x, weight, bias, rstd, mean, y, q, q_t, scale, work, live, counts,
    M, K, eps, stride_m, stride_k, stride_w, stride_b, index, stride_live, stride_counts,
    ZERO_CENTERED: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    POWER_OF_2: tl.constexpr, COUNT: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    outputs = (y, q, q_t, scale, None, 0)
    slot = (work, live, counts, index, stride_live, stride_counts)
    s, seen = begin(q, slot, HOW)
    columns = tl.arange(0, COLUMNS)
    # Addresses computed before the loop take registers; with means, twice as wide rows leave none for computing them
    # inside.
    HERE: tl.constexpr = COLUMNS <= 8192 or mean is None
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, M, step, disable_licm=HERE):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        y_RK = read(x, rows, columns, M, K, stride_m, stride_k)
        if mean is not None:
            mean_R = row_means(y_RK, K)
            y_RK = tl.where(columns[None, :] < K, y_RK - mean_R[:, None], 0.0)
            tl.store(mean + rows, mean_R, mask=rows < M)
        variance_R = row_means(y_RK * y_RK, K) + eps
        rstd_R = tl.div_rn(tl.zeros_like(variance_R) + 1.0, tl.sqrt_rn(variance_R))
        tl.store(rstd + rows, rstd_R, mask=rows < M)
        y_RK *= rstd_R[:, None]
        if weight is not None:
            y_RK *= gamma(weight, columns, K, stride_w, ZERO_CENTERED)[None, :]
        if bias is not None:
            y_RK += gamma(bias, columns, K, stride_b, False)[None, :]
        seen = put(y_RK, rows, 0, K, M, K, s, outputs, seen, HOW, GROUP, OUT, POWER_OF_2, COUNT or RECORD)
    end(seen, slot, tl.cast(M, tl.int64) * K, HOW, COUNT, RECORD)


@triton.jit
def _norm_backward_kernel(
    dy, x, weight, rstd, mean, dx, part_w, part_b,
    M, K, stride_dm, stride_dk, stride_m, stride_k, stride_w,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx, and dw and db of the rows that a program takes: every so many-th tile of rows.

    dx is None: only dw and db, of COLUMNS columns, where a row is too wide to sum while dx is made.
    """
    WHOLE: tl.constexpr = dx is not None
    DOWN: tl.constexpr = 0 if WHOLE else 1  # the axis of programs that take different rows
    RELOAD: tl.constexpr = COLUMNS > 8192  # registers for the means or for dx, not for both: the row comes from cache
    columns = tl.arange(0, COLUMNS)
    if not WHOLE:
        columns += tl.program_id(0) * COLUMNS
    dw_RK = tl.zeros((ROWS, COLUMNS), tl.float32)
    db_RK = tl.zeros((ROWS, COLUMNS), tl.float32)
    step = tl.num_programs(DOWN) * ROWS  # disable_licm: addresses computed before the loop would be spilled
    for first in tl.range(tl.program_id(DOWN) * ROWS, M, step, disable_licm=WHOLE):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        g_RK = read(dy, rows, columns, M, K, stride_dm, stride_dk)
        n_RK = read(x, rows, columns, M, K, stride_m, stride_k)
        rstd_R = tl.load(rstd + rows, mask=rows < M, other=0.0)
        n_RK = normed(n_RK, rows, M, rstd_R, mean)
        if part_w is not None:
            dw_RK += g_RK * n_RK
        if part_b is not None:
            db_RK += g_RK
        if WHOLE:
            if weight is not None:
                g_RK *= gamma(weight, columns, K, stride_w, ZERO_CENTERED)[None, :]
            along_R = row_means(g_RK * n_RK, K)  # beyond a row's end g is 0
            if mean is not None:
                offset_R = row_means(g_RK, K)
            if RELOAD:
                g_RK = read(dy, rows, columns, M, K, stride_dm, stride_dk, True)
                n_RK = normed(read(x, rows, columns, M, K, stride_m, stride_k, True), rows, M, rstd_R, mean)
                if weight is not None:
                    g_RK *= gamma(weight, columns, K, stride_w, ZERO_CENTERED)[None, :]
            dx_RK = g_RK - n_RK * along_R[:, None]
            if mean is not None:
                dx_RK -= offset_R[:, None]
            inside = (rows[:, None] < M) & (columns[None, :] < K)
            dx_RK = (dx_RK * rstd_R[:, None]).to(dx.dtype.element_ty)
            tl.store(dx + (rows[:, None] * K + columns[None, :]), dx_RK, mask=inside)
    at = tl.program_id(DOWN).to(tl.int64) * K + columns
    if part_w is not None:
        tl.store(part_w + at, tl.sum(dw_RK, 0), mask=columns < K)
    if part_b is not None:
        tl.store(part_b + at, tl.sum(db_RK, 0), mask=columns < K)


def unsupported(shape: tuple[int, int]) -> str | None:
    """Why the kernels do not compute a norm of x of that shape, or None."""
    if shape[1] > WIDEST_ROW:
        return f"rows of {shape[1]} columns; a program holds {WIDEST_ROW}"
    if shape[1] > WIDEST_ODD and shape[1] % MULTIPLE:
        return f"rows of {shape[1]} columns, no multiple of {MULTIPLE}; of such a program holds {WIDEST_ODD}"
    return None


def norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor | None, bias_K: torch.Tensor | None, norm, to
) -> tuple[torch.Tensor, tuple | None, tuple | None, tuple[torch.Tensor, torch.Tensor | None]]:
    """(y, (q, scale), (q^T, scale), (rstd_M, mean_M)); None for codes that the caller makes.  Ask `unsupported` first.

    x_MK: FP32, BF16 or FP16, any strides.  norm, to: the reference's Norm and Store.
    """
    m, k = x_MK.shape
    x_MK, tile = _readable(x_MK), row_tile(k)
    rstd_M = torch.empty(m, dtype=torch.float32, device=x_MK.device)
    mean_M = torch.empty_like(rstd_M) if norm.kind == "layer" else None
    made = Target((m, k), x_MK, to, tile.n).launch(
        _norm_kernel,
        tile,
        (x_MK, weight_K, bias_K, rstd_M, mean_M),
        (m, k, norm.eps, *x_MK.stride(), _stride(weight_K), _stride(bias_K)),
        ZERO_CENTERED=norm.zero_centered,
    )
    return *made, (rstd_M, mean_M)


def norm_quantize_backward(
    dy_MK: torch.Tensor, x_MK: torch.Tensor, weight_K: torch.Tensor | None, rows, norm
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw, db), as the twin's NormGradients.  Ask `unsupported` first.

    rows: rstd_M and mean_M of forward.  norm: the reference's Norm.
    """
    m, k = x_MK.shape
    dy_MK, x_MK = _readable(dy_MK), _readable(x_MK)
    tile, wide = row_tile(k), k > WIDEST_WITH_SUMS
    dx_MK = torch.empty(m, k, dtype=x_MK.dtype, device=x_MK.device)
    dtype = x_MK.dtype if weight_K is None else weight_K.dtype
    count = programs(math.ceil(m / tile.m), tile.warps, x_MK.device)
    height = min(STRIPES, math.ceil(m / SUM_ROWS)) if wide else count
    parts = [
        torch.empty(height, k, dtype=torch.float32, device=x_MK.device) if wanted else None
        for wanted in (weight_K is not None, rows.mean_M is not None)
    ]
    given = dy_MK, x_MK, weight_K, rows.rstd_M, rows.mean_M
    told = m, k, *dy_MK.stride(), *x_MK.stride(), _stride(weight_K), norm.zero_centered
    written = (None, None) if wide else parts
    _norm_backward_kernel[(count,)](*given, dx_MK, *written, *told, tile.m, tile.n, num_warps=tile.warps)
    if wide and parts != [None, None]:
        grid = math.ceil(k / SUM_COLUMNS), height
        _norm_backward_kernel[grid](*given, None, *parts, *told, SUM_ROWS, SUM_COLUMNS, num_warps=4)
    return dx_MK, *(None if part is None else column_sums(part, dtype) for part in parts)


def _stride(x_K: torch.Tensor | None) -> int:
    return 1 if x_K is None else x_K.stride(0)


def _readable(x_MK: torch.Tensor) -> torch.Tensor:
    """x, copied where its rows are wide and would be read element by element."""
    wide = x_MK.shape[0] and x_MK.shape[1] > WIDEST_ODD
    return x_MK.clone(memory_format=torch.contiguous_format) if wide and not describable(x_MK) else x_MK
