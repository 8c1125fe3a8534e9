"""Hopper cards as values: what a timing model needs to know of them, with sources.

| | H100 SXM | H100 PCIe | H200 |
| --- | --- | --- | --- |
| multiprocessors | 132 | 114 | 132 |
| clock of the data sheet's rates, GHz | 1.83 | 1.62 | 1.83 |
| power limit, W | 700 | 350 | 700 |
| memory, TB/s | 3.35 | 2.0 | 4.8 |
| L2 cache, MB | 50 | 50 | 50 |

Sources: NVIDIA's H100 and H200 data sheets (power, memory, dense rates: 1979 and 1513 TFLOP/s in FP8) and the H100
architecture paper (multiprocessors, L2, 4096 multiply-adds a clock and multiprocessor in FP8).  The clock is the data
sheet's rate over multiprocessors and multiply-adds.  An H800 SXM is an H100 SXM with slower NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8engine.errors import UnknownName


@dataclass(frozen=True)
class Card:
    """One card.  clock: Hz.  watts: power limit; idle_watts: what it draws without multiplying, estimated.

    memory: bytes/s.  l2: bytes.
    """

    name: str
    title: str
    processors: int
    clock: float
    watts: float
    idle_watts: float
    memory: float
    l2: float = 50e6

    def rate(self, bits: int) -> float:
        """Operations per second of dense matmuls of 8 or 16 bits, as the data sheet has them.

        >>> round(H100_SXM.rate(8) / 1e12), round(H100_PCIE.rate(16) / 1e12)
        (1979, 756)
        """
        return 2 * multiply_adds(bits) * self.processors * self.clock


def multiply_adds(bits: int) -> int:
    """Multiply-adds a clock of a Hopper multiprocessor's Tensor Cores, operands of 8 or 16 bits."""
    return 32768 // bits


H100_SXM = Card("h100-sxm", "H100 SXM", 132, 1.830e9, 700, 100, 3.35e12)
H100_PCIE = Card("h100-pcie", "H100 PCIe", 114, 1.620e9, 350, 70, 2.0e12)
H200 = Card("h200", "H200", 132, 1.830e9, 700, 100, 4.8e12)
CARDS = {card.name: card for card in (H100_SXM, H100_PCIE, H200)}


def card_named(name: str) -> Card:
    """A card by the name that options take.  Raises UnknownName."""
    if name not in CARDS:
        raise UnknownName("card", name, CARDS)
    return CARDS[name]


def card_of(device_name: str, processors: int) -> Card:
    """The card that a device's name and number of multiprocessors are nearest to.

    >>> card_of("NVIDIA H200", 132).name, card_of("NVIDIA H100 PCIe", 114).name, card_of("NVIDIA H800", 132).name
    ('h200', 'h100-pcie', 'h100-sxm')
    """
    if "H200" in device_name:
        return H200
    return H100_PCIE if processors <= H100_PCIE.processors else H100_SXM
