"""A launch: every CTA of a grid, one after the other, on the allocations that its arguments point into."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.cta import Cta
from emulator.device_memory import Allocation, DeviceMemory
from emulator.faults import OutOfBounds
from emulator.order import WARP
from emulator.reader import Program
from emulator.scheduler import Scheduler, Step
from emulator.tma import TensorMap

MAPS = 1 << 28  # tensor maps lie at addresses of their own, from here on; of 32 bits, as Triton 3.9 takes them
MAP_BYTES = 128


@dataclass
class Done:
    """What a launch did, for the counts in a report.  program: tells one compiled program from another."""

    kernel: str
    program: int
    ctas: int
    instructions: int


class Launch:
    """A program with its arguments, a grid and its memory.  seed: of the schedule; None is the simplest one."""

    def __init__(
        self,
        program: Program,
        steps: list[Step],
        arguments: list[Any],
        grid: tuple[int, int, int],
        shared: int,
        allocations: Iterable[Allocation],
    ):
        self.program, self.steps, self.arguments, self.grid, self.shared = program, steps, arguments, grid, shared
        self.maps = {place: value for place, value in enumerate(arguments) if isinstance(value, TensorMap)}
        self.ctas = int(np.prod(grid))
        self.memory = DeviceMemory(allocations, program.threads // WARP)

    def run(self, seed: int | None = None) -> Done:
        """Execute it.  Raises a Fault at the first thing that is wrong."""
        order = list(range(self.ctas))
        if seed is not None:
            random.Random(seed).shuffle(order)
        executed = 0
        with np.errstate(all="ignore"):
            for number in order:
                scheduler = Scheduler(Cta(self, number, seed), self.steps)
                scheduler.run()
                executed += scheduler.executed
        return Done(self.program.name, self.program.key, self.ctas, executed)

    @staticmethod
    def map_address(place: int) -> int:
        """The address of the tensor map that is argument number `place`."""
        return MAPS + place * MAP_BYTES

    def map_at(self, address: int) -> TensorMap:
        """The tensor map at an address."""
        place, beside = divmod(address - MAPS, MAP_BYTES)
        if beside or place not in self.maps:
            raise OutOfBounds(f"no tensor map lies at {address:#x}")
        return self.maps[place]
