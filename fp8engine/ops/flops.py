"""FLOPs of our operators for torch's FlopCounterMode, which counts 0 for an operator that it has no formula of.

A matmul of M x K by K x N is 2 M N K, of experts that of all rows, as torch counts its own.
"""

from __future__ import annotations

import math
from typing import Any

from fp8engine.ops.library import OPERATORS


def count_flops() -> None:
    """Give torch the formulas, once.  Its counter takes those that it finds when it is made."""
    from torch.utils import flop_counter  # imports Triton, for which a program that converts nothing need not wait

    if OPERATORS.matmul in flop_counter.flop_registry:
        return
    add = flop_counter.register_flop_formula
    into = "matmul", "matmul_epilogue", "matmul_fp16", "grouped_rows", "grouped_sums", "grouped_sums_16"
    add([getattr(OPERATORS, name) for name in into])(_of_result)
    add(OPERATORS.attention)(lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v))
    add(OPERATORS.attention_backward)(lambda do, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(do, q, k, v))


def _of_result(a: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Of a [M, K] and a result [M, N]; of experts that of all rows: a [T, K] and [T, N], or for dw [E, M, N] a [T, M].

    The latter may be the transpose in blocks, whose rows of zeros a card multiplies too.
    """
    return 2 * math.prod(a) * out_shape[-1]
