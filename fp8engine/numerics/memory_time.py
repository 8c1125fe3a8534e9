"""Share of a Hopper card's memory bandwidth that a cast can reach at best, by what its machine code says; not measured.

    share = min(1, issue / W, in flight / (B LOADED / multiprocessors))        W = B / multiprocessors / clock

B is the data sheet's bandwidth.  `per_clock` is what a multiprocessor moves if each of its four schedulers issues an
instruction every clock; `in_flight` what its programs have on their way to registers together (Little's law).  Both are
those of benchmarks/machine_code/baselines/, for 16-bit input whose sizes 16 divides; tests/bench/test_ceilings.py holds
them against it.  Formulas and the source of LOADED: benchmarks/machine_code/ceilings.py.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8engine.numerics.cards import Card

LOADED = 0.8e-6  # seconds from a load until its bytes are there, under load


class Moved(NamedTuple):
    """Bytes a clock and multiprocessor; bytes a multiprocessor."""

    per_clock: float
    in_flight: int


# By kernel of kernels/quantize*.py and column_sums.py and by how it casts.  Of the groups of values that share a kernel
# the one that reaches the least stands for all.
KERNELS: dict[str, Moved] = {
    "measure": Moved(19.1, 32768),
    "cast": Moved(36.8, 32768),
    "cast transposed": Moved(32.8, 24576),
    "measure predicted": Moved(13.3, 16384),
    "measure predicted transposed": Moved(12.5, 24576),
    "line_amax": Moved(23.7, 65536),
    "line_cast": Moved(31.3, 32768),
    "line_cast transposed": Moved(26.7, 32768),
    "short": Moved(30.7, 32768),
    "short transposed": Moved(19.2, 32768),
    "column_sums": Moved(120.5, 49152),
}


def share(kernel: str, card: Card) -> float:
    """Share of the data sheet's bandwidth that a kernel of KERNELS can reach on a card; of others 1.

    >>> from fp8engine.numerics.cards import H100_SXM, H200
    >>> [round(share("measure predicted transposed", card), 2) for card in (H100_SXM, H200)]
    [0.9, 0.63]
    """
    if kernel not in KERNELS:
        return 1.0
    moved = KERNELS[kernel]
    return min(1.0, moved.per_clock / per_clock(card), moved.in_flight / needed_in_flight(card))


def per_clock(card: Card) -> float:
    """Bytes a clock and multiprocessor of the data sheet's bandwidth.

    >>> from fp8engine.numerics.cards import H200
    >>> round(per_clock(H200), 1)  # 4.8 TB/s over 132 multiprocessors of 1.83 GHz
    19.9
    """
    return card.memory / card.processors / card.clock


def needed_in_flight(card: Card) -> float:
    """Bytes that a multiprocessor has to have on their way for it.

    >>> from fp8engine.numerics.cards import H200
    >>> round(needed_in_flight(H200), -3)  # 4.8 TB/s times 0.8 us over 132
    29000.0
    """
    return card.memory / card.processors * LOADED
