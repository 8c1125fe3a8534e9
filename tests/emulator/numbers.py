"""Numbers as a card has them: types of PTX as NumPy's, narrow formats, rounding once, flushing of subnormals.

e4m3, e5m2    conversion rounds to nearest even and saturates (.satfinite); a NaN becomes 0x7F (PTX ISA, cvt)
bf16, f16     round to nearest even; a NaN becomes 0x7FFF
f32 fma       rounded once: the product is exact in float64, the sum is rounded to odd there (53 >= 24 + 2 bits,
              Boldo and Melquiond, 2008), and then to FP32
"""

from __future__ import annotations

import functools

import numpy as np
import torch

TYPES: dict[str, type] = {
    **{f"b{8 * size}": kind for size, kind in ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))},
    **{f"u{8 * size}": kind for size, kind in ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))},
    **{f"s{8 * size}": kind for size, kind in ((1, np.int8), (2, np.int16), (4, np.int32), (8, np.int64))},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "pred": np.bool_,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SMALLEST_NORMAL = np.float32(2.0**-126)
NAN_16, NAN_8 = 0x7FFF, 0x7F
NARROW = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
Array = np.ndarray


@functools.cache
def size_of(kind: str) -> int:
    """Bytes of a PTX type."""
    return 2 if kind == "bf16" else np.dtype(TYPES[kind]).itemsize


@functools.cache
def values_of(kind: str) -> Array:
    """The FP32 value of each of the 256 codes of "e4m3" or "e5m2"."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return codes.view(NARROW[kind][0]).float().numpy()


def to_fp8(x: Array, kind: str) -> Array:
    """Codes (uint16) of FP32 or FP16 numbers, as cvt.rn.satfinite makes them."""
    dtype, largest = NARROW[kind]
    values = torch.from_numpy(np.array(x, np.float32))
    codes = values.clamp(-largest, largest).to(dtype).view(torch.uint8).numpy().astype(np.uint16)
    return np.where(np.isnan(x), NAN_8, codes).astype(np.uint16)


def to_bf16(x: Array) -> Array:
    """Bits (uint16) of FP32 numbers rounded to BF16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), NAN_16, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """FP32 numbers of BF16's bits (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_f16(x: Array, toward_zero: bool = False) -> Array:
    """Bits (uint16) of FP32 numbers rounded to FP16, to nearest even or toward zero."""
    nearest = x.astype(np.float16)
    if toward_zero:
        over = np.abs(nearest.astype(np.float32)) > np.abs(x)
        nearest = np.where(over, np.nextafter(nearest, np.float16(0)), nearest)
    return np.where(np.isnan(x), NAN_16, np.ascontiguousarray(nearest).view(np.uint16)).astype(np.uint16)


def flush(x: Array) -> Array:
    """FP32 numbers with every subnormal as a zero of its sign (.ftz)."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a b + c of FP32 numbers, rounded once to FP32, to nearest even."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product  # Knuth's two-sum: `lost` is what the addition rounded away, exactly
    lost = (product - (total - back)) + (addend - back)
    bits = np.ascontiguousarray(total).view(np.int64)
    inexact = (lost != 0) & np.isfinite(total) & np.isfinite(lost) & (bits & 1 == 0)
    outward = (lost > 0) == (total > 0)  # the exact sum is further from zero than the rounded one
    odd = np.where(inexact, bits + np.where(outward, 1, -1), bits).astype(np.int64)
    return odd.view(np.float64).astype(np.float32)


def larger(a: Array, b: Array) -> Array:
    """max.f32: a NaN gives the other operand, and -0 is less than +0."""
    found = np.fmax(a, b)
    return np.where((a == 0) & (b == 0), (a.view(np.uint32) & b.view(np.uint32)).view(np.float32), found)


def smaller(a: Array, b: Array) -> Array:
    """min.f32, likewise."""
    found = np.fmin(a, b)
    return np.where((a == 0) & (b == 0), (a.view(np.uint32) | b.view(np.uint32)).view(np.float32), found)
