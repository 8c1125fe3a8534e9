"""Launches of attention to compile: the casts, forward and backward, with and without causality and windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fp8engine.kernels.attention import attention
from fp8engine.kernels.attention_backward import attention_backward
from fp8engine.kernels.attention_cast import attention_cast
from fp8engine.ops.reference.attention import Form

BATCH, HEADS, ROWS = 2, 16, 4096
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FORMS = {"full": Form(0.1), "causal": Form(0.1, True), "window": Form(0.1, True, 1024)}


def launches() -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Callable[[], Any]]]:
    """(name, architectures, which of its kernels have to move 16 bytes a thread, launch) of each form."""
    both, hopper = (90, 89), (90,)
    for d in (64, 96, 128):
        width = 64 if d == 64 else 128
        wide = () if d == 96 else ("_attention_cast_kernel",)
        x, turn = _heads(d, BF16).transpose(1, 2), _meta(width, width, dtype=BF16)
        yield f"attention_cast {d}", both, wide, partial(attention_cast, x, None, width)
        yield f"attention_cast {d} rotated", both, (), partial(attention_cast, x, turn, width)
        yield f"attention_cast {d} transposed", both, (), partial(attention_cast, x, None, width, True)
        q = _meta(BATCH, HEADS, ROWS, width, dtype=E4M3), _meta(BATCH, HEADS, ROWS // 64)
        v = q[0].transpose(2, 3), q[1]
        for name, form in FORMS.items():
            cards = both if name == "causal" else hopper
            run = partial(attention, q, q, v, form, 0.1, (ROWS, ROWS, d), BF16)
            yield f"attention {d} {name}", cards, (), run
            if name != "window":
                yield f"attention_backward {d} {name}", cards, (), partial(attention_backward, x, x, x, q, q, form, 0.1)


def _heads(d: int, dtype: torch.dtype) -> torch.Tensor:
    return _meta(BATCH, ROWS, HEADS, d, dtype=dtype)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
