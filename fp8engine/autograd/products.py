"""One matmul of a call: its result in 16 or 32 bits, or stored in FP8 before it reaches memory.

    y[M, N] = A[M, K] @ B[N, K]^T + b      stored: saturate(RNE(y / scale)) from the FP32 sums, under the scale that
                                           the result's slot predicted; its amax and its counters beside

Which one a layer's forward runs is decided when it is given its recipe (`Numerics.result`).
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine.autograd.stored_tensor import StoredTensor
from fp8engine.numerics.cast import PerTensor
from fp8engine.ops import matmul
from fp8engine.ops.reference import Epilogue, Operand
from fp8engine.scaling.table import OUTPUT, SLOTS


def product(use: Any, a: Any, b: Any, bias_N, out: torch.dtype, which: str) -> torch.Tensor:
    """A @ B^T + b in `out`, in FP8 where the operands are.  use: operands.py's Use.  which: a key of `precision`."""
    if isinstance(a, Operand):
        return use.where.products.matmul(a, b, bias_N, out, use.recipe.precision[which])
    y_MN = matmul.matmul_fp16(a, b.to(a.dtype)).to(out)
    return y_MN if bias_N is None else y_MN + bias_N.to(out)


def in_16_bits(use: Any, a: Any, b: Any, bias_N, out: torch.dtype) -> torch.Tensor:
    """The result of a layer's forward, in `out`."""
    y_MN = product(use, a, b, bias_N, out, "forward")
    if use.sampled:
        use.numerics.observe(OUTPUT, y_MN)
    return y_MN


def in_fp8(use: Any, a: Any, b: Any, bias_N, out: torch.dtype) -> torch.Tensor:
    """The result as a StoredTensor with values in `out`; in a graph, and until a scale is known, as `in_16_bits`.

    a, b: in FP8, as recipes that store their result have them in forward.  The first step finds a scale.
    """
    if use.where.compiling:
        return in_16_bits(use, a, b, bias_N, out)
    state, layer, precision = use.numerics.state, use.numerics.layer, use.recipe.precision["forward"]
    scale, amax, counts = state.outputs.gather(layer, state.live_2S, len(a.data) * len(b.data), use.record, use.count)
    if use.sampled:
        use.numerics.observe(OUTPUT, matmul.matmul(a, b, bias_N, out, precision))  # the codes do not say what they lost
    form = Epilogue(bias_N, out if scale is None else use.recipe.stored.dtype, "none", scale, amax, counts)
    y_MN = matmul.matmul_epilogue(a, b, form, precision)
    if scale is None:
        return y_MN
    y = StoredTensor(y_MN, scale, PerTensor(), out)
    y.source = use.slots[SLOTS.index(OUTPUT), False, False]
    return y
