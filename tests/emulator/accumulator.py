"""The accumulator in which Tensor Cores add FP8 products, narrower than FP32.

A block of products and the sum so far are aligned to the largest of them.  Each is cut off 13 bits below that one's
leading bit, and the sum of what is left 13 bits below its own.  A block is 32 products on Hopper and 16 on Ada.  All
cuts are towards zero, and a sum of zero is +0.

Source: recordings of an H100 PCIe and an RTX 4060, as `mmaemu` 0.1.0 models them bit for bit (its documentation,
"validation"); tests/emulated/test_hopper_sums.py holds this file against it.
"""

from __future__ import annotations

import numpy as np

from emulator.numbers import Array

BLOCK = {89: 16, 90: 32}  # products that are added at once, by architecture
FRACTION = 13  # bits below the leading one, of the largest term and of the result
KEPT = np.int32(-1 << (23 - FRACTION))  # bits of an FP32 number that a result has
SMALLEST = {"e4m3": -6, "e5m2": -14}  # exponents below which a format's numbers are subnormal
NONE = -1000  # the exponent of 0
# Below any product's exponent (-28) by more than FP32 shows: where all products are 0 only the sum's own cut matters.
LEAST = -100


def add(a: Array, b: Array, c: Array, kinds: tuple[str, str], architecture: int) -> Array:
    """c + a @ b^T as that card's Tensor Cores add it, FP32 [..., R, C].

    a, b: [..., R, K] and [..., C, K], FP8 values of these kinds in any float dtype.  c: FP32 [..., R, C].
    NaN and Inf give what IEEE arithmetic gives.
    """
    a, b, total = a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)
    clean_a, clean_b = (np.where(np.isfinite(x), x, np.float32(0)) for x in (a, b))
    exponent_a, exponent_b = (_exponent(x, SMALLEST[kind]) for x, kind in ((clean_a, kinds[0]), (clean_b, kinds[1])))
    step = BLOCK[architecture]
    sums = np.where(np.isfinite(total), total, np.float32(0))
    for k in range(0, a.shape[-1], step):
        part = np.s_[..., k : k + step]
        sums = _add_block(clean_a[part], clean_b[part], sums, exponent_a[part], exponent_b[part])
    if all(np.isfinite(x).all() for x in (a, b, total)):
        return sums
    with np.errstate(all="ignore"):
        plain = total.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64).swapaxes(-1, -2)
    return np.where(np.isfinite(plain), sums, plain).astype(np.float32)


def _add_block(a: Array, b: Array, c: Array, exponent_a: Array, exponent_b: Array) -> Array:
    exponent = (exponent_a[..., :, None, :] + exponent_b[..., None, :, :]).max(-1)
    top = np.maximum(np.maximum(exponent, _exponent(c)), LEAST)
    # In FP32: a product has 8 bits, and 33 terms below 2^14 sum to less than 2^24.
    unit = np.ldexp(np.float32(1), FRACTION - top)
    terms = a[..., :, None, :] * b[..., None, :, :]
    terms *= unit[..., None]
    total = np.trunc(terms, out=terms).sum(-1) + np.trunc(c * unit)
    cut = (total.view(np.int32) & KEPT).view(np.float32)
    return np.ldexp(cut, top - FRACTION) + np.float32(0)  # -0 becomes +0


def _exponent(x: Array, smallest: int = NONE) -> Array:
    """The exponent of each number's leading bit; of an FP8 number at least its format's smallest."""
    return np.where(x == 0, NONE, np.maximum(np.frexp(x)[1] - 1, smallest)).astype(np.int16)
