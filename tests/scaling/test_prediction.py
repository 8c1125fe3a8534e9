"""fp8engine/scaling/prediction.py: SQNR within half a dB of the real cast's, on tensors of every kind.

Not of a few elements that are nearly all of the energy, or of few distinct values: rounding errors are then no longer
spread evenly.  benchmarks/prediction.py has the slots of real models.
"""

import math

import pytest
import torch
from real_casts import real

from fp8engine.errors import InvalidRecipe
from fp8engine.numerics.cast import Cast, PerBlock, PerRow, PerTensor
from fp8engine.numerics.formats import BF16, E4M3, E5M2, FP16, FP32
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import Measured

FP8 = [Cast(f, power_of_2=p) for f in (E4M3, E5M2) for p in (False, True)]
EXACT = 100.0  # dB: above it, only the rounding of the scale to FP32 is left
M, K = 200, 320  # no multiple of 128, in one sample


def measured(x: torch.Tensor, sample: int = 65536) -> Measured:
    finite = torch.where(torch.isfinite(x), x, 0)
    return read(measure(x, sample, amax=finite.abs().max().float()))


def off(x: torch.Tensor, cast: Cast, found: Measured) -> float:
    return min(found.predict(cast).sqnr_db, EXACT) - min(real(x, cast).sqnr_db, EXACT)


def tensors(m: int = M, k: int = K) -> dict[str, torch.Tensor]:
    """Every kind that training meets; seed 0 (conftest.py)."""
    normal, uniform = torch.randn(m, k), torch.rand(m, k) - 0.5
    channels = normal.clone()
    channels[:, ::61] *= 1000
    one = normal.clone()
    one[3, 5] = 1e4
    return {
        "gaussian": normal,
        "laplace": uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-7).log(),
        "uniform": uniform,
        "lognormal sigma 1": normal.exp() * uniform.sign(),
        "channel outliers x1000": channels,
        "one outlier": one,
        "12 decades": normal * torch.logspace(-12, 0, m)[torch.randperm(m)][:, None],
        "90 % zeros": normal * (torch.rand(m, k) > 0.9),
        "1e-36": normal * 1e-36,  # MAX / amax is over the largest FP32 for some rows
        "subnormal": normal * 1e-40,
        "1e37": normal * 1e37,
        "constant": torch.full((m, k), 0.37),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sqnr_of_every_kind_of_tensor_is_within_half_a_db(dtype: torch.dtype):
    differences = {}
    for name, x in tensors().items():
        x = x.to(dtype)
        if not torch.isfinite(x).all() or (dtype != torch.float32 and name in ("1e-36", "subnormal")):
            # FP16 holds neither; BF16's subnormals are three values
            continue
        found = measured(x)
        differences |= {(name, str(cast)): off(x, cast, found) for cast in FP8}
    assert len(differences) >= 8 * len(FP8)
    within = [abs(value) <= 0.5 for value in differences.values()]
    assert sum(within) >= 0.95 * len(within), sorted(differences.items(), key=lambda item: -abs(item[1]))[:10]


@pytest.mark.parametrize("name", ["gaussian", "laplace", "12 decades", "90 % zeros", "channel outliers x1000"])
def test_flushed_saturated_and_lost_rows_are_those_of_the_real_cast(name: str):
    x = tensors()[name]
    found = measured(x)
    for cast in FP8:
        for margin in (0, 3):
            predicted, truth = found.predict(cast, margin=margin), real(x, cast, margin=margin)
            assert predicted.flushed == pytest.approx(truth.flushed, abs=0.01, rel=0.1), str(cast)
            assert predicted.saturated == truth.saturated == 0
            # A row over the limit by its mean exponent, or by half its energy: 2 % differ, of 200 rows four.
            assert predicted.rows_flushed == pytest.approx(truth.rows_flushed, abs=0.04), str(cast)
            assert predicted.sqnr_db == pytest.approx(truth.sqnr_db, abs=0.5), str(cast)
    lost = [real(x, Cast(format)).rows_flushed for format in (E4M3, E5M2)]  # there is something to be found
    assert (lost[0] > 0.5, lost[1] > 0.1) == ((True, True) if name == "12 decades" else (False, False))


@pytest.mark.parametrize("stale", [0.01, 0.3, 1.0, 3.7, 50.0])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_a_scale_from_an_older_amax_saturates_or_wastes_range(format, stale: float):
    """s is `stale` times what it should be: above 1 values saturate, below 1 they flush earlier."""
    x = tensors()["laplace"]
    s = stale * format.max / float(x.abs().max())
    predicted = measured(x).predict(Cast(format, PerTensor(), "delayed"), scale=s)
    truth = real(x, Cast(format), scale=s)
    assert predicted.sqnr_db == pytest.approx(truth.sqnr_db, abs=0.1)
    assert predicted.saturated == pytest.approx(truth.saturated, rel=0.05, abs=1e-4)
    assert (truth.saturated > 0) == (stale > 1)
    assert predicted.flushed == pytest.approx(truth.flushed, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 1.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bits_flush_and_round_as_they_do(dtype: torch.dtype, size: float):
    x = (tensors()["gaussian"].clamp(-2, 2) * size).to(dtype)
    found = measured(x)
    for format in (FP16, BF16, FP32):
        predicted, truth = found.predict(Cast(format)), real(x, Cast(format))
        assert min(predicted.sqnr_db, 200) == pytest.approx(min(truth.sqnr_db, 200), abs=0.5), str(format)
        assert predicted.flushed == pytest.approx(truth.flushed, abs=0.01, rel=0.1)
        assert (predicted.saturated, truth.saturated) == (0, 0)
    large = tensors()["gaussian"] * 4e4  # FP16 that overflows is no good at any SQNR
    found = measured(large)
    predicted, truth = found.predict(Cast(FP16)), real(large, Cast(FP16))
    assert predicted.sqnr_db == truth.sqnr_db == -math.inf
    assert predicted.saturated == pytest.approx(truth.saturated, rel=0.05)
    assert found.predict(Cast(BF16)).saturated == 0


def test_a_sample_of_a_large_tensor_says_what_the_whole_would():
    x = tensors(1500, 700)["laplace"] * torch.logspace(-1, 1, 700)
    found = measured(x)
    assert found.sampled < 70_000 < x.numel()
    for cast in FP8:
        assert off(x, cast, found) == pytest.approx(0, abs=0.5), str(cast)


@pytest.mark.parametrize("size", [1e-41, 1e-40, 1e-38])
def test_no_scale_is_above_the_largest_fp32(size: float):
    """MAX / amax overflows, one factor 3.4e38 serves every group, and values do not reach the format's range."""
    x = tensors()["gaussian"] * size
    found = measured(x)
    for cast in FP8:
        predicted, truth = found.predict(cast), real(x, cast)
        assert predicted.sqnr_db == pytest.approx(truth.sqnr_db, abs=0.5), str(cast)
        assert predicted.flushed == pytest.approx(truth.flushed, abs=0.01, rel=0.1), str(cast)


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.zeros(0, 4), torch.full((2, 2), math.nan)], ids=str)
def test_of_nothing_nothing_is_lost(x: torch.Tensor):
    found = read(measure(x))
    for cast in (*FP8, Cast(FP16), Cast(FP32)):
        assert found.predict(cast, margin=2) == (math.inf, 0, 0, 0)


def test_errors():
    found = read(measure(torch.ones(2, 2)))
    for granularity in (PerRow(), PerRow(0), PerBlock(128, 128)):
        with pytest.raises(InvalidRecipe, match=r"a histogram tells of scales per tensor alone; reads\.py"):
            found.predict(Cast(E4M3, granularity))
    for cast, scale in ((Cast(E4M3, PerRow()), 1.0), (Cast(BF16), 1.0), (Cast(E4M3), 0.0), (Cast(E4M3), math.nan)):
        with pytest.raises(InvalidRecipe, match="a scale is a positive factor for an FP8 cast per tensor"):
            found.predict(cast, scale=scale)
