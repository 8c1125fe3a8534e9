"""Translations of the engine's operators into ONNX, written in torch with ONNX's QuantizeLinear and DequantizeLinear.

    quantize    s = MAX / max |x| of a group         QuantizeLinear(x, 1 / s), or of x * s with scale 1
    matmul      Gemm(DequantizeLinear(a, scale_a), DequantizeLinear(b, scale_b)^T, bias) in FP32, rounded once
    norm, act   the reference's arithmetic in FP32, then quantize

A scale 1 / s that is a power of two divides exactly.  Another one is rounded, and x / (1 / s) is now and then another
code than x * s: there x is multiplied first, so that codes are those of the engine, bit for bit.

saturate=0 everywhere: what is finite has been scaled or clamped into the range, and NaN and Inf become NaN (Inf in
E5M2), where saturate=1 would hide an Inf as 448.  The amax is of finite elements, as in the engine's casts.

Each function takes what the operator takes (ops/casts.py, ops/matmul.py, ops/norm_act.py).  ONNX's nodes compute
nothing in torch: torch.export traces these functions, and torch.onnx writes what it traced.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import Format
from fp8engine.ops.reference import Norm, as_groups, from_groups
from fp8engine.ops.reference import act_quantize as act_of
from fp8engine.ops.reference import norm_quantize as norm_of
from fp8engine.ops.reference.scale import FP32_MAX

# ONNX's numbers of the types (onnx.TensorProto.DataType).
TYPES = {torch.float8_e4m3fn: 17, torch.float8_e5m2: 19}


def quantize(x_MK: torch.Tensor, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of x under its own amax."""
    cast = Cast.parse(text)
    x_MK = x_MK.float()
    groups = as_groups(x_MK, cast.rows, cast.cols)
    magnitude = groups.abs()
    amax = torch.where(magnitude <= FP32_MAX, magnitude, 0.0).amax(dim=(1, 3))
    s = (_number(Format.of(cast.dtype).max) / amax).clamp(max=FP32_MAX)
    s = torch.where(amax > 0, s, 1.0)
    if cast.power_of_2:
        s = floor_power_of_2(s)
    scale = (_number(1.0) / s).reshape(cast.scale_shape(*x_MK.shape))
    if cast.power_of_2:
        return _quantize_linear(x_MK, scale, cast), scale
    y_MK = from_groups(groups * s[:, None, :, None], *x_MK.shape)
    return _quantize_linear(y_MK, _number(1.0), cast), scale


def quantize_given(x_MK: torch.Tensor, text: str, s: torch.Tensor) -> torch.Tensor:
    """Codes of x * s, clamped; s: one number, or one for each group."""
    cast = Cast.parse(text)
    x_MK, maximum = x_MK.float(), Format.of(cast.dtype).max
    s = s.expand(cast.scale_shape(*x_MK.shape)) if s.dim() else s.reshape(1, 1)
    y_MK = from_groups(as_groups(x_MK, cast.rows, cast.cols) * s[:, None, :, None], *x_MK.shape)
    y_MK = torch.where(x_MK.abs() <= FP32_MAX, y_MK.clamp(-maximum, maximum), x_MK)
    return _quantize_linear(y_MK, _number(1.0), cast)


def predicted(x_MK: torch.Tensor, text: str, s: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of x under a scale from earlier steps, which the graph holds as a constant."""
    return quantize_given(x_MK, text, _number(s)), _number(1.0) / _number(s)


def matmul(*given) -> torch.Tensor:
    """a @ b.T + bias in FP32, rounded to `out`."""
    a, b, scale_a, groups_a, scale_b, groups_b, bias_N, out, _ = given
    x_MK, w_NK = _dequantize_linear(a, scale_a, *groups_a[:2]), _dequantize_linear(b, scale_b, *groups_b[:2])
    return torch.nn.functional.linear(x_MK, w_NK, None if bias_N is None else bias_N.float()).to(out)


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes as values."""
    return codes.to(dtype)


def norm_quantize(x_MK: torch.Tensor, weight_K, bias_K, *rest):
    """(y, its codes, scale, codes and scale of the transpose, which no forward reads, and statistics of rows)."""
    *norm, text, _ = rest
    y_MK, _, _, rows = norm_of(x_MK, weight_K, bias_K, Norm(*norm))
    return *_stored(y_MK, text), rows.rstd_M, rows.mean_M


def act_quantize(x_MK: torch.Tensor, up_MN, kind: str, text: str, transposed: bool):
    """(y, its codes, scale, codes and scale of the transpose, which no forward reads)."""
    return _stored(act_of(x_MK, kind, up_MN=up_MN)[0], text)


def floor_power_of_2(s: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above s (FP32, positive and normal), without reading its bits.

    ufp(s) = q - (q - u q) with q = (1 / (2 u) + 1) s and u = 2^-24; source: Rump, Ogita, Oishi 2008, "Accurate
    floating-point summation, part I", algorithm 3.5, which has (1 - u) q: onnxscript 0.7 removes a product by 1 - u,
    which it takes for 1.  Large s are divided by 2^30 before, so that q does not overflow.

    >>> floor_power_of_2(torch.tensor([1.0, 1.9999999, 448.0, 3e38, 1.2e-36])).log2().tolist()
    [0.0, 0.0, 8.0, 127.0, -120.0]
    """
    large = s > 1
    q = torch.where(large, s * 2.0**-30, s) * (2.0**23 + 1)
    power = q - (q - q * 2.0**-24)
    return torch.where(large, power * 2.0**30, power)


def _stored(y_MK: Any, text: str) -> tuple:
    """y, (codes, scale) where asked for, and nothing of a transpose."""
    return y_MK, *(quantize(y_MK, text) if text else (None, None)), None, None


def _quantize_linear(x_MK: torch.Tensor, scale: torch.Tensor, cast: Cast) -> torch.Tensor:
    scale, where = _along_an_axis(scale, cast.rows, cast.cols, x_MK.shape[0])
    attributes = {"output_dtype": TYPES[cast.dtype], "saturate": 0, **where}
    return torch.onnx.ops.symbolic("QuantizeLinear", (x_MK, scale), attributes, dtype=cast.dtype, shape=x_MK.shape)


def _dequantize_linear(codes_MK: torch.Tensor, scale: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    scale, where = _along_an_axis(scale, rows, cols, codes_MK.shape[0])
    return torch.onnx.ops.symbolic(
        "DequantizeLinear", (codes_MK, scale), where, dtype=torch.float32, shape=codes_MK.shape
    )


def _along_an_axis(scale: torch.Tensor, rows: int, cols: int, m) -> tuple[torch.Tensor, dict]:
    """(scale, attributes) as ONNX has them: one for all, one for each row (axis 0), or one for each `cols` of a row.

    ONNX has blocks along one axis: scales of blocks of several rows are repeated for each row.
    """
    if scale.dim() == 0:
        return scale, {}
    if rows == -1:
        scale = scale.expand(m, -1)
    elif rows > 1:
        scale = scale[:, None].expand(-1, rows, -1).reshape(-1, scale.shape[1])[:m]
    return (scale[:, 0], {"axis": 0}) if cols == -1 else (scale, {"axis": 1, "block_size": cols})


def _number(value: float) -> torch.Tensor:
    """A constant of the graph.  Not `value / tensor`, which torch computes as a reciprocal and a product."""
    return torch.full((), value, dtype=torch.float32)
