"""What a machine can do at most, measured.  What FP8 saves on it, from a model: fp8engine/numerics/cost.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8engine.bench.timing import Clock, measure
from fp8engine.ops.device import capability

SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matmul that gives the rate
COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}  # bytes copied: more than any cache holds
TURNS = {"cuda": 20, "cpu": 5}


class Limits(NamedTuple):
    """What a machine reaches, per second.  flops: of a 16-bit matmul.  bytes: read and written by a copy."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte at which both limits meet."""
        return self.flops / self.bytes


def half(where: torch.device) -> torch.dtype:
    """The 16-bit format that the device multiplies fast: FP16 on a card before sm_80, else BF16."""
    return torch.float16 if where.type == "cuda" and capability(where) < (8, 0) else torch.bfloat16


def limits(where: torch.device, clock: Clock, side: int | None = None, copied: int | None = None) -> Limits:
    """Measure them, in one run.  side: of the square matmul.  copied: bytes of the copy's source."""
    n, size = side or SIDE[where.type], copied or COPIED[where.type]
    # Two sets, so that no call finds its operands where the call before left them.
    sets = [[torch.randn(n, n, device=where).to(half(where)) for _ in range(2)] for _ in range(2)]
    source = torch.ones(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    times = measure(
        {
            "matmul": lambda turn: sets[turn % 2][0] @ sets[turn % 2][1].t(),
            "copy": lambda turn: target.copy_(source),
        },
        clock,
        TURNS[where.type],
    )
    return Limits(2 * n**3 / times["matmul"].median, 2 * size / times["copy"].median)
