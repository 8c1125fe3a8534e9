"""Barriers: a CTA's named ones (bar.sync), the cluster's, and mbarriers, which also count bytes that TMA delivers.

An mbarrier (PTX ISA, 9.7.13.15) ends a phase when all expected arrivals have come and no announced byte is missing; a
waiter names the parity of the phase that it waits for, and returns once that phase is over.  Warps of any CTA of the
cluster may arrive at one; only its own CTA may wait for it.

Who may use an mbarrier after its mbarrier.init (9.7.13.15.9 and fence, 9.7.13.4):

    threads of its CTA             those that a barrier, or their program's order, puts after it
    threads of other CTAs          the same, by the cluster's barrier: a .relaxed arrival there hands on nothing but
                                   what a fence.mbarrier_init (or a fence.acq_rel.cluster) has fenced before
    TMA that another CTA starts    the same, and fence.mbarrier_init or fence.proxy.async: TMA is another proxy
    TMA that its own CTA starts    as its threads.  The ISA asks for a proxy fence here too; it is let pass, because
                                   Triton's pipelines of one CTA leave it out, and run

Without a scope an arrival and a wait have .cta, by the ISA.  For an mbarrier that another CTA arrives at this is let
pass: CUTLASS's ClusterBarrier and Triton write it so.  An arrival there that says .cta hands nothing on.
"""

from __future__ import annotations

import numpy as np

from emulator.faults import Fault, Misaligned, Race
from emulator.numbers import Array
from emulator.order import WARP, Order, Seen
from emulator.shared import WINDOW, Shared

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


class ClusterBarrier:
    """The barrier of a cluster, at which every thread that has not ended arrives (PTX ISA, 9.7.13.3)."""

    def __init__(self, order: Order, threads: int):
        self.order, self.turn = order, 0
        self.came = np.zeros(threads, bool)  # in this turn
        self.waits_for = np.full(threads, -1)  # the turn in which a thread arrived, and for whose end it has not waited
        self.past, self.now = Seen(order.columns), Seen(order.columns)

    def arrive(self, lanes: Array, warps: Array, relaxed: bool) -> None:
        """These lanes have come."""
        if (self.waits_for[lanes] >= 0).any():
            raise Fault("a thread arrives at the cluster's barrier a second time, and has not waited for it")
        self.came |= lanes
        self.waits_for[lanes] = self.turn
        self.now.add((self.order.release_fenced if relaxed else self.order.release)(warps))

    def complete(self, done: Array) -> None:
        """The turn ends if all have come but those who are done."""
        if self.came.any() and (self.came | done).all():
            self.turn += 1
            self.came[:] = False
            self.past.add(self.now)

    def over(self, lanes: Array) -> bool:
        """Whether the turn in which these lanes came has ended."""
        return bool((self.waits_for[lanes] < self.turn).all())

    def leave(self, lanes: Array, warps: Array) -> None:
        """These lanes have waited."""
        if (self.waits_for[lanes] < 0).any():
            raise Fault("a thread waits at the cluster's barrier, and has not arrived there")
        self.waits_for[lanes] = -1
        self.order.acquire(warps, self.past)


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
    """The mbarriers of a cluster by their shared address.  Their own words are written and read like any other."""

    def __init__(self, shared: Shared, order: Order):
        self.shared, self.order = shared, order
        self.known: dict[int, MBarrier] = {}

    def init(self, address: int, expected: int, warp: int) -> None:
        """A new one."""
        if address in self.known:
            raise Fault(f"the mbarrier at {address} is initialised again without mbarrier.inval")
        self._write(address, warp)
        column, epoch = self.order.begin("mbarrier init", warp)  # so that its own fence can order it
        self.order.finished(np.array([warp]), column, epoch)
        index = self._place(address, warp)
        self.shared.writer[index], self.shared.written[index] = column, epoch
        self.known[address] = MBarrier(expected, self.order)

    def invalidate(self, address: int, warp: int) -> None:
        """Its word is ordinary memory again."""
        self.at(address, warp, own=True)
        self._write(address, warp)
        del self.known[address]

    def at(self, address: int, warp: int, own: bool) -> MBarrier:
        """The mbarrier there, as one warp uses it.  Raises Fault where there is none, or the warp cannot know of it.

        own: it has to be the warp's own CTA's.
        """
        self.shared.read(self._place(address, warp if own else None), np.array([warp]))
        return self._known(address)

    def for_tma(self, address: int, warp: int) -> MBarrier:
        """The mbarrier there, as TMA is told to signal it by this warp."""
        order, index = self.order, self._place(address)
        column, epoch = self.shared.writer[index], self.shared.written[index]
        if order.unseen(column, epoch, np.array([warp])).any():
            raise Race(f"TMA signals the mbarrier at {address}, and nothing orders its initialisation before that")
        if address // WINDOW != warp // order.warps_of_cta and (epoch > order.proxy[warp, column]).any():
            raise Race(
                f"TMA signals the mbarrier at {address % WINDOW} of another CTA, and its initialisation is not ordered "
                "before (is a fence.mbarrier_init missing?)"
            )
        return self._known(address)

    def _known(self, address: int) -> MBarrier:
        if address not in self.known:
            raise Fault(f"no mbarrier is initialised at shared address {address}")
        return self.known[address]

    def _write(self, address: int, warp: int) -> None:
        self.shared.write(self._place(address, warp), np.zeros((1, WORD), np.uint8), np.array([warp]))

    def _place(self, address: int, warp: int | None = None) -> Array:
        if address % WORD:
            raise Misaligned(f"mbarrier at shared address {address}")
        return self.shared.place(np.array([address]), WORD, None if warp is None else np.array([warp]))
