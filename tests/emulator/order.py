"""What is ordered after what: vector clocks of the warps of a launch, and of the units that work beside them.

An access by agent X at its epoch e is ordered before what warp w does now if w has seen X's epoch e.  Agents are the
warps (32 lanes are one agent: what lanes of a warp do to each other is not judged), and, for each CTA, what moves data
on its own: TMA, by the mbarrier that it signals or by the warp whose groups are waited for; wgmma; cp.async.

    barrier            everyone who took part has seen what anyone of them had seen
    mbarrier           a waiter has seen what those had seen who arrived, and the copies that the phase counted
    atomic acq_rel     the CTA has seen what those had seen who came to that address before
    fence.proxy.async  TMA and wgmma go another way to shared memory (the async proxy): what warps wrote in the ordinary
                       way is ordered before them only where a fence lies between (PTX ISA, 8.4, "proxies")

Source of the algorithm: FastTrack, Flanagan and Freund, PLDI 2009, with an epoch for the last write of each byte.
"""

from __future__ import annotations

import numpy as np

from emulator.numbers import Array

WARP, WARPGROUP = 32, 128
BESIDE = 128  # agents of a CTA that are no warps: one for each mbarrier, two for each warp, one for each warpgroup


class Seen:
    """What an arrival hands on: epochs seen in the ordinary way, and by way of the async proxy."""

    def __init__(self, columns: int):
        self.plain = np.zeros(columns, np.int32)
        self.proxy = np.zeros(columns, np.int32)

    def add(self, other: Seen) -> None:
        """Also what the other has seen."""
        np.maximum(self.plain, other.plain, out=self.plain)
        np.maximum(self.proxy, other.proxy, out=self.proxy)


class Order:
    """The clocks of a CTA.  Columns: the warps of every CTA of the launch, then agents that are no warps."""

    def __init__(self, cta: int, ctas: int, warps: int):
        self.warps = warps
        self.first = cta * warps  # column of warp 0
        self.beside = ctas * warps  # column of its first agent that is no warp
        self.columns = self.beside + BESIDE
        self.plain = np.zeros((warps, self.columns), np.int32)
        self.proxy = np.zeros((warps, self.columns), np.int32)
        self.plain[np.arange(warps), self.first + np.arange(warps)] = 1
        self.names: dict[tuple, int] = {}
        self.epochs = np.zeros(self.columns, np.int32)  # last epoch begun of each agent that is no warp

    def epoch(self, warps: Array) -> Array:
        """The current epochs of warps."""
        return self.plain[warps, self.first + warps]

    def agent(self, *name) -> int:
        """The column of an agent that is no warp."""
        if name not in self.names:
            self.names[name] = self.beside + len(self.names)
            if len(self.names) > BESIDE:
                raise ValueError(f"more than {BESIDE} agents beside the warps of a CTA")
        return self.names[name]

    def begin(self, *name) -> tuple[int, int]:
        """(column, epoch) of something new that the agent does."""
        column = self.agent(*name)
        self.epochs[column] += 1
        return column, int(self.epochs[column])

    def release(self, warps: Array) -> Seen:
        """What these warps have seen; what they do from now on is not in it."""
        seen = Seen(self.columns)
        seen.plain[:] = self.plain[warps].max(0)
        seen.proxy[:] = self.proxy[warps].max(0)
        self.plain[warps, self.first + warps] += 1
        return seen

    def acquire(self, warps: Array, seen: Seen) -> None:
        """These warps have seen that as well."""
        self.plain[warps] = np.maximum(self.plain[warps], seen.plain)
        self.proxy[warps] = np.maximum(self.proxy[warps], seen.proxy)

    def finished(self, warps: Array, column: int, epoch: int) -> None:
        """These warps know that the agent has done everything up to its epoch."""
        self.plain[warps, column] = np.maximum(self.plain[warps, column], epoch)

    def fence_proxy(self, warps: Array) -> None:
        """What these warps have seen is ordered before what goes by the async proxy after them."""
        self.proxy[warps] = np.maximum(self.proxy[warps], self.plain[warps])

    def unseen(self, columns: Array, epochs: Array, warps: Array) -> Array:
        """Which of these accesses, [lanes, n], the lanes' warps, [lanes], have not seen."""
        return epochs > self.plain[warps[:, None], columns]

    def unseen_by_proxy(self, columns: Array, epochs: Array, warps: Array) -> Array:
        """Which of these accesses, of any shape, an operation by the async proxy that the warps start has not seen."""
        plain, proxy = self.plain[warps].min(0), self.proxy[warps].min(0)
        ordinary = np.where(np.arange(self.columns) < self.beside, proxy, plain)  # the proxy's own need no fence
        return epochs > ordinary[columns]

    def unseen_reads(self, columns: Array, epochs: Array, warps: Array) -> Array:
        """The same for reads before a write by the proxy: no fence is needed between."""
        return epochs > self.plain[warps].min(0)[columns]
