"""An independent cast to FP8, in NumPy and ml_dtypes: what the engine's casts are held against, bit for bit."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch

from fp8engine.numerics.cast import Cast, PerBlock, PerRow, PerTensor, granularity
from fp8engine.numerics.formats import Format
from fp8engine.ops.reference import Operand

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = [E4M3, E5M2]
MAX = {E4M3: 448.0, E5M2: 57344.0}
NUMPY = {E4M3: np.dtype(ml_dtypes.float8_e4m3fn), E5M2: np.dtype(ml_dtypes.float8_e5m2)}
# Half an ulp of each dtype, relative: of one rounding to it.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FP32_MAX = np.finfo(np.float32).max


def cast_of(
    dtype: torch.dtype, rows: int = -1, cols: int = -1, power_of_2: bool = False, delayed: bool = False
) -> Cast:
    """The cast to a dtype with a scale for each group of rows x cols elements; -1: all."""
    scaling = "delayed" if delayed else "current"
    return Cast(Format.of(dtype), granularity(rows, cols), scaling, power_of_2=power_of_2)


def groups(shape: Sequence[int], cast: Cast) -> list[tuple[slice, slice]]:
    """The parts of a matrix that have a scale each."""
    m, k = shape
    match cast.granularity:
        case PerTensor():
            rows, cols = m, k
        case PerRow(dim):
            rows, cols = (1, k) if dim in (-1, 1) else (m, 1)
        case PerBlock(down, across):
            rows, cols = down, across
    return [
        (slice(i, i + rows), slice(j, j + cols)) for i in range(0, m, max(rows, 1)) for j in range(0, k, max(cols, 1))
    ]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype, in the order of their codes."""
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)


def every_code(dtype: torch.dtype) -> torch.Tensor:
    """All 256 codes of an FP8 dtype."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def bits(codes: torch.Tensor) -> np.ndarray:
    """FP8 codes as the bytes they are stored in."""
    return codes.contiguous().view(torch.uint8).numpy()


def values(codes: torch.Tensor) -> np.ndarray:
    """FP8 codes as float64."""
    return bits(codes).view(NUMPY[codes.dtype]).astype(np.float64)


def clamped_cast(x: np.ndarray, s: float | np.float32, dtype: torch.dtype) -> np.ndarray:
    """Bytes of clamp(x * s) rounded by ml_dtypes, for finite FP32 x."""
    with np.errstate(over="ignore"):
        y = np.clip(x.astype(np.float32) * np.float32(s), -MAX[dtype], MAX[dtype])
    return y.astype(NUMPY[dtype]).view(np.uint8)


def factor(amax: float, maximum: float, power_of_2: bool = False) -> np.float32:
    """s = MAX / amax, from its definition: one FP32 division, then 1, the largest finite, or a power of two."""
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        s = min(np.float32(maximum) / np.float32(amax), FP32_MAX)
    return np.float32(math.ldexp(1.0, math.frexp(s)[1] - 1)) if power_of_2 else np.float32(s)


def plain(result: torch.Tensor | Operand | None) -> torch.Tensor:
    """A result that must be an ordinary tensor, as one."""
    assert isinstance(result, torch.Tensor)
    return result


def fp8(result: torch.Tensor | Operand | None) -> Operand:
    """A result that must be quantised, as an Operand."""
    assert isinstance(result, Operand)
    return result


def assert_same(found: torch.Tensor | np.ndarray, wanted: torch.Tensor | np.ndarray, what: str = "") -> None:
    """Equal shapes and equal values, NaN equal to NaN and the sign of zero ignored; names the first difference."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, want {wanted.shape}"
    differ = np.argwhere(~((found == wanted) | ((found != found) & (wanted != wanted))))
    if len(differ):
        at = tuple(differ[0])
        raise AssertionError(
            f"{what}: {len(differ)} of {found.size} differ; at {at} {found[at]!r}, want {wanted[at]!r}"
        )


def assert_within(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """Within `bound` of `wanted` before a result is rounded to its dtype; FP16 may be subnormal."""
    assert found.shape == wanted.shape, what
    bound = bound + ROUNDING[found.dtype] * (wanted.abs() + bound) + 2.0**-25 * (found.dtype == torch.float16)
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), f"{what}: {(error / bound).max():.2f} times the bound"
