"""What one training run is: a small frozen value.  Two runs with equal configurations and seeds see the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8engine.demo.model import Size, size_named
from fp8engine.errors import Fp8EngineError


class DemoError(Fp8EngineError, ValueError):
    """A run that cannot be made as asked: no such text, no such device, a folder that cannot be written."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How to train; what to train in (the recipe) and the seed are given beside it.

    size: a name from SIZES.  steps, batch: optimizer steps, and sequences in each.  lr: AdamW's rate at its peak;
    None for the size's own.
    text: a file, or None for the topics of Python's own manual.  device: as torch names them.
    Raises UnknownName for a size, DemoError for a number out of range or a device that is not there.

    >>> Config(steps=100).lr_at(0) < Config(steps=100).lr_at(20) > Config(steps=100).lr_at(99)
    True
    """

    size: str = "small"
    steps: int = 400
    batch: int = 8
    lr: float | None = None
    text: str | None = None
    device: str = "cpu"

    def __post_init__(self):
        size_named(self.size)
        for key in ("steps", "batch"):
            if getattr(self, key) < 1:
                raise DemoError(f"{key}={getattr(self, key)}: a run has at least one")
        if not 0 < self.peak < math.inf:
            raise DemoError(f"lr={self.lr}: a learning rate is a positive number")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
            reason = str(error).splitlines()[0]
            raise DemoError(f"device {self.device!r} cannot be used here: {reason}") from error

    @property
    def shape(self) -> Size:
        """The model's dimensions."""
        return size_named(self.size)

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in one step."""
        return self.batch * self.shape.context

    @property
    def peak(self) -> float:
        """The highest learning rate of the run."""
        return self.shape.lr if self.lr is None else self.lr

    def lr_at(self, step: int) -> float:
        """Warm-up over the first twentieth of the steps, then a cosine down to a twentieth of the peak."""
        warm = min(1.0, (step + 1) / max(self.steps // 20, 1))
        return self.peak * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * step / self.steps)) / 2)
