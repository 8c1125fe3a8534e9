"""Device memory of a launch: the allocations its arguments point into, and who wrote and read each byte last."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from emulator.faults import Misaligned, OutOfBounds, Race, Unwritten
from emulator.numbers import Array
from emulator.order import Order, Seen

# Who read a byte last: 1 + its column; NOBODY; several warps of CTA c: -(2 + c); SEVERAL_CTAS.
NOBODY, SEVERAL_CTAS = 0, -1
FILLED = 0xFF  # the byte that a new allocation is filled with: a NaN in every format


class Allocation:
    """Bytes [first, last) of memory.  fresh: which of them nobody has written since torch.empty, or None if known."""

    def __init__(self, first: int, last: int, fresh: Array | None = None):
        self.first, self.last, self.fresh = first, last, fresh
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first)).from_address(first))
        size = last - first
        # Zeros take no memory until they are touched: an allocation of gigabytes, of which little is used, is cheap.
        self.writer, self.written = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.atomic = np.zeros(size, bool)
        self.reader, self.read = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.readers: dict[int, int] = {}  # column: its last epoch of a read, anywhere in the allocation

    def note_read(self, index: Array, columns: Array, epochs: Array, warps_of_cta: int) -> None:
        """columns, epochs: of index's shape."""
        before = self.reader[index]
        cta = columns // warps_of_cta
        before_cta = np.where(before > NOBODY, (before - 1) // warps_of_cta, -2 - before)
        same = (before == NOBODY) | (before == 1 + columns)
        together = (before != SEVERAL_CTAS) & (before_cta == cta)
        now = np.where(same, 1 + columns, np.where(together, -2 - cta, SEVERAL_CTAS))
        self.reader[index] = now
        clash = self.reader[index] != now  # other warps read the same bytes in this instruction
        if clash.any():
            several = (now == SEVERAL_CTAS) | (self.reader[index] == SEVERAL_CTAS)
            self.reader[index[clash]] = np.where(several, SEVERAL_CTAS, -2 - cta)[clash]
        self.read[index] = epochs
        for column in np.unique(columns):
            self.readers[int(column)] = max(self.readers.get(int(column), 0), int(epochs[columns == column].max()))


class DeviceMemory:
    """Allocations, sorted; a fault names an access that lies in none of them, or that races with another."""

    def __init__(self, allocations: Iterable[Allocation], warps_of_cta: int):
        self.allocations = sorted(allocations, key=lambda allocation: allocation.first)
        self.starts = np.array([allocation.first for allocation in self.allocations], np.int64)
        self.warps = warps_of_cta
        self.released: dict[int, Seen] = {}  # address of an atomic: what those had seen who came to it
        self.came: dict[int, dict[int, int]] = {}  # address of an atomic: who came to it (columns), and when last

    def find(self, addresses: Array, size: int) -> tuple[Allocation, Array]:
        """The allocation of all these accesses of `size` bytes, and their indices [lanes, size] in it."""
        if (addresses % size).any():
            raise Misaligned(f"address {int(addresses[addresses % size != 0][0]):#x}, {size} bytes a lane")
        number = int(np.searchsorted(self.starts, int(addresses[0]), side="right")) - 1
        allocation = self.allocations[max(number, 0)] if self.allocations else None
        low, high = int(addresses.min()), int(addresses.max()) + size
        if allocation is None or low < allocation.first or high > allocation.last:
            beyond = low - allocation.first if allocation and low < allocation.first else 0
            beyond = high - allocation.last if allocation and high > allocation.last else beyond
            raise OutOfBounds(f"address {low if beyond < 0 else high - size:#x}, {beyond} bytes beyond its allocation")
        return allocation, (addresses - allocation.first)[:, None] + np.arange(size)

    def load(self, addresses: Array, size: int, warps: Array, order: Order) -> Array:
        """Bytes [lanes, size], read by the lanes' warps [lanes]."""
        allocation, index = self.find(addresses, size)
        self._check_fresh(allocation, index)
        self._against_write(allocation, index, warps, order, atomic=False, what="read")
        columns = np.broadcast_to(order.first + warps[:, None], index.shape)
        allocation.note_read(index, columns, np.broadcast_to(order.epoch(warps)[:, None], index.shape), self.warps)
        return allocation.bytes[index]

    def store(self, addresses: Array, data: Array, warps: Array, order: Order) -> None:
        """Bytes [lanes, size], written by the lanes' warps."""
        allocation, index = self.find(addresses, data.shape[1])
        self.note_store(allocation, index, warps, order)
        allocation.bytes[index] = data
        if (allocation.bytes[index] != data).any():
            raise Race("two lanes write different values to one address in one instruction")

    def note_store(
        self, allocation: Allocation, index: Array, warps: Array, order: Order, atomic: bool = False
    ) -> None:
        """Judge and record a write of index [lanes, size]."""
        self._against_write(allocation, index, warps, order, atomic, "write")
        self._against_reads(allocation, index, warps, order)
        allocation.writer[index] = order.first + warps[:, None]
        allocation.written[index] = order.epoch(warps)[:, None]
        allocation.atomic[index] = atomic
        if allocation.fresh is not None:
            allocation.fresh[index] = False

    def atomic(self, address: int, size: int, warp: int, order: Order, ordered: bool) -> tuple[Allocation, Array]:
        """Judge and record an atomic operation; ordered: acquire and release.  Its allocation and index [1, size]."""
        allocation, index = self.find(np.array([address]), size)
        warps = np.array([warp])
        self.came.setdefault(address, {})[order.first + warp] = int(order.epoch(warps)[0])
        if ordered:
            if address in self.released:
                order.acquire(warps, self._beyond(self.released[address], order))
            seen = order.release(warps)
            if address in self.released:
                seen.add(self._beyond(self.released[address], order))
            self.released[address] = seen
        self._check_fresh(allocation, index)
        self.note_store(allocation, index, warps, order, atomic=True)
        return allocation, index

    def judge_atomic_read(self, address: int, warp: int, order: Order) -> None:
        """Raise Race where an atomic operation is there to read what others wrote, and is not ordered after one.

        Those that add or compare may come in any order.
        """
        own = order.first + warp
        for column, epoch in self.came[address].items():
            if column != own and epoch > order.plain[warp, column]:
                raise Race(
                    f"an atomic of CTA {own // self.warps} reads what CTA {column // self.warps} has written, "
                    "and is not ordered after it"
                )

    @staticmethod
    def _beyond(seen: Seen, order: Order) -> Seen:
        """The same without what is another CTA's own."""
        copy = Seen(order.columns)
        copy.plain[: order.beside], copy.proxy[: order.beside] = seen.plain[: order.beside], seen.proxy[: order.beside]
        return copy

    def _check_fresh(self, allocation: Allocation, index: Array) -> None:
        if allocation.fresh is None:
            return
        missing = (allocation.fresh[index] & (allocation.bytes[index] == FILLED)).all(-1)
        if missing.any():
            where = int(index[missing][0].flat[0])
            raise Unwritten(f"{where} bytes into an allocation of {len(allocation.bytes)}: read, and nobody wrote it")

    def _against_write(self, allocation, index: Array, warps: Array, order: Order, atomic: bool, what: str) -> None:
        late = order.unseen(allocation.writer[index], allocation.written[index], warps)
        if atomic:
            late &= ~allocation.atomic[index]
        if late.any():
            raise Race(self._text(allocation, index, late, (what, "write"), order.first + warps))

    def _against_reads(self, allocation: Allocation, index: Array, warps: Array, order: Order) -> None:
        reader = allocation.reader[index]
        one = reader > NOBODY
        late = one & order.unseen(np.where(one, reader - 1, 0), np.where(one, allocation.read[index], 0), warps)
        several = reader <= SEVERAL_CTAS
        if several.any():
            for state in np.unique(reader[several]):
                low, high = (-2 - state) * self.warps, (-1 - state) * self.warps
                for column, epoch in allocation.readers.items():
                    if state == SEVERAL_CTAS or low <= column < high:
                        late |= (reader == state) & (epoch > order.plain[warps, column])[:, None]
        if late.any():
            raise Race(self._text(allocation, index, late, ("write", "read"), order.first + warps))

    def _text(self, allocation: Allocation, index: Array, late: Array, kinds: tuple[str, str], columns: Array) -> str:
        place, column, (what, against) = int(index[late][0]), int(columns[late.any(1)][0]), kinds
        agent = int(allocation.writer[place] if against == "write" else allocation.reader[place] - 1)
        other = f"CTA {agent // self.warps}, warp {agent % self.warps}" if agent >= 0 else "several warps"
        return (
            f"{place} bytes into an allocation of {len(allocation.bytes)}: this {what} by CTA "
            f"{column // self.warps} is not ordered after the last {against}, by {other}"
        )
