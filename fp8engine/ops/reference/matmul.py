"""Matmuls of FP8 values without FP8 Tensor Cores: exact products, FP32 sums, scales applied in FP32.

    y[M, N] = sum_k a[m, k] b[n, k] * scale_a * scale_b + bias[n]

Every FP8 value is exact in BF16 and FP16, and a product of two of them is exact in FP32.  So a BF16 matmul of FP8
values with FP32 accumulation differs from Hopper's in the order of its sums and in one rounding to BF16 (relative
error up to 2^-8) before the scales, where Hopper rounds once after them.  `exact` takes products in FP32: no such
rounding.
Scales along K (blocks) are folded into the operands first: exact in BF16 when they are powers of two.
The twin of kernels/matmul.py.
"""

from __future__ import annotations

import contextlib

import torch

from fp8engine import _torch
from fp8engine.ops import device
from fp8engine.ops.reference.operand import Operand, as_groups, from_groups
from fp8engine.ops.reference.rounding import decode
from fp8engine.ops.reference.scale import FP32_MAX

AMX_K = 32  # BF16 values that an AMX tile holds of a row
SMALL = 1 << 14  # values below which a BF16 matmul's set-up on a CPU costs more than it saves: benchmarks/cpu.py
# Elements of 16 bits that a CPU sums at a time: torch makes an FP32 copy, and one of 8192 x 1024 costs 34 ms in page
# faults where pieces of it take 3.
PIECE = 1 << 19
AS_IT_IS = contextlib.nullcontext()
LARGE = 2.0**64  # a sum of 2^39 products of E5M2 by E4M3 times this is still below 2^128


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N: torch.Tensor | None = None, out=None) -> torch.Tensor:
    """a @ b.T + bias of FP16, BF16 or FP32 tensors; FP32 accumulation; `out`: dtype of the result, default a's.

    >>> matmul_fp16(torch.ones(2, 3), torch.ones(1, 3), torch.ones(1)).tolist()
    [[4.0], [4.0]]
    """
    if out is not None and out.itemsize > a_MK.dtype.itemsize:  # the sums leave as they are, not by way of 16 bits
        a_MK, b_NK, bias_N = a_MK.to(out), b_NK.to(out), None if bias_N is None else bias_N.to(out)
    y_MN = torch.nn.functional.linear(a_MK, b_NK, bias_N)
    return y_MN if out is None else y_MN.to(out)


def matmul_fp8(a: Operand, b: Operand, bias_N=None, out=torch.bfloat16, exact: bool | None = None) -> torch.Tensor:
    """a @ b.T + bias of quantised operands, scales per tensor, row or block of either.

    out: dtype of the result.  exact: no rounding but that to `out`; default: where `out` is FP32.

    >>> a = Operand(torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn), torch.tensor(2.0))
    >>> matmul_fp8(a, a, out=torch.float32)
    tensor([[20.]])
    """
    exact = out == torch.float32 if exact is None else exact and out == torch.float32
    if (a.cols != -1 and a.scaled_along_k) or (b.cols != -1 and b.scaled_along_k):
        return matmul_block(a, b, bias_N, out, exact)
    (a_MK, b_NK), where, on_cpu = (a.data, b.data), a.data.device, a.data.device.type == "cpu"
    # By sizes alone: training saves codes and inference holds values, and both must round their sums alike.
    size = max(a_MK.numel(), b_NK.numel())
    dtype = torch.float32 if on_cpu and (exact or size < SMALL) else device.product_dtype(where)
    if a_MK.dtype != dtype:
        a_MK = _as(a_MK, dtype)
    if b_NK.dtype != dtype:
        b_NK = _as(b_NK, dtype)
    if on_cpu and dtype == torch.float32 and a.scale.dim() == b.scale.dim() == 0:
        factor = a.scale.item() * b.scale.item()
        if factor <= FP32_MAX:  # what apply_scales does, without its calls, which a small matmul would wait for
            y_MN = torch.mm(a_MK, b_NK.t()).mul_(factor)
            y_MN = y_MN if bias_N is None else y_MN.add_(bias_N)
            return y_MN if out == torch.float32 else y_MN.to(out)
    return apply_scales(_mm(a_MK, b_NK), a.scale, b.scale, bias_N, out)


def emulate(a: Operand, b: Operand, bias_N, out: torch.dtype, precision: str) -> torch.Tensor:
    """`matmul_fp8` in a precision of fp8engine/ops/matmul.py; autocast, if it is on, has no part in it.

    It would take codes up to 448 for an FP16 matmul, whose sums overflow.
    """
    exact = precision == "exact"  # products in FP32 for a 16-bit result too
    with torch.autocast(a.data.device.type, enabled=False) if _torch.autocast_active() else AS_IT_IS:
        return matmul_fp8(a, b, bias_N, torch.float32 if exact else out, exact).to(out)


def matmul_block(a: Operand, b: Operand, bias_N=None, out=torch.bfloat16, exact: bool | None = None) -> torch.Tensor:
    """`matmul_fp8` for scales that change along K: folded into the values, each scale before its sum."""
    exact = out == torch.float32 if exact is None else exact
    y_MN = _mm(*(folded(operand, _folding_dtype(a, b, exact)) for operand in (a, b)))
    one = torch.ones((), device=y_MN.device)
    return apply_scales(y_MN, one, one, bias_N, out)


def column_sums(x_MK: torch.Tensor) -> torch.Tensor:
    """The sums of x's columns, FP32 [K]; 0 where there are no rows.

    >>> column_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16))
    tensor([4., 6.])
    """
    if x_MK.device.type != "cpu" or x_MK.dtype == torch.float32 or x_MK.numel() <= PIECE:
        return x_MK.sum(0, dtype=torch.float32)
    rows = max(PIECE // x_MK.shape[1], 1)
    return torch.stack([part.sum(0, dtype=torch.float32) for part in x_MK.split(rows)]).sum(0)


def emulation_dtype(where: torch.device, size: int) -> torch.dtype:
    """In which dtype `size` values on the FP8 grid wait for an emulated matmul on this device."""
    if where.type == "cpu" and size < SMALL:
        return torch.float32
    return device.product_dtype(where)


def _folding_dtype(a: Operand, b: Operand, exact: bool) -> torch.dtype:
    """In which dtype real values q * scale are multiplied: BF16 where that is exact (powers of two), else FP32."""
    where = a.data.device
    if not (a.power_of_2 and b.power_of_2) or (exact and where.type == "cpu"):
        return torch.float32
    dtype = emulation_dtype(where, max(a.data.numel(), b.data.numel()))
    return torch.float32 if dtype == torch.float16 else dtype  # FP16's range holds FP8 values but not every scale


def folded(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """The operand's real values q * scale, the product taken in that dtype.

    >>> folded(Operand(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2.0, 8.0]]), 1, 2), torch.float32)
    tensor([[ 2.,  4., 32.]])
    """
    values_MK = _as(operand.data, dtype)
    if values_MK.numel() == 0:
        return values_MK
    values = as_groups(values_MK, operand.rows, operand.cols)
    down, _, across, _ = values.shape
    return from_groups(values * operand.scale.reshape(down, 1, across, 1).to(dtype), *values_MK.shape)


def _mm(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    where, k = a_MK.device.type, a_MK.shape[1]
    if where == "cuda" and a_MK.dtype != torch.float32:
        return torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32)  # codes up to 448 overflow an FP16 result
    if where == "cpu" and a_MK.dtype == torch.bfloat16 and k % AMX_K:
        # oneDNN reads up to 31 values behind a row, times zero: those of the next row, where NaN and Inf become NaN.
        a_MK = torch.nn.functional.pad(a_MK, (0, -k % AMX_K)).narrow(1, 0, k)
    return torch.mm(a_MK, b_NK.t())


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.dtype == dtype:
        return x
    return decode(x, dtype) if x.dtype.itemsize == 1 else x.to(dtype)


def apply_scales(y_MN, scale_a, scale_b, bias_N, out: torch.dtype) -> torch.Tensor:
    """y * scale_a * scale_b.T + bias in FP32, whatever y's dtype, rounded once to `out`."""
    y_MN = y_MN.float()
    for factor in _factors(scale_a, scale_b if scale_b.dim() == 0 else scale_b.t(), y_MN.device.type == "cpu"):
        y_MN.mul_(factor)
    if bias_N is not None:
        y_MN.add_(bias_N)
    return y_MN if out == torch.float32 else y_MN.to(out)


def _factors(scale_a, scale_b, on_host: bool) -> tuple:
    """By what sums are multiplied, one after the other, so that nothing passes FP32's range that the result does not.

    A sum reaches 448 * 448 * K: times the scale of values near 1e36 alone it would be Inf.
    """
    if not on_host:  # no sync: the scales stay where they are
        return (scale_a * scale_b,)
    if scale_a.dim() == scale_b.dim() == 0:  # as Python floats, which torch rounds to FP32 once
        a, b = scale_a.item(), scale_b.item()
        return (a * b,) if a * b <= FP32_MAX else (a, b)
    # In place: a matrix of products of scales would cost as much memory as the result.
    return (scale_b, scale_a) if scale_a.detach().numpy().max(initial=0.0) > LARGE else (scale_a, scale_b)
