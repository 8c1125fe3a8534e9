"""Forwards of one model in several threads at once, which switch as often as Python lets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

import torch


def mixed(call: Callable[[torch.Tensor], torch.Tensor], inputs: Sequence[torch.Tensor], calls: int) -> int:
    """How many of so many calls in each of the threads, one for each input, gave another result than the call alone."""
    with torch.no_grad():
        wanted = [call(x) for x in inputs]
    wrong = []

    def serve(i: int) -> None:
        with torch.no_grad():
            wrong.extend(i for _ in range(calls) if not torch.equal(call(inputs[i]), wanted[i]))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=serve, args=(i,)) for i in range(len(inputs))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    return len(wrong)
