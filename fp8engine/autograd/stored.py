"""A layer's result in FP8 before it reaches memory: under the scale that its slot predicted, amax and counts beside.

y[M, N] = X[M, K] @ W[N, K]^T + b      stored: saturate(RNE(y / scale)), from the FP32 sums
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp8engine.autograd.stored_tensor import StoredTensor
from fp8engine.numerics.recipe import PerTensor
from fp8engine.ops import matmul
from fp8engine.ops.reference import Epilogue
from fp8engine.scaling.table import OUTPUT

if TYPE_CHECKING:
    from fp8engine.autograd.call import Call


def multiply(call: Call, a: Any, b: Any, bias_N: torch.Tensor | None, out: torch.dtype) -> torch.Tensor:
    """The forward of a Call whose recipe stores its result: a StoredTensor with values in `out`.

    a, b: Operands, as recipes that store their result have in forward.  An ordinary tensor in `out` as long as no scale
    is known: the first step finds one.
    """
    numerics, plan = call.numerics, call.plan
    state, layer = numerics.state, numerics.layer
    precision = "exact" if plan.exact else plan.precision["forward"]
    scale, amax, counts = state.outputs.gather(layer, state.live_2S, len(a.data) * len(b.data), call.record)
    if call.record and numerics.looks_at_output:
        numerics.observe("output", matmul.matmul(a, b, bias_N, out, precision))  # the codes do not tell what they lost
    if scale is None:
        return matmul.matmul_epilogue(a, b, Epilogue(bias_N, out, "none", None, amax, counts), precision)
    codes = matmul.matmul_epilogue(a, b, Epilogue(bias_N, plan.stored or out, "none", scale, amax, counts), precision)
    y = StoredTensor(codes, scale, PerTensor(), out)
    y.source = state.slot(state.column(layer, OUTPUT), record=False, count=False)
    return y
