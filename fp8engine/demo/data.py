"""Real text as bytes: the topics of Python's own manual (in every CPython), or a file; 90 % to train on, 10 % to judge.

Batch number i of a seed is a function of (seed, i) alone.  Every recipe therefore sees the same bytes in the same
order, and a resumed run needs no random state to go on where it stopped.
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

from fp8engine.demo.config import DemoError

VALIDATION_WINDOWS = 256


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


def read(path: str | None, context: int) -> Text:
    """The text at `path`, or Python's manual; at least ten windows of `context` bytes.

    Raises DemoError for a file that is not there, cannot be read or is too short.

    >>> text = read(None, 128)
    >>> len(text.train) > 100_000, round(len(text.train) / len(text.validation))
    (True, 9)
    """
    raw = _manual() if path is None else _file(path)
    if len(raw) < 10 * (context + 2):
        name = path or "Python's manual"
        raise DemoError(f"{name} has {len(raw)} bytes; a context of {context} needs at least {10 * (context + 2)}")
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    cut = len(ids) * 9 // 10
    return Text(ids[:cut], ids[cut:], hashlib.sha256(raw).hexdigest()[:16])


def _manual() -> bytes:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DemoError("this Python has no pydoc_data.topics; give a text with --text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read --text {path}: {error.strerror}") from error
