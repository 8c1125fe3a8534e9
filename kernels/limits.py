"""Limits of tensor descriptors and of Hopper's Gluon matmuls: the sizes and layouts they take.  Read without Triton."""

import torch

ALIGNMENT = 16  # bytes: TMA's of base and strides (CUDA driver API, cuTensorMapEncodeTiled), and of a wide load
TILE = (128, 128, 128)  # of matmul_gluon.py


def describable(x: torch.Tensor) -> bool:
    """Whether TMA can read and write the matrix x: contiguous along its last dimension, everything else aligned."""
    (rows, columns), (stride, along) = x.shape, x.stride()
    return (
        along == 1
        and rows > 0
        and columns > 0
        and stride >= columns  # an expanded or sliding view is read by pointers
        and (x.data_ptr() | stride * x.itemsize) % ALIGNMENT == 0  # a power of two: both are multiples of it
        and rows < 1 << 31
        and columns < 1 << 31
    )


def gluon(a, b, epilogue, config, n: int) -> str | None:
    """Why `matmul_gluon` cannot multiply these operands, whose sums are promoted, on any card; None where it can.

    n: columns of the result; b may be a stack of experts' matrices.
    """
    m, k = a.data.shape
    if min(m, n, k) == 0:
        return f"nothing to multiply in M, N, K = {m}, {n}, {k}"
    if not describable(a.data):
        return "a is not 16-byte aligned rows contiguous along K"
    if not describable(b.data):
        return "b is not 16-byte aligned rows contiguous along K"
    if n * epilogue.out.itemsize % ALIGNMENT != 0:
        return f"rows of the result, {n} of {epilogue.out}, are not 16-byte aligned"
    if (config.block_m, config.block_n, config.block_k) != TILE:
        return f"tiles are {TILE}, not of {config}"
    if a.scaled_along_k:
        if a.cols != config.block_k:
            return f"groups of {a.cols} along K, not of {config.block_k}"
        if a.rows == b.rows == 1:
            if not (describable(a.scale.t()) and describable(b.scale.t())):
                return "scales of rows are not contiguous and 16-byte aligned along M and N"
        elif b.rows % config.block_n != 0:
            return f"blocks of {b.rows} rows of b, of which a tile has {config.block_n}"
    return None
