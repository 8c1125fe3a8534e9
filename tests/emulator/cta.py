"""A CTA: its registers, shared memory, and what is under way beside its warps.

Copies by TMA are finished at once where the schedule has no seed, and else at a time of the scheduler's choice.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from emulator.barriers import MBarriers, Named
from emulator.faults import Fault
from emulator.numbers import UNSIGNED, Array
from emulator.order import WARP, WARPGROUP, Order
from emulator.register_pool import RegisterPool
from emulator.registers import POISON, Mask
from emulator.shared import Shared
from emulator.tma import Load, Store

if TYPE_CHECKING:
    from emulator.launch import Launch


class Cta:
    """One CTA of a launch, the grid's `number`: what instructions act on."""

    def __init__(self, launch: Launch, number: int, seed: int | None):
        self.launch, self.number = launch, number
        self.memory, self.threads = launch.memory, launch.program.threads
        self.order = Order(number, launch.ctas, self.threads // WARP)
        self.shared = Shared(max(launch.shared, 16), self.order)
        self.mbarriers = MBarriers(self.shared, self.order)
        self.registers: dict[str, Array] = {}
        self.pool = RegisterPool(launch.program.registers, self.threads)
        self.special = self._special()
        self.in_flight: dict[str, Array] = {}  # registers of unfinished wgmmas: their lanes
        self.products: list[list[list]] = [[[]] for _ in range(max(self.threads // WARPGROUP, 1))]
        self.fragments: dict[str, Array] = {}  # of registers that wgmma uses: when each warpgroup last wrote them
        self.fenced = np.zeros(len(self.products), np.int64)  # when each warpgroup last executed wgmma.fence
        self.writes = 0
        self.active = np.ones(self.threads, bool)
        self._using_sums = False
        self.under_way: list[Load | Store] = []
        self.stores: dict[int, list[list[Store]]] = {}  # of each warp: committed groups, then the open one
        self.copies: dict[int, list[tuple[int, int]]] = {}  # of each warp: (column, epoch) of its cp.async groups
        self.named: dict[int, Named] = {}
        self.random = None if seed is None else random.Random(1_000_003 * seed + number)

    def _special(self) -> dict[str, Array]:
        thread = np.arange(self.threads)
        x, y, z = self.launch.grid
        values = {
            "tid": (thread, 0, 0),
            "ntid": (self.threads, 1, 1),
            "ctaid": (self.number % x, self.number // x % y, self.number // (x * y)),
            "nctaid": (x, y, z),
        }
        found = {"%laneid": thread % WARP, "%warpid": thread // WARP}
        for name, of in values.items():
            found |= {f"%{name}.{axis}": np.atleast_1d(value) for axis, value in zip("xyz", of, strict=True)}
        return found

    # Registers.

    def register(self, name: str, size: int) -> Array:
        """A register's value in every lane."""
        if self.in_flight:
            self.check_settled(name)
        value = self.registers.get(name)
        if value is None:
            poison = np.full(self.threads, POISON & (1 << 8 * size) - 1)
            value = self.registers[name] = poison.astype(np.bool_ if size == 1 else UNSIGNED[size])
        return value

    def check_settled(self, name: str) -> None:
        """Raise Fault where a wgmma that was not waited for still works on that register."""
        if name in self.in_flight and not self._using_sums and (self.in_flight[name] & self.active).any():
            raise Fault(f"{name} is used before the wgmma that works on it was waited for")

    @contextlib.contextmanager
    def using_sums(self) -> Iterator[None]:
        """Within the block a wgmma uses its own accumulators, of which an earlier one may be unfinished."""
        self._using_sums = True
        yield
        self._using_sums = False

    def note_fragment(self, name: str, mask: Mask) -> None:
        """A register that wgmma uses is written: by wgmma itself, or by another instruction, which asks for a fence."""
        if not self._using_sums and self.threads >= WARPGROUP:
            self.writes += 1
            when = self.fragments.setdefault(name, np.zeros(len(self.products), np.int64))
            when[mask.lanes.reshape(-1, WARPGROUP).any(1)] = self.writes

    def fence_fragments(self, groups: list[int]) -> None:
        """wgmma.fence by these warpgroups."""
        self.fenced[groups] = self.writes

    def check_fenced(self, names: list[str], group: int) -> None:
        """Raise Fault where a register that a wgmma is about to use was written after the last wgmma.fence."""
        for name in names:
            if name in self.fragments and self.fragments[name][group] > self.fenced[group]:
                raise Fault(f"{name} was written since the last wgmma.fence, and this wgmma uses it")

    def unsettle(self, names: list[str], group: int) -> None:
        """These registers of a warpgroup belong to a wgmma."""
        for name in names:
            lanes = self.in_flight.setdefault(name, np.zeros(self.threads, bool))
            lanes[WARPGROUP * group : WARPGROUP * (group + 1)] = True

    def settle(self, name: str, group: int) -> None:
        """That register is the warpgroup's again, unless a later wgmma has it too."""
        lanes = self.in_flight.get(name)
        if lanes is None or any(name in names for later in self.products[group] for names, *_ in later):
            return
        lanes[WARPGROUP * group : WARPGROUP * (group + 1)] = False
        if not lanes.any():
            del self.in_flight[name]

    # What is under way.

    def start(self, copy: Load | Store) -> None:
        """A copy by TMA begins; without a seed it is done at once."""
        if isinstance(copy, Store):
            self.stores.setdefault(copy.warp, [[]])[-1].append(copy)
        self.under_way.append(copy)
        if self.random is None:
            self.finish(copy)

    def finish(self, copy: Load | Store) -> None:
        """The copy is done."""
        self.under_way.remove(copy)
        copy.finish(self)

    def commit_stores(self, warps: Array) -> None:
        """cp.async.bulk.commit_group.  (Of a warp here; the PTX ISA keeps groups by thread, and one thread stores.)"""
        for warp in np.unique(warps).tolist():
            self.stores.setdefault(warp, [[]]).append([])

    def wait_stores(self, warps: Array, pending: int) -> None:
        """Until at most so many of a warp's committed groups have not read their shared memory."""
        for warp in warps.tolist():
            queue = self.stores.setdefault(warp, [[]])
            while len(queue) - 1 > pending:
                for copy in queue.pop(0):
                    if copy in self.under_way:
                        self.finish(copy)
                    self.order.finished(np.array([warp]), self.order.agent("TMA store", warp), copy.epoch)

    def copy(self, index: Array, data: Array, warps: Array) -> None:
        """cp.async: the bytes are there when their group has been waited for."""
        for warp in np.unique(warps).tolist():
            column, epoch = self.order.begin("cp.async", warp)
            own = index[warps == warp]
            self.shared.write(own, data[warps == warp], np.full(len(own), warp))
            self.shared.writer[own], self.shared.written[own] = column, epoch

    def commit_copies(self, warps: Array) -> None:
        """cp.async.commit_group."""
        for warp in warps.tolist():
            column = self.order.agent("cp.async", warp)
            self.copies.setdefault(warp, []).append((column, int(self.order.epochs[column])))

    def wait_copies(self, warps: Array, pending: int) -> None:
        """cp.async.wait_group."""
        for warp in warps.tolist():
            queue = self.copies.setdefault(warp, [])
            while len(queue) > pending:
                self.order.finished(np.array([warp]), *queue.pop(0))

    def end(self) -> None:
        """All threads have ended, and shared memory goes: no copy may still read or write it."""
        own = self.order.plain.max(0)
        for (kind, *name), column in self.order.names.items():
            if kind in ("TMA load", "TMA store") and own[column] < self.order.epochs[column]:
                raise Fault(f"the CTA ended, and no thread had waited for its last {kind} ({name[0]})")
