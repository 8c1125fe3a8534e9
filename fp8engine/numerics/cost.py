"""Cost model of FP8 on a card: the speed-up of a layer from its shape, the rates of the card and how casts are made.

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
