"""torch's grouped matmul of FP8: each row times its expert's matrix, in one launch that takes offsets on the device.

    y[t] = a[t] @ b[e(t)]^T      sm_90 and sm_100; E4M3 by E4M3, a scale per row; N and K multiples of 16

Source: torch 2.13, aten/src/ATen/native/cuda/GroupedBlas.cpp and torch/_meta_registrations.py, which refuse the rest.
FP8 codes must lie along what is summed, which in wgrad is the rows of x: each group would have to begin at a multiple
of 16 bytes.  Such rows are not what a router gives, so that wgrad of FP8 codes is our own kernel's.
"""

from __future__ import annotations

import torch

from fp8engine import _torch
from fp8engine.ops import device
from fp8engine.ops.reference import Operand

ALIGNED = 16  # bytes between rows
CAPABILITIES = ((9, 0), (10, 0))  # on which torch has it


def has_scaled_grouped(where: torch.device) -> bool:
    """Whether torch multiplies groups of FP8 rows there in one launch.

    >>> has_scaled_grouped(torch.device("cpu"))
    False
    """
    return where.type == "cuda" and hasattr(torch, "_scaled_grouped_mm") and device.capability(where) in CAPABILITIES


def ungroupable(a: Operand, b: Operand, experts: int) -> str | None:
    """Why torch's scaled grouped matmul refuses rows a and a stack b of E matrices, or None when it takes them.

    >>> codes = torch.ones(32, 16).to(torch.float8_e5m2)
    >>> ungroupable(Operand(codes, torch.tensor(1.0)), Operand(codes, torch.tensor(1.0)), experts=2)
    'it multiplies E4M3 by E4M3 only'
    """
    if not a.data.dtype == b.data.dtype == torch.float8_e4m3fn:
        return "it multiplies E4M3 by E4M3 only"
    if a.scaled_along_k or b.scaled_along_k or any(x.scale.dim() == 2 and x.rows != 1 for x in (a, b)):
        return "it takes a scale per row only"
    if b.data.shape[1] % ALIGNED or (len(b.data) // experts) % ALIGNED:
        return f"it wants N and K in multiples of {ALIGNED}"
    return "there are no rows" if len(a.data) == 0 else None


def scaled_grouped(a: Operand, b: Operand, transposed: bool, ends_E: torch.Tensor, fast: bool) -> torch.Tensor:
    """Each row of a times its expert's matrix of the stack b [E * R, C], in one launch; BF16, no bias: torch's rules.

    transposed: times the transposes, whose codes are copied (both operands lie along what is summed); per tensor only.
    """
    experts = len(ends_E)
    data = b.data.unflatten(0, (experts, -1))
    data = data.mT.contiguous() if transposed else data
    # A scale per tensor becomes a constant per row.
    scale_a = a.scale.reshape(-1).expand(len(a.data)).contiguous()
    scale_b = b.scale.reshape(-1, 1) if b.scale.dim() == 0 else b.scale.view(experts, -1)
    scale_b = scale_b.expand(data.shape[:2]).contiguous()
    return _torch.scaled_grouped_mm(
        a.data.contiguous(), data.mT, scale_a, scale_b, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
