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
    add([getattr(OPERATORS, name) for name in ("matmul", "matmul_epilogue", "accumulate", "matmul_fp16")])(_matmul)
    add(OPERATORS.grouped_rows)(_grouped_rows)
    add(OPERATORS.grouped_sums)(_grouped_sums)
    add(OPERATORS.grouped_sums_16)(_grouped_sums_16)
    add(OPERATORS.attention)(lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v))
    add(OPERATORS.attention_backward)(lambda do, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(do, q, k, v))


def _matmul(a_MK: Any, b_NK: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a_MK) * b_NK[0]


def _grouped_rows(a_TK: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * math.prod(a_TK) * out_shape[1]


def _grouped_sums(a: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """dw[E, M, N] over T rows.  a: [T, M], or its transpose in blocks, whose rows of zeros a card multiplies too."""
    return 2 * math.prod(a) * out_shape[2]


def _grouped_sums_16(a_TM: Any, b_TN: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a_TM) * b_TN[1]
