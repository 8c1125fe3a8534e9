"""Shared memory of a cluster's CTAs: its bytes, and who wrote and read each of them last, to name races.

The address of a byte of the CTA of rank r is r * WINDOW + its place in that CTA's memory, in every CTA of the cluster
and in both spaces, shared::cta and shared::cluster: as on a card, where CUTLASS and Triton mask these bits.
"""

from __future__ import annotations

import numpy as np

from emulator.faults import Fault, Misaligned, OutOfBounds, Race, Unwritten
from emulator.numbers import Array
from emulator.order import Order

GARBAGE = 0xCD
ROW = 16  # bytes
WINDOW = 1 << 24  # bytes from a CTA's shared memory to the next one's


class Shared:
    """`each` bytes a CTA; every access says which warps make it, and which way: ordinary, or by the async proxy."""

    def __init__(self, each: int, order: Order):
        self.order = order
        self.each, self.ctas = each, order.warps // order.warps_of_cta
        self.ended = np.zeros(self.ctas, bool)
        size = each * self.ctas
        self.bytes = np.full(size, GARBAGE, np.uint8)
        self.writer = np.zeros(size, np.int32)  # column of the last write
        self.written = np.zeros(size, np.int32)  # its epoch; 0: never
        self.read_by = np.zeros((order.warps, size), np.int32)  # epoch of each warp's last read
        self.read_beside: dict[int, Array] = {}  # the same for agents that are no warps

    def place(self, addresses: Array, size: int, warps: Array | None) -> Array:
        """Indices [lanes, size] of accesses at addresses [lanes]; of each warp's own CTA, if `warps` are given."""
        if (addresses % size).any():
            raise Misaligned(f"shared address {int(addresses[addresses % size != 0][0])}, {size} bytes a lane")
        if warps is not None and (addresses // WINDOW != warps // self.order.warps_of_cta).any():
            raise OutOfBounds("an address of another CTA's shared memory, or of none: shared::cta is a CTA's own")
        return self.locate(addresses, size)[:, None] + np.arange(size)

    def locate(self, addresses: Array, size: int = 1) -> Array:
        """Indices of the first of `size` bytes at addresses of any shape, of any CTA of the cluster."""
        rank, local = np.divmod(addresses, WINDOW)
        if rank.min() < 0 or rank.max() >= self.ctas or int(local.max()) + size > self.each:
            raise OutOfBounds(f"shared address {int(local.max())} of {self.each} bytes")
        if self.ended[rank].any():
            ended = self.order.cta + int(rank[self.ended[rank]].flat[0])
            raise Fault(f"CTA {ended} has ended, and its shared memory with it")
        return rank * self.each + local

    def read(self, index: Array, warps: Array) -> Array:
        """Bytes at index [lanes, n], read in the ordinary way by the lanes' warps [lanes]."""
        self._whole(index)
        late = self.order.unseen(self.writer[index], self.written[index], warps)
        self._race(late, index, "read", "write")
        self.read_by[warps[:, None], index] = self.order.epoch(warps)[:, None]
        return self.bytes[index]

    def write(self, index: Array, data: Array, warps: Array) -> None:
        """Bytes at index [lanes, n], written in the ordinary way."""
        late = self.order.unseen(self.writer[index], self.written[index], warps)
        self._race(late & (self.bytes[index] != data), index, "write", "write")  # warps that agree may both write
        for reader in range(self.order.warps):
            column = np.full(1, self.order.first + reader)
            self._race(self.order.unseen(column, self.read_by[reader][index], warps), index, "write", "read")
        for column, epochs in self.read_beside.items():
            self._race(self.order.unseen(np.full(1, column), epochs[index], warps), index, "write", "asynchronous read")
        self.bytes[index] = data
        if (self.bytes[index] != data).any():
            raise Race("two lanes write different values to one shared address in one instruction")
        self.writer[index] = self.order.first + warps[:, None]
        self.written[index] = self.order.epoch(warps)[:, None]

    def read_by_proxy(self, index: Array, warps: Array, column: int, epoch: int) -> None:
        """TMA or wgmma, started by these warps, reads index (any shape) as (column, epoch)."""
        self._whole(index)
        late = self.order.unseen_by_proxy(self.writer[index], self.written[index], warps)
        self._race(late, index, "read by TMA or wgmma", self._last_write(index, late))
        if column not in self.read_beside:
            self.read_beside[column] = np.zeros(len(self.bytes), np.int32)
        self.read_beside[column][index] = epoch

    def write_by_proxy(self, index: Array, warps: Array, column: int, epoch: int) -> None:
        """TMA, started by these warps, writes index as (column, epoch); the bytes themselves come when it is done."""
        late = self.order.unseen_by_proxy(self.writer[index], self.written[index], warps)
        self._race(late, index, "write by TMA", self._last_write(index, late))
        for reader in range(self.order.warps):
            seen = self.order.unseen_reads(np.full(1, self.order.first + reader), self.read_by[reader][index], warps)
            self._race(seen, index, "write by TMA", "read")
        for other, epochs in self.read_beside.items():
            seen = self.order.unseen_reads(np.full(1, other), epochs[index], warps)
            self._race(seen, index, "write by TMA", "asynchronous read")
        self.writer[index] = column
        self.written[index] = epoch

    def end(self, rank: int) -> None:
        """CTA `rank` of the cluster ends: what the others' warps did to its memory has to be ordered before that."""
        order, here = self.order, slice(rank * self.each, (rank + 1) * self.each)
        own = slice(rank * order.warps_of_cta, (rank + 1) * order.warps_of_cta)
        seen = order.plain[own].max(0)
        writer, written = self.writer[here], self.written[here]
        for warp in np.delete(np.arange(order.warps), own).tolist():
            column = order.first + warp
            last = max(self.read_by[warp, here].max(), np.where(writer == column, written, 0).max())
            if last > seen[column]:
                cta = order.cta + warp // order.warps_of_cta
                raise Fault(f"CTA {order.cta + rank} ends, not ordered after what CTA {cta} does to its shared memory")
        self.ended[rank] = True

    def _whole(self, index: Array) -> None:
        missing = self.written[index] == 0
        if missing.any():
            raise Unwritten(f"{self._name(int(index[missing][0]))} is read, and nobody wrote it")

    def _race(self, late: Array, index: Array, what: str, against: str) -> None:
        if late.any():
            place = int(np.broadcast_to(index, late.shape)[late][0])
            raise Race(f"{self._name(place)}: this {what} is not ordered after the last {against}")

    def _last_write(self, index: Array, late: Array) -> str:
        by_warps = (self.writer[index][late] < self.order.beside).any()
        return "write (is a fence.proxy.async missing?)" if by_warps else "write by TMA or cp.async"

    def _name(self, index: int) -> str:
        rank, local = divmod(index, self.each)
        return f"shared address {local}" + (f" of CTA {self.order.cta + rank}" if self.ctas > 1 else "")
