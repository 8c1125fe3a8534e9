"""Checks of attention in FP8, forward and backward, against its twin.

The twin adds FP8 products in FP32; a Hopper's accumulator loses some 2^-11 of a score, so that one code of the softmax
in 2^8 is its neighbour, half of 2^-3 away: 2^-8.5 of the whole.  Backward multiplies in 16 bits and loses 2^-10.7 of a
gradient (tests/emulated/test_emulated_attention.py).  Each check returns what was wrong, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from fp8engine.ops.attention import attention, attention_backward
from fp8engine.ops.backends import backend
from fp8engine.ops.reference.attention import Form

FORWARD, BACKWARD = 2.0**-8, 2.0**-10  # of the whole
# batch, heads, heads of keys, queries, keys, head dim
SHAPES, MORE_SHAPES = ((1, 2, 1, 70, 70, 64),), ((2, 8, 2, 1000, 1024, 128), (1, 4, 4, 2048, 2048, 96))


def checks(where: torch.device, more: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """(name, check) of everything that can be checked there.  more: larger shapes as well, for a card."""
    for shape in SHAPES + (MORE_SHAPES if more else ()):
        yield f"attention {'x'.join(map(str, shape))}, forward and backward", partial(agrees, where, shape)


def agrees(where: torch.device, shape: tuple[int, ...]) -> str | None:
    """Causal, in FP16, rotated before the casts."""
    batch, heads, of_keys, t, s, d = shape
    q, k, v, do = (
        torch.randn(batch, rows, count, d, device=where).half().transpose(1, 2)
        for rows, count in ((t, heads), (s, of_keys), (s, of_keys), (t, heads))
    )
    form, found = Form(d**-0.5, True), []
    for name in ("triton", "reference"):
        with backend(name), torch.no_grad():
            found.append((attention(q, k, v, form), *attention_backward(do, q, k, v, form)))
    for part, ours, twins, limit in zip(("y", "dq", "dk", "dv"), *found, (FORWARD, *[BACKWARD] * 3), strict=True):
        error = float((ours.double() - twins.double()).norm() / twins.double().norm())
        if not error <= limit:
            return f"{part}: {error:.2e} of the whole apart, limit {limit:.2e}"
    return None
