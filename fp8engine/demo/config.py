"""A run's configuration, and the text that it learns.

Two runs with equal configurations and seeds see the same bytes: batch number i of a seed is a function of (seed, i)
alone.  Every recipe therefore sees the same bytes in the same order, and a resumed run needs no random state to go on
where it stopped.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8engine.demo.model import Size, size_named
from fp8engine.errors import Fp8EngineError

VALIDATION_WINDOWS = 256


class DemoError(Fp8EngineError, ValueError):
    """A run that cannot be made as asked: no such text, no such device, a folder that cannot be written."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How to train; the recipe and the seed are given beside it.

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
            if not 1 <= getattr(self, key) < 2**31:
                raise DemoError(f"{key}={getattr(self, key)}: want 1 to 2^31 - 1")
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


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to judge by; digest tells one text from another."""

    train: torch.Tensor
    validation: torch.Tensor
    digest: str

    def batch(self, seed: int, step: int, batch: int, context: int) -> torch.Tensor:
        """[batch, context + 1] byte values: windows at random places of the training part."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (batch, 1), generator=generator)
        return self.train[starts + torch.arange(context + 1)].long()

    def windows(self, context: int) -> Iterator[torch.Tensor]:
        """Batches [<= 32, context + 1] of evenly spaced windows of the validation part, always the same."""
        last = len(self.validation) - context - 1
        starts = torch.linspace(0, last, min(VALIDATION_WINDOWS, last + 1)).long().unsqueeze(1)
        for some in starts.split(32):
            yield self.validation[some + torch.arange(context + 1)].long()

    def entropy_of_pairs(self) -> float:
        """Nats a byte that a table of byte pairs (add-1/10 smoothed) would reach on the validation part.

        A model below it has learned more than which byte follows which.
        """
        train, judged = bytes(self.train.tolist()), bytes(self.validation.tolist())
        pairs = Counter(itertools.pairwise(train))
        firsts = Counter(train[:-1])
        nats = [math.log((firsts[a] + 25.6) / (pairs[a, b] + 0.1)) for a, b in itertools.pairwise(judged)]
        return sum(nats) / len(nats)


def check_seed(seed: int) -> None:
    """Raise DemoError for a seed of which torch makes no generator for every step (`Text.batch`).

    >>> check_seed(0)
    """
    if abs(seed) > 2**40:
        raise DemoError(f"seed={seed}: a seed is a whole number from -2^40 to 2^40")


def read(path: str | None, context: int) -> Text:
    """The text at `path`, or Python's manual; at least ten windows of `context` bytes.

    Raises DemoError for a file that is not there, cannot be read or is too short.

    >>> text = read(None, 128)
    >>> len(text.train) > 100_000, round(len(text.train) / len(text.validation))
    (True, 9)
    """
    try:
        raw = manual() if path is None else Path(path).read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read --text {path}: {error.strerror}") from error
    if len(raw) < 10 * (context + 2):
        name = path or "Python's manual"
        raise DemoError(f"{name} has {len(raw)} bytes; a context of {context} needs at least {10 * (context + 2)}")
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], hashlib.sha256(raw).hexdigest()[:16])


def manual() -> bytes:
    """The topics of Python's own manual.  Raises DemoError where this Python has none."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DemoError("this Python has no pydoc_data.topics; give a text with --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
