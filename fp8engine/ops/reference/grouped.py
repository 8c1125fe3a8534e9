"""Matmuls and casts of the rows of E experts, one after the other on the host; rows of one expert lie together.

    grouped_rows        y[t]  = a[t] @ b[e(t)]^T + bias[e(t)]         forward, dgrad     e(t): the expert of row t
    grouped_sums        dw[e] = sum of a[t]^T b[t] over e's rows      wgrad; 0 for an expert without rows
    quantize_experts    groups that span rows begin anew at each expert's first row

Where the rows lie, `bounds` [2, E + 1] INT32, is made on the device and stays there; only these twins read it on the
host.  Row 0: the first row of each expert, and where the last one ends; row 1: the same in blocks of 128 rows, each
expert beginning a block of its own.  A matrix whose columns are rows of experts is "in blocks" where it has room for
whole blocks, [K, 128 * blocks], which is what kernels read; `most_blocks` is what the host knows of their number.

The twin of kernels/matmul_grouped.py, quantize_experts.py and expert_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops.reference.matmul import column_sums, matmul_fp8, matmul_fp16
from fp8engine.ops.reference.operand import Operand, Slot
from fp8engine.ops.reference.quantize import largest, note, quantize
from fp8engine.ops.reference.scale import scale_factor

BLOCK = 128  # rows of a block


class Part(NamedTuple):
    """One expert's rows, [start, end), and the first of its blocks."""

    start: int
    end: int
    block: int


def bounds_of(counts_E: torch.Tensor) -> torch.Tensor:
    """Where each expert's rows lie, of how many it has; on the device of `counts_E`, which nobody waits for.

    >>> bounds_of(torch.tensor([2, 0, 130])).tolist()
    [[0, 2, 2, 132], [0, 1, 1, 3]]
    """
    counts = counts_E.to(torch.int32)
    both = torch.stack((counts, (counts + (BLOCK - 1)) // BLOCK))
    return torch.nn.functional.pad(both, (1, 0)).cumsum(1, dtype=torch.int32)


def bounds_of_equal(rows: int, experts: int, where: torch.device) -> torch.Tensor:
    """`bounds_of` for experts of as many rows each, such as the rows of their weights; nothing is copied to the device.

    >>> bounds_of_equal(130, 2, torch.device("cpu")).tolist()
    [[0, 130, 260], [0, 2, 4]]
    """
    step = torch.arange(experts + 1, dtype=torch.int32, device=where)
    return torch.stack((step * rows, step * -(-rows // BLOCK)))


def most_blocks(rows: int, experts: int) -> int:
    """How many blocks `rows` rows of that many experts make at most.

    >>> most_blocks(64 * 17, 64), most_blocks(256, 1)
    (72, 2)
    """
    return (rows + (BLOCK - 1) * experts) // BLOCK


def parts_of(bounds_2E1: torch.Tensor) -> list[Part]:
    """Each expert's rows, on the host: this waits for a card."""
    rows, blocks = bounds_2E1.tolist()
    return [Part(*three) for three in zip(rows, rows[1:], blocks)]  # noqa: B905 - the last of each only ends


def part_of_rows(x: Operand, part: Part, expert: int) -> Operand:
    """One expert's rows of an operand [T, K]."""
    data, size = x.data[part.start : part.end], part.end - part.start
    if x.scale.dim() == 0:
        return x._replace(data=data)
    if x.rows == -1:
        return x._replace(data=data, scale=x.scale[expert : expert + 1])
    first = part.start if x.rows == 1 else part.block * BLOCK // x.rows
    return x._replace(data=data, scale=x.scale[first : first - (-size // x.rows)])


def part_of_columns(x: Operand, part: Part, expert: int) -> Operand:
    """One expert's columns of an operand [K, 128 * blocks], in blocks."""
    first = part.block * BLOCK
    turned = x.t() if x.cols != -1 else x.t()._replace(scale=x.scale)  # which lies [E, K]
    return part_of_rows(turned, Part(first, first + part.end - part.start, part.block), expert).t()


def part_of_stack(x: Operand, experts: int, expert: int) -> Operand:
    """One expert's matrix [N, K] of a stack [E * N, K], whose groups begin anew at each, at a multiple of 128 rows."""
    rows = x.data.shape[0] // experts
    return part_of_rows(x, Part(expert * rows, (expert + 1) * rows, expert * -(-rows // BLOCK)), expert)


def grouped_rows(
    a: Operand, b: Operand, bounds_2E1: torch.Tensor, bias_EN=None, out=torch.bfloat16, multiply: Callable = matmul_fp8
) -> torch.Tensor:
    """y [T, N] of rows a.data [T, K] and experts' matrices b.data [E * N, K]; a row that belongs to no expert gives 0.

    multiply: (a, b, bias, out) -> y of one expert.

    >>> a = Operand(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.tensor(1.0))
    >>> b = Operand(torch.tensor([[1.0] * 4, [2.0] * 4]).to(torch.float8_e4m3fn), torch.tensor(1.0))
    >>> grouped_rows(a, b, bounds_of(torch.tensor([1, 1])), out=torch.float32).tolist()
    [[4.0], [8.0]]
    """
    parts, rows = parts_of(bounds_2E1), a.data.shape[0]
    found = []
    for e, part in enumerate(parts):
        if part.end > part.start:
            bias_N = None if bias_EN is None else bias_EN[e]
            found.append(multiply(part_of_rows(a, part, e), part_of_stack(b, len(parts), e), bias_N, out))
    if not found:  # no rows: the result has the shape, dtype and device that one expert's would have
        found.append(multiply(part_of_rows(a, parts[0], 0), part_of_stack(b, len(parts), 0), None, out))
    if parts[-1].end < rows:
        found.append(found[0].new_zeros(rows - parts[-1].end, found[0].shape[1]))
    return found[0] if len(found) == 1 else torch.cat(found)


def grouped_sums(
    a: Operand, b: Operand, bounds_2E1: torch.Tensor, out=torch.float32, in_blocks=True, multiply: Callable = matmul_fp8
) -> torch.Tensor:
    """dw [E, M, N] of a and b, both in blocks, or both as rows: [T, M] and [T, N] under casts along the rows.

    >>> ones = Operand(torch.ones(3, 2).to(torch.float8_e4m3fn), torch.tensor(1.0))
    >>> grouped_sums(ones, ones, bounds_of(torch.tensor([1, 0, 2])), in_blocks=False)[:, 0, 0].tolist()
    [1.0, 0.0, 2.0]
    """
    parts, sizes = parts_of(bounds_2E1), [x.data.shape[0 if in_blocks else 1] for x in (a, b)]
    dw_EMN = torch.zeros(len(parts), *sizes, dtype=out, device=a.data.device)
    for e, part in enumerate(parts):
        if part.end > part.start:
            a_e, b_e = (
                part_of_columns(x, part, e) if in_blocks else part_of_rows(x, part, e).t() for x in (a, b)
            )  # fmt: skip
            dw_EMN[e].copy_(multiply(a_e, b_e, None, out))
    return dw_EMN


def sums_16(a_TM: torch.Tensor, b_TN: torch.Tensor, bounds_2E1: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    """dw [E, M, N] of rows in 16 or 32 bits, each expert's sums rounded once to a's dtype."""
    parts = parts_of(bounds_2E1)
    dw_EMN = torch.zeros(len(parts), a_TM.shape[1], b_TN.shape[1], dtype=out, device=a_TM.device)
    for e, part in enumerate(parts):
        if part.end > part.start:
            dw_EMN[e].copy_(matmul_fp16(a_TM[part.start : part.end].t(), b_TN[part.start : part.end].t()))
    return dw_EMN


def quantize_experts(
    x_TK: torch.Tensor,
    cast: Cast,
    bounds_2E1: torch.Tensor,
    slot: Slot | None = None,
    transposed: bool = False,
    held: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale) under groups that span rows: rows -1 (all rows of an expert) or a power of two up to 128.

    q [T, K]; transposed: [K, 128 * blocks], with zeros where no row is.  scale: FP32; for rows -1 [E, K / cols], else
    [128 * blocks / rows, K / cols], transposed with q; 1 where no row is.

    >>> q, scale = quantize_experts(torch.tensor([[1.0], [2.0]]), Cast.parse("e4m3 -1x1 p2"),
    ...                             bounds_of(torch.tensor([1, 0, 1])))
    >>> scale.tolist()
    [[0.00390625], [1.0], [0.0078125]]
    """
    (t, k), parts, where = x_TK.shape, parts_of(bounds_2E1), x_TK.device
    down, across = cast.scale_shape(len(parts) if cast.rows == -1 else most_blocks(t, len(parts)) * BLOCK, k)
    down = len(parts) if cast.rows == -1 else down
    scale = torch.ones(down, across, dtype=torch.float32, device=where)
    codes = []
    for e, part in enumerate(parts):
        if part.end == part.start:
            continue
        q_RK, found = quantize(x_TK[part.start : part.end], cast, None, held)
        codes.append(q_RK)
        first = e if cast.rows == -1 else part.block * BLOCK // cast.rows
        scale[first : first + len(found)] = found
    if parts[-1].end < t or not codes:
        codes.append(torch.zeros(t - parts[-1].end, k, dtype=torch.float32, device=where).to(held or cast.dtype))
    q_TK = codes[0] if len(codes) == 1 else torch.cat(codes)
    if slot is not None and (slot.count or slot.record) and x_TK.numel():
        _note(x_TK, q_TK, slot, cast, parts)
    if not transposed:
        return q_TK, scale
    return transpose_experts(q_TK, bounds_2E1), scale if cast.rows == -1 else scale.t()


def transpose_experts(q_TK: torch.Tensor, bounds_2E1: torch.Tensor) -> torch.Tensor:
    """Codes [K, 128 * blocks], in blocks, of codes [T, K]; zeros where no row is.

    >>> codes = torch.ones(2, 1).to(torch.float8_e4m3fn)
    >>> transpose_experts(codes, bounds_of(torch.tensor([1, 1]))).view(torch.uint8).nonzero().tolist()
    [[0, 0], [0, 128]]
    """
    (t, k), parts = q_TK.shape, parts_of(bounds_2E1)
    made = torch.zeros(k, most_blocks(t, len(parts)) * BLOCK, dtype=torch.uint8, device=q_TK.device)
    for part in parts:
        first = part.block * BLOCK
        made[:, first : first + part.end - part.start] = q_TK[part.start : part.end].view(torch.uint8).t()
    return made.view(q_TK.dtype)


def expert_sums(x_TN: torch.Tensor, bounds_2E1: torch.Tensor) -> torch.Tensor:
    """The sums of each expert's rows, FP32 [E, N].

    >>> expert_sums(torch.ones(3, 1), bounds_of(torch.tensor([1, 0, 2]))).tolist()
    [[1.0], [0.0], [2.0]]
    """
    return torch.stack([column_sums(x_TN[part.start : part.end]) for part in parts_of(bounds_2E1)])


def _note(x_TK: torch.Tensor, q_TK: torch.Tensor, slot: Slot, cast: Cast, parts: list[Part]) -> None:
    """Write one call to the slot: the rows of all experts together."""
    finite_TK = torch.where(torch.isfinite(x_TK), x_TK, 0)
    found = [largest(finite_TK[part.start : part.end], cast).flatten() for part in parts if part.end > part.start]
    if found:
        amax, rows = torch.cat(found), parts[-1].end
        s = scale_factor(amax, Format.of(cast.dtype).max, cast.power_of_2)
        note(x_TK[:rows], q_TK[:rows], slot, cast, (False, None, amax, s))
