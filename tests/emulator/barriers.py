"""Barriers: a CTA's named ones (bar.sync), and mbarriers, which also count bytes that TMA delivers.

An mbarrier (PTX ISA, 9.7.13.15) ends a phase when all expected arrivals have come and no announced byte is missing; a
waiter names the parity of the phase that it waits for, and returns once that phase is over.  After its mbarrier.init
those threads may use it that a barrier, or their program's order, puts after it, and TMA that they start.  The ISA asks
for a proxy fence there too; it is let pass, because Triton's pipelines leave it out, and run.
"""

from __future__ import annotations

import numpy as np

from emulator.faults import Fault, Misaligned, Race
from emulator.numbers import Array
from emulator.order import WARP, Order, Seen
from emulator.shared import Shared

WORD = 8  # bytes of an mbarrier


class Named:
    """One named barrier: who has arrived since it last let them go."""

    def __init__(self, order: Order, threads: int):
        self.order = order
        self.lanes = np.zeros(threads, bool)
        self.seen = Seen(order.columns)

    def arrive(self, lanes: Array, warps: Array) -> None:
        """These lanes have come."""
        if (self.lanes & lanes).any():
            raise Fault("a thread arrives at a named barrier a second time before it was let go")
        self.lanes |= lanes
        self.seen.add(self.order.release(warps))

    def complete(self, expected: int) -> bool:
        """Whether as many have come; the barrier is then as new."""
        come = int(self.lanes.sum())
        if come > expected:
            raise Fault(f"{come} threads came to a barrier that waits for {expected}")
        if come < expected:
            return False
        self.order.acquire(np.flatnonzero(self.lanes.reshape(-1, WARP).any(1)), self.seen)
        self.lanes[:] = False
        self.seen = Seen(self.order.columns)
        return True


class MBarrier:
    """One mbarrier: the arrivals and bytes that its phase still waits for, and what past phases' arrivals had seen."""

    def __init__(self, expected: int, order: Order):
        self.expected, self.pending, self.bytes, self.phase = expected, expected, 0, 0
        self.past, self.now = Seen(order.columns), Seen(order.columns)

    def arrive(self, count: int, seen: Seen) -> None:
        """`count` arrivals by who had seen that."""
        self.pending -= count
        if self.pending < 0:
            raise Fault(f"more arrivals at an mbarrier than the {self.expected} that it expects in a phase")
        self.now.add(seen)
        self._turn()

    def expect(self, size: int) -> None:
        """So many more bytes belong to this phase."""
        self.bytes += size

    def deliver(self, size: int, column: int, epoch: int) -> None:
        """TMA has written so many bytes, as (column, epoch)."""
        self.bytes -= size
        self.now.plain[column] = max(self.now.plain[column], epoch)
        self._turn()

    def over(self, parity: int) -> bool:
        """Whether the phase of that parity has ended; before the first phase one of parity 1 has."""
        return self.phase != parity

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.expected
            self.past.add(self.now)


class MBarriers:
    """The mbarriers of a CTA by their shared address.  Their own words are written and read like any other."""

    def __init__(self, shared: Shared, order: Order):
        self.shared, self.order = shared, order
        self.known: dict[int, MBarrier] = {}

    def init(self, address: int, expected: int, warp: int) -> None:
        """A new one."""
        if address in self.known:
            raise Fault(f"the mbarrier at {address} is initialised again without mbarrier.inval")
        self._write(address, warp)
        self.known[address] = MBarrier(expected, self.order)

    def invalidate(self, address: int, warp: int) -> None:
        """Its word is ordinary memory again."""
        self.at(address, warp)
        self._write(address, warp)
        del self.known[address]

    def at(self, address: int, warp: int) -> MBarrier:
        """The mbarrier there, as one warp uses it.  Raises Fault where there is none, or the warp cannot know of it."""
        self.shared.read(self._place(address), np.array([warp]))
        return self._known(address)

    def for_tma(self, address: int, warp: int) -> MBarrier:
        """The mbarrier there, as TMA is told to signal it by this warp."""
        index = self._place(address)
        if self.order.unseen(self.shared.writer[index], self.shared.written[index], np.array([warp])).any():
            raise Race(f"TMA signals the mbarrier at {address}, and nothing orders its initialisation before that")
        return self._known(address)

    def _known(self, address: int) -> MBarrier:
        if address not in self.known:
            raise Fault(f"no mbarrier is initialised at shared address {address}")
        return self.known[address]

    def _write(self, address: int, warp: int) -> None:
        self.shared.write(self._place(address), np.zeros((1, WORD), np.uint8), np.array([warp]))

    def _place(self, address: int) -> Array:
        if address % WORD:
            raise Misaligned(f"mbarrier at shared address {address}")
        return self.shared.place(np.array([address]), WORD)
