"""Quantise once, keep both orientations: q for the matmul that reduces columns, q^T for the one that reduces rows.

    per tensor   q^T is the transpose of q: one scale serves both        4 bytes per 16-bit element after the amax
    otherwise    each orientation is quantised from the source, with scales along what its matmul reduces: blocks from
                 one read (4 bytes), rows and columns from two (6)

A Hopper FP8 matmul reads both operands along K only, so the backward pass needs the transpose in memory; written from
the tile that is in registers anyway it costs one byte an element, where a transposition of its own costs two and a
launch.  Both are written in rows of 64 bytes or more, 16 bytes a thread: the tile turns in shared memory.

The launch that first reads x also sums its columns where asked to: a gradient's are its layer's dbias.  Each tile
writes its own sums, FP32, and the next launch adds them (column_sums.py): 0.06 to 0.12 bytes an element, not another 2.

Twin: fp8engine/ops/reference/cast_transpose.py.
"""

import torch

from fp8engine.kernels.quantize import quantize_tensor
from fp8engine.kernels.quantize_groups import quantize_groups


def cast_transpose(x_MK: torch.Tensor, cast, slot=None, sums: bool = False) -> tuple:
    """Return (q_MK, scale) of x quantised along K and (q_KM, scale_t) of its transpose quantised along M, contiguous.

    The twin's Operands are made of these and of the cast, the same for both: per tensor, row or block of the one means
    per tensor, row or block of the other.  slot: of the first; the second is not counted.
    sums: a third result, the sums of x's columns as they were before they were rounded, FP32 [K].
    """
    launch = quantize_tensor if cast.per_tensor else quantize_groups
    q_MK, scale, q_KM, scale_t, sums_K = launch(x_MK, cast, slot, True, sums)
    both = (q_MK, scale), (q_KM, scale_t)
    if not sums:
        return both
    return *both, torch.zeros(x_MK.shape[1], dtype=torch.float32, device=x_MK.device) if sums_K is None else sums_K
