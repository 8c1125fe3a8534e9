"""Registers of a CTA's warps, which setmaxnreg moves between them (PTX ISA, 9.7.19.5).

Each thread begins with what `.maxnreg` says.  `dec` gives registers to the CTA's pool, `inc` waits until the pool has
as many as it asks for.  A kernel that asks for more than its other warps ever leave hangs a card: here a deadlock.
"""

from __future__ import annotations

import numpy as np

from emulator.faults import Fault
from emulator.numbers import Array
from emulator.order import WARP

FILE = 65536  # registers of a multiprocessor, and the most that a CTA has
ALLOWED = range(24, 257, 8)  # what setmaxnreg takes


class RegisterPool:
    """What each warp's threads hold, and what is free.  most: the kernel's `.maxnreg`; 0: it has none."""

    def __init__(self, most: int, threads: int):
        if most * threads > FILE:
            raise Fault(f"{threads} threads of {most} registers: a multiprocessor has {FILE}, and launches no such CTA")
        self.held = np.full(threads // WARP, most)
        self.free = 0

    def give(self, warps: Array, count: int) -> None:
        """These warps keep `count` registers a thread."""
        self._check(count, bool((self.held[warps] < count).any()), "dec")
        self.free += WARP * int((self.held[warps] - count).sum())
        self.held[warps] = count

    def take(self, warps: Array, count: int) -> Array:
        """Those of the warps that have `count` registers a thread now; for the others there are too few."""
        self._check(count, bool((self.held[warps] > count).any()), "inc")
        served = []
        for warp in warps:
            needs = WARP * int(count - self.held[warp])
            if needs <= self.free:
                self.free -= needs
                self.held[warp] = count
                served.append(warp)
        return np.array(served, int)

    def serves(self, warps: Array, count: int) -> bool:
        """Whether one of the warps could have that many now."""
        return bool((WARP * (count - self.held[warps]) <= self.free).any())

    def _check(self, count: int, wrong: bool, action: str) -> None:
        if not self.held.all():
            raise Fault("setmaxnreg in a kernel without .maxnreg has no defined effect")
        if count not in ALLOWED:
            raise Fault(f"setmaxnreg takes multiples of 8 from 24 to 256, not {count}")
        if wrong:
            raise Fault(f"setmaxnreg.{action} to {count} registers, and a warp has {self.held.tolist()}")
