"""Rounding to FP8 as a device function: nearest-even, saturating, keeping what is not finite.

    q = saturate(RNE(y))     |y| beyond MAX gives MAX; NaN stays NaN; Inf stays Inf in E5M2, NaN in E4M3

From sm_90 on one instruction rounds FP32 to FP8 (PTX cvt.rn.satfinite.e4m3x2.f32: nearest-even, saturating, NaN kept);
below, Triton 3.6 goes by way of FP16 and rounds twice, so the value is clamped and brought onto the FP8 grid in FP32:

    p = 2^floor(log2 |y|), at least the smallest normal;  RNE(|y|) = (|y| + c) - c; c = 1.5 * 2^(23 - mantissa bits) * p

Of |y| and not of y, because LLVM makes one fma of a product y and a sum: y = x * s then is not rounded to FP32 first,
as it is everywhere else, and a product within half an ulp of a tie goes the other way (seen on an H200).

The instruction saturates Inf as well, which would hide it from a loss scaler: E5M2's Inf is put in by its code.
Twin: fp8engine/ops/reference/rounding.py.  Source: OCP 8-bit floating point specification 1.0, sections 5.2 and 5.3.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from fp8engine.kernels.constant import Constant

E4M3_MAX = Constant(448.0)
E5M2_MAX = Constant(57344.0)
E5M2_INF = Constant(0x7C)
E5M2_NAN = Constant(0x7F)
SIGN = Constant(0x80)
EXPONENT_BITS = Constant(0x7F800000)
SIGN_BIT = Constant(-0x80000000)


@triton.jit
def is_finite(x):
    """False for NaN, which compares with nothing, as for Inf."""
    return tl.abs(x) < float("inf")


@triton.jit
def largest(DTYPE: tl.constexpr):
    """The largest finite value of an output dtype; Inf for FP32, in which nothing more is lost."""
    if DTYPE == tl.float8e4nv:
        return 448.0
    elif DTYPE == tl.float8e5:
        return 57344.0
    elif DTYPE == tl.float16:
        return 65504.0
    elif DTYPE == tl.bfloat16:
        return 3.3895313892515355e38
    else:
        return float("inf")


@triton.jit
def round_to_grid(y, DTYPE: tl.constexpr):
    """The FP8 value nearest to y, in FP32; |y| <= MAX."""
    MANTISSA_BITS: tl.constexpr = 3 if DTYPE == tl.float8e4nv else 2
    SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if DTYPE == tl.float8e4nv else 2.0**-14
    power = (y.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
    shift = tl.where(power < SMALLEST_NORMAL, SMALLEST_NORMAL, power) * (1.5 * 2.0 ** (23 - MANTISSA_BITS))
    grid = ((tl.abs(y) + shift) - shift).to(tl.int32, bitcast=True)
    return (grid | (y.to(tl.int32, bitcast=True) & SIGN_BIT)).to(tl.float32, bitcast=True)  # -0 stays -0


@triton.jit
def _ready(y, DTYPE: tl.constexpr):
    """y as the hardware's conversion takes it: below sm_90 clamped and on the FP8 grid, NaN kept."""
    if not cuda_capability_geq(9, 0):
        MAX: tl.constexpr = E4M3_MAX if DTYPE == tl.float8e4nv else E5M2_MAX
        y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))  # not tl.clamp, whose NaN differs between versions
        y = round_to_grid(y, DTYPE)
    return y


@triton.jit
def cast_finite(y, DTYPE: tl.constexpr):
    """FP8 codes of y = x * s where x is known to be finite: fewer instructions than `saturating_cast`."""
    return _ready(y, DTYPE).to(DTYPE)


@triton.jit
def saturating_cast(y, x, DTYPE: tl.constexpr):
    """FP8 codes of y = x * s.  y, x: FP32 of one shape; x alone says what was not finite: a finite x can overflow in y.

    DTYPE: tl.float8e4nv or tl.float8e5.
    """
    finite = is_finite(x)
    y = _ready(y, DTYPE)
    if DTYPE == tl.float8e4nv and cuda_capability_geq(9, 0):
        q = (y + x * 0.0).to(tl.float8e4nv)  # NaN where x is not finite: one instruction; a zero of y has the sign of x
    elif DTYPE == tl.float8e4nv:
        q = tl.where(finite, y, float("nan")).to(tl.float8e4nv)
    else:
        codes = tl.where(finite, y, 0.0).to(tl.float8e5).to(tl.uint8, bitcast=True)
        sign = tl.where(x < 0, SIGN, 0)
        special = tl.where(x != x, E5M2_NAN, E5M2_INF | sign).to(tl.uint8)
        q = tl.where(finite, codes, special).to(tl.float8e5, bitcast=True)
    return q
