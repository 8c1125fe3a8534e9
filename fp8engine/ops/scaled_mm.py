"""The cublas backend, torch's scaled matmul (cuBLASLt on CUDA, oneDNN on CPUs): layout, padding, scales.

    y[M, N] = sum_k a[m, k] b[n, k] * scale_a * scale_b + bias[n]      the bias: `adds_bias`

What the hardware wants, checked here so that a CPU refuses what a card would:
- a row-major and b column-major, i.e. both contiguous along K, strides (K, 1); copied where they are not;
- K and N multiples of 16; padded with zeros where they are not, the result cut back;
- not E5M2 by E5M2;
- both scales per tensor, or one per row of each.  Row scales leave a BF16 result (torch's rule), whatever `out` is;
  torch 2.11 has none of them on a CPU;
- or, on sm_90 alone and from CUDA 12.9 on, scales in blocks: 1x128 by 128x128, 128x128 by 1x128, 1x128 by 1x128.  G
  blocks along K: a scale of 1x128 lies [rows, G] with strides (1, rows), one of 128x128 [rows/128, G] with strides
  (G, 1) and G a multiple of 4 (torch's check; later ones round the stride up to it).  K is padded until that holds,
  rows to multiples of 16, so that every stride is a multiple of 16 bytes;
- a sum times one of the scales within FP32's range: a CPU's multiplies by the first scale before the second, and values
  near 1e36 make that Inf where the result is not.
tests/ops/test_scaled_mm.py holds every call against the rules that torch itself has for CUDA.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from fp8engine import _torch
from fp8engine.errors import BackendError
from fp8engine.ops import device
from fp8engine.ops.reference.operand import Operand

MULTIPLE = 16
BLOCK = 128  # values of K under one scale
BLOCKS_ON = (9, 0)  # capability of the cards whose block scales cuBLASLt takes
BLOCKS_FROM = (12, 9)  # CUDA's version
LINES, SQUARES = (1, BLOCK), (BLOCK, BLOCK)


def unsupported(a: Operand, b: Operand) -> str | None:
    """Why torch's scaled matmul cannot take these operands, or None when it can."""
    if not hasattr(torch, "_scaled_mm"):
        return "this torch has no scaled matmul"
    where = a.data.device
    if where.type == "cuda" and not device.has_fp8(where):
        return device.why_no_fp8(where) + ("" if device.is_amd(where) else "; sm_89 or later has")
    if where.type not in ("cpu", "cuda"):
        return f"no scaled matmul on {where.type}"
    if a.data.dtype.itemsize != 1 or b.data.dtype.itemsize != 1:
        return "operands are not FP8 codes"
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        return "Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3"
    if a.scaled_along_k or b.scaled_along_k:
        kinds = (a.rows, a.cols), (b.rows, b.cols)
        if kinds not in ((LINES, SQUARES), (SQUARES, LINES), (LINES, LINES)):
            return "scales along K that are not 1x128 by 128x128, 128x128 by 1x128 or 1x128 by 1x128"
        return no_blocks(where)
    if where.type == "cpu" and (a.scale.dim() == 2 or b.scale.dim() == 2) and not device.cpu_scales_rows():
        return f"torch {torch.__version__} has no row scales on a CPU"
    return None


def no_blocks(where: torch.device) -> str | None:
    """Why torch's scaled matmul has no scales in blocks there, or None where it has them."""
    if where.type != "cuda" or device.capability(where) != BLOCKS_ON:
        return f"torch takes scales that change along K (blocks) on sm_90 alone, and this is {device.name(where)}"
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) < BLOCKS_FROM:
        return f"scales that change along K (blocks) need CUDA 12.9, and this torch has {version}"
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
    if a.scaled_along_k:
        y_MN = _by_block(a, b, torch.bfloat16 if out == torch.bfloat16 else torch.float32)
    else:
        rounded = bias_N if bias_N is None or not device.has_fp8(a.data.device) else bias_N.to(out)
        inside, bias_N = (rounded, None) if adds_bias(a, b, rounded, out) else (None, bias_N)
        y_MN = _by_row_or_tensor(a, b, inside, out, fast)
    if y_MN.shape != (m, n):  # a copy: layers may write in place into what they are given, and a view would forbid it
        y_MN = y_MN[:m, :n].clone(memory_format=torch.contiguous_format)
    y_MN = y_MN.to(out)
    return y_MN if bias_N is None else (y_MN + bias_N).to(out)


def adds_bias(a: Operand, b: Operand, bias_N: torch.Tensor | None, out: torch.dtype) -> bool:
    """Whether torch's matmul adds the bias to its FP32 sums; else a pass over the result does.

    Where the bias has the result's 16-bit dtype (with row scales BF16) and lies contiguous at a multiple of 16 bytes,
    and N is not padded.  Not for scales in blocks.  An FP32 bias, as under autocast, is rounded to that dtype for it on
    a card, as torch's own linear layers round theirs: a pass over the result would move 12 bytes an element.
    """
    if bias_N is None:
        return False
    by_row = a.scale.dim() == 2 or b.scale.dim() == 2
    return (
        bias_N.dtype == out == (torch.bfloat16 if by_row else out)
        and out.itemsize == 2
        and len(bias_N) % MULTIPLE == 0
        and bias_N.is_contiguous()
        and bias_N.data_ptr() % MULTIPLE == 0
    )


def _by_row_or_tensor(a: Operand, b: Operand, bias_N, out: torch.dtype, fast: bool) -> torch.Tensor:
    m, n = a.data.shape[0], b.data.shape[0]
    by_row = a.scale.dim() == 2 or b.scale.dim() == 2
    a_data, b_data = _padded(a.data, rows=False), _padded(b.data, rows=True)
    scale_a, scale_b = a.scale, b.scale
    if by_row:  # a scale per tensor beside one per row becomes a constant per row
        # As vectors first: torch wants strides of 1 even along a dimension of size 1, which a transposed scale lacks.
        scale_a = a.scale.reshape(-1).expand(m).contiguous().unsqueeze(1)
        scale_b = _wider(b.scale.reshape(-1).expand(n), (0, b_data.shape[0] - n)).contiguous().unsqueeze(0)
    return _torch.scaled_mm(
        a_data,
        b_data.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias_N,
        out_dtype=torch.bfloat16 if by_row else out,
        use_fast_accum=fast,
    )


def _by_block(a: Operand, b: Operand, out: torch.dtype) -> torch.Tensor:
    """y with the rows of the padded operands.  Sums are FP32 from block to block, whatever is asked."""
    k = a.data.shape[1]
    # At least two blocks along K: a single one would be taken for a scale per row.
    blocks = max(-(-k // BLOCK), 2)
    blocks += -blocks % 4 if BLOCK in (a.rows, b.rows) else 0
    (a_data, scale_a), (b_data, scale_b) = (_blocked(operand, blocks) for operand in (a, b))
    return _torch.scaled_mm(a_data, b_data.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=out)


def _blocked(operand: Operand, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) with that many blocks along K, laid out as torch checks it; what is added has the value 0."""
    data = _padded(operand.data, rows=True, multiple_of_k=blocks * BLOCK)
    along, down = blocks - operand.scale.shape[1], -(-data.shape[0] // operand.rows) - operand.scale.shape[0]
    if operand.rows == 1:
        return data, _wider(operand.scale.t(), (0, down, 0, along)).contiguous().t()
    return data, _wider(operand.scale, (0, along, 0, down)).contiguous()


def _wider(scale: torch.Tensor, by: tuple[int, ...]) -> torch.Tensor:
    """Scales padded with ones, themselves where there is nothing to pad, of which torch's `pad` makes a copy."""
    return pad(scale, by, value=1.0) if any(by) else scale


def _padded(data: torch.Tensor, rows: bool, multiple_of_k: int = MULTIPLE) -> torch.Tensor:
    """FP8 codes with strides (K, 1), with K (and the rows, where asked) padded to multiples with zeros."""
    pad_k = -data.shape[1] % multiple_of_k
    pad_rows = -data.shape[0] % MULTIPLE if rows else 0
    if pad_k or pad_rows:  # code 0 is the value 0 in both formats
        return pad(data.view(torch.uint8), (0, pad_k, 0, pad_rows)).view(data.dtype)
    data = data.contiguous()
    # A single row is contiguous whatever its stride is, and torch reads the layout from the strides alone.
    return data if data.stride(0) == data.shape[1] else data.as_strided(data.shape, (data.shape[1], 1))
