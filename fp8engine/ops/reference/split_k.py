"""Sum over K in parts: what a matmul of few tiles adds afterwards, and in which order.

    y = finish((((0 + part[0]) + part[1]) + ...) * (scale_a * scale_b))      each addition rounded to FP32

The order is that of K, whatever order the parts were made in, so that two runs agree bit for bit.
The twin of kernels/split_k.py.
"""

from __future__ import annotations

import torch

from fp8engine.ops.reference.epilogue import Epilogue, finish


def add_parts(part_SMN: torch.Tensor, scales: tuple, epilogue: Epilogue) -> torch.Tensor:
    """y [M, N] from FP32 parts of its sums [S, M, N].

    scales: (scale_a, scale_b), FP32, () or [M, 1] and [N, 1]; (None, None) where the parts are scaled already.

    >>> parts = torch.tensor([[[2.0**24]], [[1.0]], [[-(2.0**24)]]])
    >>> add_parts(parts, (None, None), Epilogue(out=torch.float32)).item()  # (2^24 + 1) - 2^24 in FP32, in this order
    0.0
    """
    y_MN = torch.zeros_like(part_SMN[0])
    for part_MN in part_SMN:
        y_MN = y_MN + part_MN
    scale_a, scale_b = scales
    if scale_a is not None:
        y_MN = y_MN * (scale_a * (scale_b if scale_b.dim() == 0 else scale_b.t()))
    return finish(y_MN, epilogue)
