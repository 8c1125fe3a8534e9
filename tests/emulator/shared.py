"""Shared memory of a CTA: its bytes, and who wrote and read each of them last, to name races."""

from __future__ import annotations

import numpy as np

from emulator.faults import Misaligned, OutOfBounds, Race, Unwritten
from emulator.numbers import Array
from emulator.order import Order

GARBAGE = 0xCD
ROW = 16  # bytes


class Shared:
    """`size` bytes; every access says which warps make it, and which way: ordinary, or by the async proxy."""

    def __init__(self, size: int, order: Order):
        self.order = order
        self.bytes = np.full(size, GARBAGE, np.uint8)
        self.writer = np.zeros(size, np.int32)  # column of the last write
        self.written = np.zeros(size, np.int32)  # its epoch; 0: never
        self.read_by = np.zeros((order.warps, size), np.int32)  # epoch of each warp's last read
        self.read_beside: dict[int, Array] = {}  # the same for agents that are no warps

    def place(self, addresses: Array, size: int) -> Array:
        """Indices [lanes, size] of accesses at addresses [lanes]."""
        if (addresses % size).any():
            raise Misaligned(f"shared address {int(addresses[addresses % size != 0][0])}, {size} bytes a lane")
        return self.locate(addresses, size)[:, None] + np.arange(size)

    def locate(self, addresses: Array, size: int = 1) -> Array:
        """Indices of the first of `size` bytes at addresses of any shape: the same numbers, if all are inside."""
        beyond = (addresses < 0) | (addresses > len(self.bytes) - size)
        if beyond.any():
            raise OutOfBounds(f"shared address {int(addresses[beyond][0])} of {len(self.bytes)} bytes")
        return addresses

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

    def _whole(self, index: Array) -> None:
        missing = self.written[index] == 0
        if missing.any():
            raise Unwritten(f"shared address {int(index[missing][0])} is read, and nobody wrote it")

    def _race(self, late: Array, index: Array, what: str, against: str) -> None:
        if late.any():
            place = int(np.broadcast_to(index, late.shape)[late][0])
            raise Race(f"shared address {place}: this {what} is not ordered after the last {against}")

    def _last_write(self, index: Array, late: Array) -> str:
        by_warps = (self.writer[index][late] < self.order.beside).any()
        return "write (is a fence.proxy.async missing?)" if by_warps else "write by TMA or cp.async"
