"""Casts of `mxfp8` beside torchao's MX reference (RCEIL), bit for bit; where the two part, beside exact numbers.

torchao's eager code parts from the rule in three places: it takes log2 in FP32, whose rounding hides that a number is a
few ulps above a power of two; it multiplies blocks of the least scale, 2^-127, by 1 and not by 2^127; and an Inf is the
largest code under the largest scale.  OCP MX 1.0 leaves to implementations what is made of Inf and NaN, and of zeros.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from casts import E4M3, bits
from torch.nn.functional import pad
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

import fp8engine as fe
from fp8engine.ops.reference import decode, quantize

CAST, BLOCK = fe.mxfp8().input, 32
LEAST = 2.0**-127  # E8M0 code 0


def ours(x_MK: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """(bytes of the codes, FP32 scales), every scale being one that E8M0 holds."""
    codes, scale = quantize(x_MK, CAST)
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    return bits(codes), scale


def theirs(x_MK: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """The same by torchao, which takes whole blocks: zeros behind a row change no other number."""
    k = x_MK.shape[1]
    whole = pad(x_MK, (0, -k % BLOCK)).contiguous()
    scale, codes = to_mx(whole, E4M3, BLOCK, ScaleCalculationMode.RCEIL)
    return bits(codes)[:, :k], scale.float()


def least_power(amax: float) -> float:
    """The least power of two, at least 2^-127, under which amax is at most 448: of exact numbers, without a log."""
    ratio, power = Fraction(amax) / 448, Fraction(LEAST)
    power *= 2 ** max(0, ratio.numerator.bit_length() - ratio.denominator.bit_length() + 126)
    while power < ratio:
        power *= 2
    return float(power)


@pytest.mark.parametrize("shape", [(512, 96), (257, 33), (31, 7), (1, 65)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_and_scales_are_torchaos_at_every_magnitude_and_in_a_short_last_block(dtype, shape):
    x = torch.randn(shape) * torch.exp2(torch.randint(-110, 120, (shape[0], 1)).float())
    x[:, ::5] *= 2.0**-9  # subnormal codes, and zeros
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    for found, wanted in zip(ours(x), theirs(x), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_of_numbers_an_ulp_around_448_times_a_power_of_two_the_scale_is_exact():
    """And of blocks of the least scale, or of zeros, codes keep the values, which torchao's lose or have as 2^-127."""
    edge = 448 * torch.exp2(torch.arange(-126, 120).float())
    below, above = (torch.nextafter(edge, torch.full_like(edge, way)) for way in (0.0, math.inf))
    x = torch.cat([below, edge, above])[:, None] * torch.linspace(-1, 1, BLOCK)
    (codes, scale), (_, scale_ao) = ours(x), theirs(x)
    np.testing.assert_array_equal(scale[:, 0], [least_power(float(row.abs().max())) for row in x])
    other = (scale != scale_ao).flatten()
    assert (x[other].abs().amax(1) > 448 * scale_ao[other, 0]).all(), "they part where torchao saturates"
    np.testing.assert_array_equal(codes[~other.numpy()], theirs(x)[0][~other.numpy()])
    x = torch.tensor([2.0**-120, 0.0])[:, None] * torch.linspace(-1, 1, BLOCK)
    (codes, scale), (codes_ao, scale_ao) = ours(x), theirs(x)
    assert (scale[:, 0].tolist(), scale_ao[:, 0].tolist()) == ([LEAST, 1.0], [LEAST, LEAST])
    kept = decode(torch.from_numpy(codes[:1]).view(E4M3), torch.float32) * LEAST
    assert (kept - x[:1]).abs().max() <= 16 * LEAST, "half a step of 32, at 448, times the scale"
    assert not (codes_ao[0] & 0x7F).any(), "torchao makes zeros of them"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_not_finite_becomes_nan_alone_and_reaches_the_sums_that_a_block_of_nan_would(bad: float):
    x, w = torch.randn(4, 2 * BLOCK), torch.randn(3, 2 * BLOCK)
    finite = ours(x.index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(0.0)))
    x[2, 5] = bad
    codes, scale = ours(x)
    assert torch.equal(scale, finite[1]), "the scale is that of the block's finite numbers"
    nan = (codes & 0x7F) == 0x7F
    assert np.argwhere(nan).tolist() == [[2, 5]]
    np.testing.assert_array_equal(codes[~nan], finite[0][~nan])
    codes_ao, scale_ao = theirs(x)
    assert math.isnan(scale_ao[2, 0]) if math.isnan(bad) else scale_ao[2, 0] == 2.0**127
    y, y_ao = (
        (decode(torch.from_numpy(q).view(E4M3), torch.float32) * s.repeat_interleave(BLOCK, 1)) @ w.t()
        for q, s in ((codes, scale), (codes_ao, scale_ao))
    )
    assert torch.equal(y.isfinite(), y_ao.isfinite()), "all of a block is summed into the same results"
