"""Number formats E4M3, E5M2, FP16, BF16 and FP32 as values, with the limits that their specifications give.

| format | sign, exponent, mantissa bits | largest | smallest normal | smallest subnormal | Inf | source |
| --- | --- | --- | --- | --- | --- | --- |
| E4M3 | 1, 4, 3 | 448 | 2^-6 | 2^-9 | no | OCP 8-bit floating point specification 1.0, table 1 |
| E5M2 | 1, 5, 2 | 57344 | 2^-14 | 2^-16 | yes | same |
| FP16 | 1, 5, 10 | 65504 | 2^-14 | 2^-24 | yes | IEEE 754-2008 binary16 |
| BF16 | 1, 8, 7 | (2 - 2^-7) 2^127 | 2^-126 | 2^-133 | yes | Intel BF16 numerics definition |
| FP32 | 1, 8, 23 | (2 - 2^-23) 2^127 | 2^-126 | 2^-149 | yes | IEEE 754-2008 binary32 |

Maxima are tabulated, not derived from the bit counts: the "fn" formats give their top exponent to numbers,
which a formula for IEEE formats gets wrong (240 instead of 448).

>>> E4M3.max, E4M3.smallest_normal == 2**-6, E4M3.bits
(448.0, True, 8)
>>> Format.named("e5m2") is E5M2
True
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8engine.errors import UnknownName


@dataclass(frozen=True)
class Format:
    """One number format.

    name: as printed.  dtype: torch's dtype for it.  max: largest finite value.
    smallest_normal, smallest_subnormal: smallest positive values.  eps: distance from 1 to the next value.
    mantissa_bits: stored ones.  has_inf: whether infinity has an encoding.
    """

    name: str
    dtype: torch.dtype
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    mantissa_bits: int
    has_inf: bool = True

    @property
    def bits(self) -> int:
        """Width in bits: 8, 16 or 32."""
        return self.dtype.itemsize * 8

    @property
    def is_fp8(self) -> bool:
        """Whether a tensor in this format needs a scale."""
        return self.bits == 8

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self):
        return Format.named, (self.name,)

    @staticmethod
    def named(name: str) -> Format:
        """The format of that name, in any case.  Raises UnknownName, with the nearest name."""
        try:
            return FORMATS[name.upper()]
        except (KeyError, AttributeError):
            raise UnknownName("format", name, FORMATS) from None

    @staticmethod
    def of(dtype: torch.dtype) -> Format:
        """The format that a torch dtype stores.

        >>> Format.of(torch.float8_e4m3fn)
        E4M3
        """
        try:
            return BY_DTYPE[dtype]
        except KeyError:
            raise UnknownName("format for dtype", dtype, map(str, BY_DTYPE)) from None


E4M3 = Format("E4M3", torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, 3, has_inf=False)
E5M2 = Format("E5M2", torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, 2)
FP16 = Format("FP16", torch.float16, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 10)
BF16 = Format("BF16", torch.bfloat16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 2.0**-7, 7)
FP32 = Format("FP32", torch.float32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 2.0**-23, 23)
FORMATS = {format.name: format for format in (E4M3, E5M2, FP16, BF16, FP32)}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that FP8 casts take
BY_DTYPE = {format.dtype: format for format in FORMATS.values()}


def word(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without its module.

    >>> word(torch.float8_e4m3fn)
    'float8_e4m3fn'
    """
    return str(dtype).removeprefix("torch.")
