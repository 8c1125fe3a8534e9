"""Matmuls and casts of the rows of E experts as operations; how many rows an expert has stays on the device.

    rows        y[t]  = a[t] @ b[e(t)]^T + bias[e(t)]      forward, dgrad
    sums        dw[e] = sum of a[t]^T b[t] over e's rows   wgrad
    quantize    groups that span rows begin anew at each expert's first row

| runs on | can | waits for the card |
| --- | --- | --- |
| triton | our kernels, one launch: FP8 per tensor, row and block, all three matmuls; from sm_89 on | never |
| torch | its grouped matmul, one launch: `rows` of E4M3 per tensor and row; sm_90, sm_100 | never |
| each | expert after expert on the backend that ops/matmul.py chooses; any device | once a call |

As elsewhere our kernel does not stand in for torch's where nobody has measured both: torch's multiplies what it takes,
ours the rest, and all of it under `fe.backend("triton")`.  Where FP8 Tensor Cores are missing, experts go one by one.
"""

from __future__ import annotations

import torch

from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts, device, matmul, reference, scaled_grouped, triton_backend
from fp8engine.ops.backends import asked
from fp8engine.ops.library import direct, operation
from fp8engine.ops.reference import Epilogue, Operand, Slot, operand
from fp8engine.ops.reference import grouped as twin

CAPABILITY_16_BITS = (8, 0)  # cards on which torch's grouped matmul of BF16 is one launch


def kernels_run(where: torch.device) -> bool:
    """Whether our kernels multiply the rows of experts there: asked for, or the best there is."""
    name = asked()
    if name is not None:
        return name == "triton"
    return where.type == "cuda" and device.has_fp8(where) and triton_backend.usable()


def in_blocks(where: torch.device, cast_a: Cast, cast_b: Cast, compiling: bool) -> bool:
    """Whether wgrad reads both operands in blocks (reference/grouped.py), as our kernels do; else they stay rows.

    compiling: in a graph, which chooses when it runs, a card's do; there both layouts can be multiplied.
    """
    if not (castable(cast_a) and castable(cast_b)) or cast_a.rows != cast_b.rows:
        return False
    return where.type == "cuda" if compiling else kernels_run(where)


def castable(cast: Cast) -> bool:
    """Whether our kernels cast the rows of experts along the rows so, and multiply what comes of it.

    >>> [castable(Cast.parse(f"e4m3 {group}")) for group in ("-1x-1", "-1x1", "128x1", "1x-1", "16x16")]
    [True, True, True, False, False]
    """
    if cast.rows == -1:
        return cast.cols in (-1, 1)
    return cast.rows in triton_backend.BLOCKS and cast.cols in triton_backend.POWERS


def spans_rows(cast: Cast) -> bool:
    """Whether a scale covers several rows but not all, so that it matters where an expert's rows end."""
    return cast.rows != 1 and not cast.per_tensor


def quantize(
    x_TK: torch.Tensor,
    cast: Cast,
    bounds_2E1,
    slot: Slot | None = None,
    transposed: bool = False,
    held: torch.dtype | None = None,
) -> Operand:
    """Rows of experts under a cast, its amax and counters written to the slot; groups stay within an expert.

    transposed: the transpose, in blocks, for wgrad; of a cast that is not per tensor.  held: as of `casts.quantize`.

    >>> bounds = twin.bounds_of(torch.tensor([1, 1]))
    >>> quantize(torch.ones(2, 3), Cast.parse("e4m3 -1x1"), bounds).scale.shape
    torch.Size([2, 3])
    """
    if held is not None and direct(x_TK):
        data, scale = reference.quantize_experts(x_TK, cast, bounds_2E1, slot, transposed, held)
    else:
        data, scale = _quantize(x_TK, cast, bounds_2E1, transposed, slot=slot)
    if not transposed:
        return operand(data, scale, cast)
    return Operand(data, scale, cast.cols, cast.rows, cast.power_of_2)


def transpose(q: Operand, bounds_2E1: torch.Tensor) -> Operand:
    """The transpose, in blocks, of rows of experts under one scale."""
    return Operand(_transpose(q.data, bounds_2E1), q.scale, -1, -1, q.power_of_2)


def rows(
    a: Operand, b: Operand, bounds_2E1, bias_EN=None, out=torch.bfloat16, way: tuple[str, bool] = ("exact", False)
) -> torch.Tensor:
    """Each row of a [T, K] times its expert's matrix of the stack b [E * N, K]: [T, N].

    way: precision, as `matmul.matmul` takes it; and whether b holds matrices [K, N], whose transposes are meant, cast
    per tensor or in squares.  Rows behind the last expert's give 0.  Raises BackendError as `matmul.matmul` does.
    """
    return _rows(a, b, bias_EN, bounds_2E1, out, *way)


def sums(a: Operand, b: Operand, bounds_2E1, out: torch.dtype, way: tuple[str, bool]) -> torch.Tensor:
    """dw [E, M, N] of a and b; way: precision; and whether they are in blocks, [M, 128 * blocks] and [N, 128 * blocks].

    Else they are rows, [T, M] and [T, N].
    """
    return _sums(a, b, bounds_2E1, out, *way)


@operation(
    "grouped_sums_16(Tensor a, Tensor b, Tensor bounds, ScalarType out) -> Tensor",
    lambda a, b, bounds, out: a.new_empty(bounds.shape[1] - 1, a.shape[1], b.shape[1], dtype=out),
)
def sums_16(a_TM: torch.Tensor, b_TN: torch.Tensor, bounds_2E1, out: torch.dtype) -> torch.Tensor:
    """dw [E, M, N] of rows in 16 or 32 bits; torch's grouped matmul where it takes them, else expert after expert.

    >>> ones = torch.ones(3, 8, dtype=torch.bfloat16)
    >>> sums_16(ones, ones, twin.bounds_of(torch.tensor([2, 0, 1])), torch.float32)[:, 0, 0].tolist()
    [2.0, 0.0, 1.0]
    """
    if not groupable(a_TM, b_TN):
        return twin.sums_16(a_TM, b_TN, bounds_2E1, out)
    ends_E = bounds_2E1[0, 1:].contiguous()
    dw_EMN = torch.nn.functional.grouped_mm(in_rows(a_TM).t(), in_rows(b_TN), offs=ends_E)
    empty_E = torch.diff(bounds_2E1[0]) == 0
    # Over no rows a card's kernel need not write its tile.
    return dw_EMN.masked_fill_(empty_E[:, None, None], 0).to(out)


def runs_on(a: Operand, b: Operand, experts: int, precision: str) -> str:
    """What `rows` multiplies these on: "triton", "torch" or "each"."""
    where, name = a.data.device, asked()
    codes = a.data.dtype.itemsize == b.data.dtype.itemsize == 1
    allowed = codes and name in (None, "cublas") and precision != "exact"
    if allowed and scaled_grouped.has_scaled_grouped(where) and scaled_grouped.ungroupable(a, b, experts) is None:
        return "torch"
    return "triton" if _kernels_take(a, b) else "each"


def _kernels_take(a: Operand, b: Operand) -> bool:
    """Whether our kernels multiply these; where they were asked for and cannot, `each` says why."""
    return kernels_run(a.data.device) and triton_backend.unsupported(a, b) is None


@operation(
    "grouped_rows(Operand a, Operand b, Tensor? bias, Tensor bounds, ScalarType out, str precision, bool transposed)"
    " -> Tensor",
    lambda a, b, bias, bounds, out, precision, transposed: a.data.new_empty(
        a.data.shape[0], b.data.shape[1] if transposed else b.data.shape[0] // (bounds.shape[1] - 1), dtype=out
    ),
)
def _rows(a, b, bias_EN, bounds_2E1, out, *way):
    precision, transposed = way
    experts = bounds_2E1.shape[1] - 1
    name = runs_on(a, b, experts, precision)
    if name == "torch":
        return _by_torch(a, b, bounds_2E1[0, 1:], bias_EN, precision == "fast", transposed).to(out)
    if name == "triton":
        b = _along_k(b, experts) if transposed else b
        return triton_backend.grouped("grouped_rows", a, b, bounds_2E1, Epilogue(bias_EN, out), precision == "fast")
    return twin.grouped_rows(a, b, bounds_2E1, bias_EN, out, _each(precision, transposed))


@operation(
    "grouped_sums(Operand a, Operand b, Tensor bounds, ScalarType out, str precision, bool blocks) -> Tensor",
    lambda a, b, bounds, out, precision, blocks: a.data.new_empty(
        bounds.shape[1] - 1, *(x.data.shape[0 if blocks else 1] for x in (a, b)), dtype=out
    ),
)
def _sums(a, b, bounds_2E1, out, precision, blocks):
    if blocks and _kernels_take(a, b):
        return triton_backend.grouped("grouped_sums", a, b, bounds_2E1, Epilogue(None, out), precision == "fast")
    return twin.grouped_sums(a, b, bounds_2E1, out, blocks, _each(precision))


def groupable(*tensors: torch.Tensor) -> bool:
    """Whether torch's grouped matmul takes these BF16 tensors: rows of 16 bytes, and at least one.

    >>> [groupable(torch.ones(3, columns, dtype=torch.bfloat16)) for columns in (16, 20)]
    [True, False]
    """
    where = tensors[0].device
    if where.type != "cpu" and not (where.type == "cuda" and device.capability(where) >= CAPABILITY_16_BITS):
        return False
    if any(x.dtype != torch.bfloat16 or not x.numel() for x in tensors):
        return False
    return not any(size * x.itemsize % scaled_grouped.ALIGNED for x in tensors for size in x.shape[1:])


def in_rows(x_TK: torch.Tensor) -> torch.Tensor:
    """x without gaps, as torch's grouped matmul takes it: `contiguous` leaves a single row its stride.

    >>> in_rows(torch.ones(1, 5)[:, :4]).stride()
    (4, 1)
    """
    return x_TK.contiguous().flatten().view(x_TK.shape)


def _by_torch(a: Operand, b: Operand, ends_E, bias_EN, fast: bool, transposed: bool) -> torch.Tensor:
    y_TN = scaled_grouped.scaled_grouped(a, b, transposed, ends_E.contiguous(), fast)
    return y_TN if bias_EN is None else y_TN + of_rows(bias_EN, ends_E, len(y_TN))


def of_rows(table_EN: torch.Tensor, ends_E: torch.Tensor, rows: int) -> torch.Tensor:
    """The row for each row's expert (its bias) of a table [E, N]: [T, N], without waiting for a card.

    >>> of_rows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 2, 3]), 3).tolist()
    [[1.0], [1.0], [3.0]]
    """
    rows_T = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
    return table_EN[torch.searchsorted(ends_E, rows_T, right=True)]


def _along_k(b: Operand, experts: int) -> Operand:
    """The stack [E * K, N] of the transposes of a stack [E * N, K] under a cast per tensor or in squares."""
    k = b.data.shape[1]
    codes = b.data.view(torch.uint8).unflatten(0, (experts, -1)).mT.contiguous()
    scale = b.scale
    if scale.dim():  # squares begin anew with each expert, at a multiple of 128 rows, as `quantize` has them
        down = -(-k // twin.BLOCK) * (twin.BLOCK // b.cols)
        scale = scale.unflatten(0, (experts, -1)).mT
        scale = torch.nn.functional.pad(scale, (0, 0, 0, down - scale.shape[1])).flatten(0, 1)
    return Operand(codes.flatten(0, 1).view(b.data.dtype), scale, b.cols, b.rows, b.power_of_2)


def _each(precision: str, transposed: bool = False):
    """The product of one expert on the backend that ops/matmul.py chooses."""
    return lambda a, b, bias_N, out: matmul.matmul(a, b.t() if transposed else b, bias_N, out, precision)


def _shapes(x, cast, bounds, transposed):
    (t, k), experts = x.shape, bounds.shape[1] - 1
    wide = twin.most_blocks(t, experts) * twin.BLOCK
    down, across = (experts, k) if cast.rows == -1 else (wide // cast.rows, -(-k // cast.cols))
    turned = transposed and cast.rows != -1
    q = x.new_empty((k, wide) if transposed else (t, k), dtype=cast.dtype)
    scale = x.new_empty(down, across, dtype=torch.float32)
    return q, scale.t() if turned else scale


@operation(
    "quantize_experts(Tensor x, str cast, Tensor bounds, bool transposed) -> (Tensor, Tensor)", _shapes, slot=True
)
def _quantize(x_TK, cast, bounds_2E1, transposed, slot=None):
    found = casts.twin(x_TK.device) if triton_backend.castable(cast.rows, cast.cols) else reference
    return found.quantize_experts(x_TK, cast, bounds_2E1, slot, transposed)


@operation(
    "transpose_experts(Tensor q, Tensor bounds) -> Tensor",
    lambda q, bounds: q.new_empty(q.shape[1], twin.most_blocks(q.shape[0], bounds.shape[1] - 1) * twin.BLOCK),
)
def _transpose(q_TK, bounds_2E1):
    return casts.twin(q_TK.device).transpose_experts(q_TK, bounds_2E1)


@operation(
    "expert_sums(Tensor x, Tensor bounds) -> Tensor",
    lambda x, bounds: x.new_empty(bounds.shape[1] - 1, x.shape[1], dtype=torch.float32),
)
def column_sums(x_TN: torch.Tensor, bounds_2E1: torch.Tensor) -> torch.Tensor:
    """The sums of each expert's rows, FP32 [E, N]: the gradient of a bias.

    >>> column_sums(torch.ones(3, 1), twin.bounds_of(torch.tensor([1, 0, 2]))).tolist()
    [[1.0], [0.0], [2.0]]
    """
    return casts.twin(x_TN.device).expert_sums(x_TN, bounds_2E1)
