"""What a machine can do at most, measured, and what FP8 can save on it, from a model.

A Linear's forward and backward are three matmuls, 6 M N K operations.  FP8 makes them ρ times as fast and adds casts,
which move bytes that a 16-bit Linear does not.  In units of M N K / R:

    16 bits   6
    FP8       6/ρ + (R/B) (c (1/N + 1/K) + w/M)

    ρ   rate of FP8 matmuls over 16-bit ones: 1.8 to 1.9 measured on an H200, not 2
    R/B 16-bit matmul rate over memory bandwidth, FLOP/byte
    c   extra bytes for each element of x and dy, w: of the weight

The last three lines of `CASTS` are other engines' ways, for comparison.  The model predicts the published cost of
Transformer Engine's quantisation on an H200 within 6 %.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.bench.timing import Clock, measure
from fp8engine.device import capability

SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matmul that gives the rate
COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes copied: more than any cache holds
TURNS = {"cuda": 20, "cpu": 5}

RHO = 1.8
H200 = 790e12 / 4.3e12  # FLOP/byte: 16-bit 8192^3 on random data, and device copy (reads and writes both counted)

# How a recipe's casts are made -> extra bytes per element (c, w).
CASTS = {
    "fused": (0, 4),  # in the producer, under a predicted scale
    "amax from the producer": (4, 6),  # then one cast and transpose
    "amax pass": (6, 6),  # then one cast and transpose
    "separate passes": (7, 7),  # amax, cast, transpose
    "eager": (35, 35),  # torch operators, one by one
}


class Limits(NamedTuple):
    """What a machine reaches, per second.  flops: of a 16-bit matmul.  bytes: read and written by a copy."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte at which both limits meet."""
        return self.flops / self.bytes


def half(where: torch.device) -> torch.dtype:
    """The 16-bit format that the device multiplies fast: FP16 on a card before sm_80, else BF16."""
    return torch.float16 if where.type == "cuda" and capability(where) < (8, 0) else torch.bfloat16


def limits(where: torch.device, clock: Clock, side: int | None = None, copied: int | None = None) -> Limits:
    """Measure them, in one run.  side: of the square matmul.  copied: bytes of the copy's source."""
    n, size = side or SIDE[where.type], copied or COPIED[where.type]
    # Two sets, so that no call finds its operands where the call before left them.
    sets = [[torch.randn(n, n, device=where).to(half(where)) for _ in range(2)] for _ in range(2)]
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    times = measure(
        {
            "matmul": lambda turn: sets[turn % 2][0] @ sets[turn % 2][1].t(),
            "copy": lambda turn: target.copy_(source),
        },
        clock,
        TURNS[where.type],
    )
    return Limits(2 * n**3 / times["matmul"].median, 2 * size / times["copy"].median)


def speedup(m: int, n: int, k: int, casts: str, rho: float = RHO, intensity: float = H200) -> float:
    """How much faster a Linear's forward and backward are than in 16 bits.  M tokens, N outputs, K inputs.

    casts: a key of CASTS.  rho: ρ above.  intensity: R/B above, FLOP/byte.

    >>> round(speedup(8192, 14336, 4096, "amax pass"), 2), round(speedup(8192, 14336, 4096, "fused"), 2)
    (1.57, 1.75)
    """
    c, w = CASTS[casts]
    return 6 / (6 / rho + intensity * (c * (1 / n + 1 / k) + w / m))


def break_even(casts: str, rho: float = RHO, intensity: float = H200) -> float:
    """The size M = N = K at which FP8 begins to win: `speedup` is 1 there.

    >>> [round(break_even(casts)) for casts in CASTS]
    [276, 965, 1240, 1447, 7234]
    """
    c, w = CASTS[casts]
    return intensity * (2 * c + w) / (6 - 6 / rho)
