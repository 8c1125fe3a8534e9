"""Prediction of FP8 attention's error from samples of q, k and v, and what is decided from it.

    noise of a score        scale^2 D rms_q^2 rms_k^2 (n_q + n_k)       n = 10^(-SQNR / 10) of the cast of a tensor
    noise of the output     n_scores + n_P + n_v       relative to its energy;  n_P: of E4M3 as such, 31.6 dB

A score is a sum over D columns of q k, and an error e of it changes its weight by the factor 1 + e, so the noise of the
scores is the noise of the weights.  With standard normal q and k and the usual scale, scores have variance 1 and the
prediction is 25.6 dB.  Scores of larger variance have larger errors: at 3 standard deviations it is 18 dB, too low for
FP8.  The prediction is on the safe side there: a weight near 1 changes by less than its score does (measured: 22 dB).
"""

from __future__ import annotations

import math

import torch

from fp8engine.numerics.cast import Cast, PerTensor
from fp8engine.numerics.formats import E4M3
from fp8engine.scaling.histogram import measure, read
from fp8engine.scaling.prediction import Measured
from fp8engine.scaling.sample import outside_of_autocast

SAMPLE = 16384  # elements of each of q, k and v
LEAST_DB = 22.0  # of the output: what `fe.auto` asks of a matmul's operands
OF_WEIGHTS_DB = 31.6  # numbers spread over binades, in E4M3


def sample(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The statistics of the three, on their device."""
    with torch.no_grad(), outside_of_autocast(q.device):
        return [measure(x.detach().float(), SAMPLE) for x in (q, k, v)]


def predicted_db(tables: list[torch.Tensor], scale: float, head_dim: int) -> float:
    """SQNR of the output in dB, from what `sample` gave.

    >>> q, k, v = torch.randn(3, 1, 4, 64, 128, generator=torch.Generator().manual_seed(0))
    >>> [round(predicted_db(sample(times * q, k, v), 128**-0.5, 128)) for times in (1, 4)]
    [26, 16]
    """
    q, k, v = (read(table) for table in tables)
    if q.nonfinite or k.nonfinite or v.nonfinite:
        return -math.inf
    scores = scale**2 * head_dim * q.rms**2 * k.rms**2 * (_noise(q) + _noise(k))
    return -10 * math.log10(scores + 10 ** (-OF_WEIGHTS_DB / 10) + _noise(v))


def _noise(measured: Measured) -> float:
    return 10 ** (-measured.predict(Cast(E4M3, PerTensor())).sqnr_db / 10)
