"""What an operand of a matmul stands for: codes times scales, in float64."""

import torch

from fp8engine.ops.reference import Operand


def real(x: Operand) -> torch.Tensor:
    """The numbers, one element at a time; the operand's rows or cols of -1: all."""
    m, k = x.data.shape
    scale = x.scale.double()
    if scale.dim():
        rows, cols = (m if x.rows == -1 else x.rows), (k if x.cols == -1 else x.cols)
        scale = scale.repeat_interleave(rows, 0)[:m].repeat_interleave(cols, 1)[:, :k]
    return x.data.double() * scale
