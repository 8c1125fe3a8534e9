"""TMA: tensor maps as the driver encodes them, boxes in swizzled shared memory, and copies that take their time.

    swizzle 32, 64, 128 bytes    bits [4, 5), [4, 6), [4, 7) of a shared address are xored with bits [7, 8), [7, 9),
                                 [7, 10) (PTX ISA, 5.5.6): rows of a span are turned by their number inside of 8 rows
    outside of the tensor        a load delivers zeros there and counts their bytes; a store leaves them out

Rules: CUDA driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emulator.faults import TensorMapError
from emulator.numbers import Array
from emulator.order import WARP

if TYPE_CHECKING:
    from emulator.cta import Cta

SPANS = {0: 16, 1: 32, 2: 64, 3: 128}  # bytes of a row that one turn covers, by Triton's number of the swizzle
ALIGNED = 16  # bytes: address, strides, and rows of a box
MOST_ELEMENTS, MOST_SIZE, MOST_STRIDE = 256, 1 << 32, 1 << 40
BOX_ALIGNED = 128


def swizzled(addresses: Array, span: int) -> Array:
    """Where the bytes at these linear shared addresses really lie."""
    return addresses if span == SPANS[0] else addresses ^ ((addresses >> 7 & span // ALIGNED - 1) << 4)


@dataclass(frozen=True)
class TensorMap:
    """A matrix in device memory and the box that one copy moves.  strides and shape: elements; swizzle: as SPANS."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    itemsize: int
    swizzle: int

    def __post_init__(self):
        inner = self.box[-1] * self.itemsize
        rules = {
            "two dimensions": len(self.shape) == len(self.box) == len(self.strides) == 2,
            f"an address of {ALIGNED}-byte multiples": self.address % ALIGNED == 0,
            f"boxes of at most {MOST_ELEMENTS} elements a dimension": max(self.box) <= MOST_ELEMENTS,
            f"rows of a box in multiples of {ALIGNED} bytes": inner % ALIGNED == 0,
            "rows of a box within the swizzle's span": self.swizzle == 0 or inner <= SPANS[self.swizzle],
            f"strides in multiples of {ALIGNED} bytes": self.strides[0] * self.itemsize % ALIGNED == 0,
            "a stride below 2^40 bytes": self.strides[0] * self.itemsize < MOST_STRIDE,
            "contiguous rows": self.strides[-1] == 1,
            "sizes from 1 to 2^32": all(0 < size <= MOST_SIZE for size in self.shape),
        }
        broken = [name for name, kept in rules.items() if not kept]
        if broken:
            raise TensorMapError(f"a tensor map needs {', '.join(broken)}: {self}")

    @property
    def span(self) -> int:
        """Bytes of a row that are turned together."""
        return SPANS[self.swizzle]

    def place(self, corner: tuple[int, int], base: int) -> tuple[Array, Array, Array]:
        """Of a box with that first (column, row): shared addresses, device addresses, whether inside; [rows, bytes]."""
        repeat = 8 * self.span if self.swizzle else BOX_ALIGNED
        if base % max(BOX_ALIGNED, repeat):
            raise TensorMapError(f"a box at shared address {base}: with this swizzle it needs multiples of {repeat}")
        rows, row_bytes = self.box[0], self.box[1] * self.itemsize
        row, byte = np.arange(rows)[:, None], np.arange(row_bytes)[None, :]
        inside_rows = (corner[1] + row >= 0) & (corner[1] + row < self.shape[0])
        column = corner[0] * self.itemsize + byte
        inside = inside_rows & (column >= 0) & (column < self.shape[1] * self.itemsize)
        device = self.address + (corner[1] + row) * self.strides[0] * self.itemsize + column
        return swizzled(base + row * row_bytes + byte, self.span), device, inside


@dataclass(eq=False)
class Load:
    """A copy from device to shared memory that is under way."""

    box: tuple[Array, Array, Array]
    barrier: int
    column: int
    epoch: int

    def finish(self, cta: Cta) -> None:
        """Deliver the bytes, and tell the mbarrier."""
        target, source, inside = self.box
        data = np.zeros(target.shape, np.uint8)
        if inside.any():
            allocation, index = cta.memory.find(source[inside], 1)
            data[inside] = allocation.bytes[index[:, 0]]
        cta.shared.bytes[target] = data
        cta.mbarriers.known[self.barrier].deliver(target.size, self.column, self.epoch)


@dataclass(eq=False)
class Store:
    """A copy from shared to device memory that is under way."""

    box: tuple[Array, Array, Array]
    warp: int
    epoch: int

    def finish(self, cta: Cta) -> None:
        """Write the bytes."""
        source, target, inside = self.box
        if inside.any():
            allocation, index = cta.memory.find(target[inside], 1)
            allocation.bytes[index[:, 0]] = cta.shared.bytes[source[inside]]


def begin_load(cta: Cta, lane: int, tensor_map: TensorMap, corner: tuple[int, int], base: int, barrier: int) -> None:
    """cp.async.bulk.tensor from device memory to shared memory."""
    warp = np.array([lane // WARP])
    cta.mbarriers.for_tma(barrier, lane // WARP)
    linear, source, inside = tensor_map.place(corner, base)
    target = cta.shared.locate(linear)
    column, epoch = cta.order.begin("TMA load", barrier)
    cta.shared.write_by_proxy(target, warp, column, epoch)
    if inside.any():
        cta.memory.load(source[inside], 1, np.broadcast_to(warp, int(inside.sum())), cta.order)
    cta.start(Load((target, source, inside), barrier, column, epoch))


def begin_store(cta: Cta, lane: int, tensor_map: TensorMap, corner: tuple[int, int], base: int) -> None:
    """cp.async.bulk.tensor from shared to device memory."""
    warp = np.array([lane // WARP])
    linear, target, inside = tensor_map.place(corner, base)
    source = cta.shared.locate(linear)
    column, epoch = cta.order.begin("TMA store", int(warp[0]))
    cta.shared.read_by_proxy(source, warp, column, epoch)
    if inside.any():
        allocation, index = cta.memory.find(target[inside], 1)
        cta.memory.note_store(allocation, index, np.broadcast_to(warp, len(index)), cta.order)
    cta.start(Store((source, target, inside), int(warp[0]), epoch))
