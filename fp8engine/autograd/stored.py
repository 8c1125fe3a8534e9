"""Matmul whose result is stored in FP8 before it reaches memory, under the scale that its slot predicted.

y[M, N] = X[M, K] @ W[N, K]^T + b      stored: saturate(RNE(y / scale)), from the FP32 sums; amax and counters beside
"""

from __future__ import annotations

from typing import Any

import torch

from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.stored_tensor import StoredTensor
from fp8engine.numerics.recipe import PerTensor, Recipe
from fp8engine.ops import matmul
from fp8engine.ops.reference import Epilogue
from fp8engine.scaling.table import OUTPUT


def multiply(
    numerics: Numerics, recipe: Recipe, operands: tuple[Any, Any, Any], out: torch.dtype, record: bool
) -> torch.Tensor:
    """The forward matmul of a layer whose recipe stores its result: a StoredTensor with values in `out`.

    operands: (a, b, bias), a and b in FP8, as recipes that store their result have in forward.  An ordinary tensor in
    `out` as long as no scale is known: the first step finds one.
    """
    a, b, bias_N = operands
    state, layer = numerics.state, numerics.layer
    precision = recipe.precision["forward"]
    scale, amax, counts = state.outputs.gather(layer, state.live_2S, len(a.data) * len(b.data), record)
    if record and numerics.samples_output:
        # The codes do not say what they lost.
        numerics.observe("output", matmul.matmul(a, b, bias_N, out, precision))
    if scale is None:
        return matmul.matmul_epilogue(a, b, Epilogue(bias_N, out, "none", None, amax, counts), precision)
    codes = matmul.matmul_epilogue(
        a, b, Epilogue(bias_N, recipe.stored.dtype if recipe.stored else out, "none", scale, amax, counts), precision
    )
    y = StoredTensor(codes, scale, PerTensor(), out)
    y.source = state.slot(state.column(layer, OUTPUT), record=False, count=False)
    return y
