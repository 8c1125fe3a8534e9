"""Ceilings of a kernel on a Hopper card: the least of three shares, from a baseline's row; computed, not measured.

A kernel with Tensor Core instructions is held against the Tensor Core's rate, of one multiprocessor with P programs:

    issue   min(P ceiling, tensor / busy)           clocks of a pass: of its products, of the busiest unit
    l2      G / (bytes that a tile asks a clock)    G: what comes from L2 a clock and multiprocessor
    loads   (P shared + in_flight) / (bytes asked a clock LATENCY)            Little's law with L2's latency

A kernel without is held against the memory's bandwidth B of the data sheet, W = B / multiprocessors / clock:

    issue   bytes of a pass / (clocks to issue its instructions W)
    l2      G / W
    loads   in_flight / (B / multiprocessors LOADED)                          Little's law with the memory's latency

`ceiling` is sass.py's, of one program; where several are resident, the products of one fill the gaps of another, until
a unit is full (judge.Row, busy_cycles).  Shared memory counts whole as room for loads: an
upper bound.  Loads are counted and stores are not, on both sides of Little's law: no program waits for a store.

Sources: G and LATENCY are fp8engine/numerics/matmul_time.py's, fitted there; LOADED lies between the latency of an idle
H100, below 0.4 us (Luo et al., arXiv 2402.13499), and the 32 and 48 KiB a multiprocessor that NVIDIA's CUB keeps on
their way on an H100 and H200 (`arch_to_min_bytes_in_flight`, cub/device/dispatch/tuning/tuning_transform.cuh at
004ad19), which make 1.3 us: with 0.8 us an H200 needs 29 kB, kernels/quantize.py's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fp8engine.numerics.cards import Card
from fp8engine.numerics.matmul_time import L2_OF_CARD, L2_OF_PROCESSOR, LATENCY
from fp8engine.numerics.memory_time import needed_in_flight, per_clock

HOPPER = re.compile(r"\bsm_90\b")
HEADER = f"{'ceiling of':12s} {'issue':>6s} {'L2':>6s} {'loads':>6s} {'least':>6s} limit"


class Shares(NamedTuple):
    """Shares, at most 1, of what `of` names: "Tensor Cores" or "memory".  None: not known, of cards but Hopper."""

    of: str
    issue: float
    l2: float | None
    loads: float | None

    @property
    def least(self) -> float:
        """The ceiling."""
        return min(share for share in (self.issue, self.l2, self.loads) if share is not None)

    @property
    def limit(self) -> str:
        """Which of the three it is; "-" where nothing is below 1."""
        named = {"issue": self.issue, "L2": self.l2, "loads": self.loads}
        return "-" if self.least == 1 else next(name for name, share in named.items() if share == self.least)


def of(name: str, row: Mapping[str, Any], card: Card) -> Shares | None:
    """The Shares of one row of a baseline; None where nothing is known.

    >>> from fp8engine.numerics.cards import H200
    >>> cast = {"tensor_cycles": 0, "issue_cycles": 1460, "bytes_per_clock": 11.2, "in_flight": 16384}
    >>> found = of("cast_transpose tensor predicted sm_90: 1 _measure_kernel", cast, H200)
    >>> f"{found.issue:.3f} {found.loads:.3f} {found.limit}"
    '0.564 0.563 loads'
    """
    if "bytes_per_clock" not in row:
        return None  # a baseline of before
    asked, hopper = row["bytes_per_clock"], HOPPER.search(name) is not None
    given = min(L2_OF_PROCESSOR, L2_OF_CARD / card.processors)
    if row["tensor_cycles"]:
        issue = min(row["resident"] * row["ceiling"] / 100, _share(row["tensor_cycles"], row["busy_cycles"]))
        room = row["resident"] * row["shared"] + row["in_flight"]
        others = (_share(given, asked), _share(room, asked * LATENCY)) if hopper else (None, None)
        return Shares("Tensor Cores", issue, *others)
    if not hopper:
        return None
    wanted = per_clock(card)
    loads = _share(row["in_flight"], needed_in_flight(card))
    return Shares("memory", _share(asked, wanted), _share(given, wanted), loads)


def _share(there: float, wanted: float) -> float:
    return min(1.0, there / wanted) if wanted else 1.0


def table(kernels: Mapping[str, Mapping[str, Any]], card: Card) -> Iterator[str]:
    """Lines of a table of a baseline's kernels."""
    widest = max(map(len, kernels), default=0)
    yield f"{'kernel':{widest}s} {HEADER}"
    for name, row in kernels.items():
        if (found := of(name, row, card)) is not None:
            yield f"{name:{widest}s} {line(found)}"


def line(found: Shares | None) -> str:
    """The Shares in a line of a table."""
    if found is None:
        return " ".join([f"{'-':12s}", *[f"{'-':>6s}"] * 4, f"{'-':5s}"])
    each = " ".join(f"{_percent(share):>6s}" for share in (found.issue, found.l2, found.loads, found.least))
    return f"{found.of:12s} {each} {found.limit:5s}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
