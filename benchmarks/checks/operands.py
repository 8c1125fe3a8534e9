"""Operands whose products are exact in any order of summation, and comparison bit for bit.

Products and sums of small integers are exact in FP8, in FP32 and in Hopper's 13-bit fast accumulation alike, so that a
kernel has to agree bit for bit whatever order it sums in.
"""

from __future__ import annotations

import torch

from fp8engine.numerics.formats import E4M3, Format
from fp8engine.ops.reference import Operand


def integers(where: torch.device, rows: int, k: int, format: Format, by_row: bool) -> Operand:
    """Values -1, 0, 1 under scales that are powers of two: sums of up to 2^12 of them fit into 13 bits."""
    codes = torch.randint(-1, 2, (rows, k), device=where).to(torch.float32).to(format.dtype)
    if not by_row:
        return Operand(codes, torch.tensor(0.5, device=where))
    return Operand(codes, torch.exp2(torch.randint(-3, 4, (rows, 1), device=where).float()), 1, -1)


def in_blocks(where: torch.device, rows: int, k: int, size: int) -> Operand:
    """The same values, in groups of `size` x 128 whose scales are powers of two."""
    codes = torch.randint(-1, 2, (rows, k), device=where).to(torch.float32).to(E4M3.dtype)
    groups = (-(-rows // size), -(-k // 128))
    return Operand(codes, torch.exp2(torch.randint(-2, 3, groups, device=where).float()), size, 128, True)


def uneven(operand: Operand) -> Operand:
    """The operand with scales that are no powers of two, so that what is scaled is rounded: the order of sums shows.

    They are contiguous along the operand's rows, as a transposing cast leaves them for wgrad.
    """
    scale = torch.zeros(operand.scale.shape[::-1], device=operand.scale.device).t()  # its strides, for one group too
    scale.copy_(operand.scale * (1 + torch.rand_like(operand.scale)))
    return operand._replace(scale=scale, power_of_2=False)


def exact(a: Operand, b: Operand, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The product in float64 (exact), as FP32."""
    y_MN = _real(a) @ _real(b).t()
    return (y_MN if bias_N is None else y_MN + bias_N.double()).float()


def _real(operand: Operand) -> torch.Tensor:
    m, k = operand.data.shape
    scale = operand.scale.double()
    if operand.scaled_along_k:
        scale = scale.repeat_interleave(operand.rows, 0)[:m].repeat_interleave(operand.cols, 1)[:, :k]
    return operand.data.double() * scale


def differs(found: torch.Tensor | None, wanted: torch.Tensor | None) -> str | None:
    """The first element that differs, in words; None where shape, dtype and every element are the same."""
    if found is None or wanted is None:
        return None if found is wanted else f"{'nothing' if found is None else 'a tensor'}, wanted the other"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {list(found.shape)}, wanted {wanted.dtype} {list(wanted.shape)}"
    wrong = found != wanted
    if not wrong.any():
        return None
    place = [int(index) for index in wrong.nonzero()[0]]
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements, {place} the first: {found[*place]}, wanted {wanted[*place]}"
    )


def counts(where: torch.device) -> torch.Tensor:
    """An epilogue's two counters, at zero."""
    return torch.zeros(2, dtype=torch.int64, device=where)
