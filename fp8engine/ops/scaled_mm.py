"""The cublas backend, torch's scaled matmul (cuBLASLt on CUDA, oneDNN on CPUs): layout, padding, scales.

    y[M, N] = sum_k a[m, k] b[n, k] * scale_a * scale_b + bias[n]

What the hardware wants, checked here so that a CPU refuses what a card would:
- a row-major and b column-major, i.e. both contiguous along K, strides (K, 1); copied where they are not;
- K and N multiples of 16; padded with zeros where they are not, the result cut back;
- not E5M2 by E5M2;
- both scales per tensor, or one per row of each.  Row scales leave a BF16 result (torch's rule), whatever `out` is;
  torch 2.11 has none of them on a CPU;
- a sum times one of the scales within FP32's range: a CPU's multiplies by the first scale before the second, and values
  near 1e36 make that Inf where the result is not.
tests/ops/test_scaled_mm_card.py holds every call against the rules that torch itself has for CUDA.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from fp8engine import _torch
from fp8engine.errors import BackendError
from fp8engine.ops import device
from fp8engine.ops.reference.operand import Operand

MULTIPLE = 16


def unsupported(a: Operand, b: Operand) -> str | None:
    """Why torch's scaled matmul cannot take these operands, or None when it can."""
    if not hasattr(torch, "_scaled_mm"):
        return "this torch has no scaled matmul"
    where = a.data.device
    if where.type == "cuda" and not device.has_fp8(where):
        return f"{device.name(where)} has no FP8 Tensor Cores; sm_89 or later has"
    if where.type not in ("cpu", "cuda"):
        return f"no scaled matmul on {where.type}"
    if a.data.dtype.itemsize != 1 or b.data.dtype.itemsize != 1:
        return "operands are not FP8 codes"
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        return "Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3"
    if a.scaled_along_k or b.scaled_along_k:
        return "scales that change along K (blocks)"
    if where.type == "cpu" and (a.scale.dim() == 2 or b.scale.dim() == 2) and not device.cpu_scales_rows():
        return f"torch {torch.__version__} has no row scales on a CPU"
    return None


def matmul(a: Operand, b: Operand, bias_N=None, out: torch.dtype = torch.bfloat16, fast: bool = False) -> torch.Tensor:
    """a @ b.T + bias.  fast: Hopper's fast accumulation.  Raises BackendError naming the guard that failed.

    >>> a = Operand(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.tensor(2.0))
    >>> matmul(a, a, out=torch.float32).tolist()
    [[12.0, 12.0], [12.0, 12.0]]
    """
    if reason := unsupported(a, b):
        raise BackendError(f"backend 'cublas' cannot multiply these: {reason}; use fe.backend('reference')")
    m, n = a.data.shape[0], b.data.shape[0]
    if 0 in (m, n, a.data.shape[1]):
        y_MN = torch.zeros(m, n, dtype=out, device=a.data.device)
        return y_MN if bias_N is None else y_MN + bias_N.to(out)
    by_row = a.scale.dim() == 2 or b.scale.dim() == 2
    a_data, b_data = _padded(a.data, rows=False), _padded(b.data, rows=True)
    scale_a, scale_b = a.scale, b.scale
    if by_row:  # a scale per tensor beside one per row becomes a constant per row
        # As vectors first: torch wants strides of 1 even along a dimension of size 1, which a transposed scale lacks.
        scale_a = a.scale.reshape(-1).expand(m).contiguous().unsqueeze(1)
        scale_b = pad(b.scale.reshape(-1).expand(n), (0, b_data.shape[0] - n), value=1.0).unsqueeze(0)
    y_MN = _torch.scaled_mm(
        a_data,
        b_data.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        out_dtype=torch.bfloat16 if by_row else out,
        use_fast_accum=fast,
    )
    if y_MN.shape[1] != n:  # a copy: layers may write in place into what they are given, and a view would forbid it
        y_MN = y_MN.narrow(1, 0, n).clone(memory_format=torch.contiguous_format)
    # The bias is added outside: cuBLASLt takes it only for 16-bit results of the bias's own dtype.
    y_MN = y_MN.to(out)
    return y_MN if bias_N is None else (y_MN + bias_N).to(out)


def _padded(data: torch.Tensor, rows: bool) -> torch.Tensor:
    """FP8 codes with strides (K, 1), with K (and the rows, where asked) padded to a multiple of 16 with zeros."""
    pad_k = -data.shape[1] % MULTIPLE
    pad_rows = -data.shape[0] % MULTIPLE if rows else 0
    if pad_k or pad_rows:  # code 0 is the value 0 in both formats
        return pad(data.view(torch.uint8), (0, pad_k, 0, pad_rows)).view(data.dtype)
    data = data.contiguous()
    # A single row is contiguous whatever its stride is, and torch reads the layout from the strides alone.
    return data if data.stride(0) == data.shape[1] else data.as_strided(data.shape, (data.shape[1], 1))
