"""Checks that every kernel is right on this device, without pytest: a bare checkout on a borrowed card can run them.

The same checks run in Triton's interpreter, on smaller shapes (tests/interpreted): what a card is given works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.checks import attention, casts, layers, matmuls


def checks(where: torch.device, more: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of everything that can be checked there; a check returns what was wrong, or None.

    more: larger shapes as well, for a card.
    """
    for kind in (matmuls, casts, layers, attention):
        yield from kind.checks(where, more)


def card_checks(where: torch.device) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of what only a CUDA device with FP8 Tensor Cores can show."""
    for kind in (layers, matmuls):
        yield from kind.card_checks(where)
