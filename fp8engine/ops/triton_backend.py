"""The triton backend: whether our kernels can run here, what they take, and the layout they are given.

    FP8                a Hopper or Ada card (sm_89 on); any machine under TRITON_INTERPRET=1, for tests
    FP16, BF16         a card from sm_80 on
    V100 and older     never: Triton has had no Tensor Core path for sm_70 and sm_75 since 3.3

Triton is imported when a kernel is first asked for, not before: it is optional, and a CPU needs none.
FP8 Tensor Cores read both operands contiguous along K; one that is not is copied first, a byte an element.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8engine import environment
from fp8engine.errors import BackendError, VersionError
from fp8engine.ops import device
from fp8engine.ops.reference import Epilogue, Operand
from fp8engine.ops.reference.attention import LOG2_E, Form, factor_of, rotation_of, width_of

OLDEST, TOO_NEW, WANTED = (3, 6), (3, 10), "triton>=3.6,<3.10"
CAPABILITY_16_BITS = (8, 0)
TCGEN05 = (10, 11)  # major capabilities of Tensor Cores with a memory of their own: sm_100, sm_103, sm_110
POWERS = tuple(1 << power for power in range(8))  # rows or columns of a group that a tile of a cast holds whole
BLOCKS = (32, 64, 128)  # values of K that share a scale, and so are one step of the block matmul's loop


def require() -> None:
    """Raise BackendError where Triton is missing, VersionError where it is too old or too new."""
    version, otherwise = installed(), "or use 'cublas' or 'reference'"
    if version is None:
        why = f"needs Triton, which is not installed: pip install '{WANTED}' (Linux), {otherwise}"
        raise BackendError(f"backend 'triton' {why}")
    if not usable():
        why = f"needs {WANTED}, and {version[0]}.{version[1]} is installed: install another, {otherwise}"
        raise VersionError(f"backend 'triton' {why}")


@functools.cache
def installed() -> tuple[int, int] | None:
    """(major, minor) of the installed Triton, None without one."""
    if importlib.util.find_spec("triton") is None:
        return None
    major, minor = importlib.import_module("triton").__version__.split(".")[:2]
    return int(major), int(minor)


def usable() -> bool:
    """Whether a Triton of a version that we know is installed."""
    version = installed()
    return version is not None and OLDEST <= version < TOO_NEW


def no_card(where: torch.device, oldest: tuple[int, int] = device.FP8_CAPABILITY) -> str | None:
    """Why our kernels cannot run there, or None when they can.  oldest: capability that the formats need."""
    if where.type == "cuda":
        if device.capability(where) >= oldest:
            return None
        what = "FP8 Tensor Cores" if oldest == device.FP8_CAPABILITY else "path of Triton's to its Tensor Cores"
        return f"{device.name(where)} has no {what}; sm_{oldest[0]}{oldest[1]} or later has"
    if where.type == "cpu" and environment.interpreting():
        return None
    return f"no Triton kernels for {where.type} (TRITON_INTERPRET=1 interprets them on a CPU, for tests)"


def unsupported(a: Operand, b: Operand) -> str | None:
    """Why our kernels cannot multiply these operands, or None when they can."""
    if reason := no_card(a.data.device):
        return reason
    if a.data.dtype.itemsize != 1 or b.data.dtype.itemsize != 1:
        return "operands are not FP8 codes"
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        return "Tensor Cores do not multiply E5M2 by E5M2; cast one of the operands to E4M3"
    if not (a.scaled_along_k or b.scaled_along_k):
        return _not_compiled(a.data.device)
    sizes = {operand.cols for operand in (a, b) if operand.scaled_along_k}
    if len(sizes) > 1 or not sizes.issubset(BLOCKS):
        return f"scales along K for every {sorted(sizes)} values; want one of {BLOCKS}, the same for both"
    return None


def _not_compiled(where: torch.device) -> str | None:
    """Why matmul_fp8 and matmul_fp16 are not run on a card that has kernels for all else, or None."""
    if where.type == "cuda" and device.capability(where)[0] in TCGEN05:
        return (
            f"Triton 3.6 fails to compile our matmuls for {device.name(where)} where they count or take an amax "
            "(it compiles casts and block scales); fe.backend('cublas') multiplies there"
        )
    return None


def on_blackwell(where: torch.device) -> dict[bool, str]:
    """What multiplies FP8 on a Blackwell card, by whether scales are in blocks; empty for another card."""
    major, minor = device.capability(where)
    if major < min(TCGEN05):
        return {}
    tiles, until = ("Hopper", "") if major in TCGEN05 else ("Ada", " until this card has measured our kernels")
    ours = f"on Blackwell our kernel for Triton multiplies scales in blocks, with {tiles}'s tiles and without Gluon"
    return {
        False: f"on Blackwell cuBLASLt multiplies scales per tensor or row{until}",
        True: f"{ours}; it was written without a card of sm_{major}{minor}, and never measured on one",
    }


def matmul(a: Operand, b: Operand, epilogue: Epilogue, fast: bool = False, config=None) -> torch.Tensor:
    """a @ b.T ended by the epilogue.  fast: Hopper's fast accumulation.  Raises BackendError with the reason.

    config: of kernels/tuning.py, where operands are aligned; None: the tuning table's.
    """
    if reason := unsupported(a, b):
        raise BackendError(f"backend 'triton' cannot multiply these: {reason}; use fe.backend('reference')")
    a, b = _suited(a, b)
    if config is not None and config.descriptors:
        describable = _kernel("launch", "describable")
        config = config if describable(a.data) and describable(b.data) else None
    return _launch(a.data, ("matmul", "matmul_fp8"), a, b, _ending(epilogue), not fast, config, environment.gluon())


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """a @ b.T of FP16 or BF16 tensors of any strides, ended by the epilogue.  Raises BackendError with the reason."""
    reason = no_card(a_MK.device, CAPABILITY_16_BITS) or _not_compiled(a_MK.device)
    if a_MK.dtype != b_NK.dtype or a_MK.dtype not in (torch.float16, torch.bfloat16):
        reason = f"{a_MK.dtype} by {b_NK.dtype}; want both float16 or both bfloat16"
    if reason:
        raise BackendError(f"backend 'triton' cannot multiply these: {reason}; use fe.backend('reference')")
    return _launch(a_MK, ("matmul", "matmul_fp16"), _addressable(a_MK), _addressable(b_NK), _ending(epilogue))


@functools.cache
def castable(rows: int, cols: int) -> bool:
    """Whether our kernels cast in such groups: of a power of two up to 128, or whole rows, columns or tensors."""
    sizes, whole = {rows, cols} - {-1}, -1 in (rows, cols)
    return sizes.issubset(POWERS) and (not whole or sizes <= {1})


def _launched(*kernel: str, copies: bool = False) -> Callable[..., Any]:
    """A launcher of kernels/ as the twin of a function of reference/, on the card of its first tensor.

    copies: of the first tensor, where its strides are too large (`_addressable`).
    """
    return lambda x, *rest: _launch(x, kernel, _addressable(x) if copies else x, *rest)


# Signatures are those of the twins, results plain tuples: (codes, scale) for an Operand; codes of a norm or an
# activation are None where no kernel makes them with it, and casts do.  What they take: `castable`, `norm_unsupported`.
quantize = _launched("quantize", copies=True)
quantize_given = _launched("quantize", "quantize_given", copies=True)
cast_transpose = _launched("cast_transpose", copies=True)
quantize_experts = _launched("quantize_experts", copies=True)
transpose_experts = _launched("quantize_experts", "transpose_experts", copies=True)
expert_sums = _launched("quantize_experts", "expert_sums", copies=True)
scale_update = _launched("scale_update")
norm_quantize = _launched("norm_quantize")
norm_quantize_backward = _launched("norm_quantize", "norm_quantize_backward")
act_quantize = _launched("act_quantize")
act_quantize_backward = _launched("act_quantize", "act_quantize_backward")


def norm_unsupported(shape: Sequence[int]) -> str | None:
    """Why our kernels do not compute the norm of an x of that shape, forward or backward, or None when they do."""
    return _kernel("norm_quantize", "unsupported")(shape)


def grouped(launcher: str, a: Operand, b: Operand, bounds_2E1, epilogue: Epilogue, fast: bool) -> torch.Tensor:
    """`grouped_rows` or `grouped_sums` of kernels/matmul_grouped.py, for operands that `unsupported` takes.

    epilogue: the result's dtype, and a bias [E, N] of rows.
    """
    a, b = _suited(a, b)
    return _launch(
        a.data, ("matmul_grouped", launcher), a, b, bounds_2E1, _ending(epilogue), not fast, None, environment.gluon()
    )


def _suited(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Both contiguous along what is summed, and in groups along it where one of them is; row scales without gaps."""
    a, b = a._replace(data=_along_k(a.data)), b._replace(data=_along_k(b.data))
    if not (a.scaled_along_k or b.scaled_along_k):
        return a._replace(scale=a.scale.contiguous()), b._replace(scale=b.scale.contiguous())
    size = a.cols if a.scaled_along_k else b.cols
    return in_groups(a, size), in_groups(b, size)


def _ending(epilogue: Epilogue) -> Epilogue:
    """The epilogue with a bias without gaps: kernels take no stride for it."""
    bias = epilogue.bias_N
    return epilogue if bias is None else epilogue._replace(bias_N=bias.contiguous())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> torch.Tensor:
    """The twin of reference.attention."""
    (_, _, t, d), s = q.shape, k.shape[2]
    cast = [_attention_cast(x, form.rotated) for x in (q, k)]
    cast.append(_attention_cast(v, False, transposed=True))
    return _launch(q, ("attention",), *cast, form, factor_of(form, d), (t, s, d), q.dtype)


def attention_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form) -> tuple:
    """The twin of reference.attention_backward, as a tuple."""
    do, q, k = (_in_rows(x) for x in (do, q, k))
    cast = (_attention_cast(x, form.rotated) for x in (do, v))
    return _launch(q, ("attention_backward",), do, q, k, *cast, form, form.scale * LOG2_E)


def _attention_cast(x: torch.Tensor, rotated: bool, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    width = width_of(x.shape[3])
    half = x.dtype if x.dtype.itemsize == 2 else torch.bfloat16
    rotation = rotation_of(width, half, x.device) if rotated else None
    return _launch(x, ("attention_cast",), _in_rows(x), rotation, width, transposed)


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] with its columns together, and rows near enough for 32-bit offsets inside a tile."""
    return x if x.stride(3) == 1 and x.stride(2) < _kernel("launch", "MOST_STRIDE") else x.contiguous()


@functools.lru_cache(maxsize=4096)
def measured(operation: str, capability: tuple[int, int], m: int, n: int) -> float:
    """torch's time over our kernel's for an M x N result, as the tuning table has it; 0 where it was not measured.

    0 too where Triton does not compile the kernel: a time measured on another card says nothing there.

    >>> measured("matmul_fp8", (7, 0), 4096, 4096)
    0.0
    """
    if not usable() or capability[0] in TCGEN05:
        return 0.0
    tuning = importlib.import_module("fp8engine.kernels.tuning")
    try:
        return tuning.pick(operation, capability, m, n).ratio or 0.0
    except LookupError:
        return 0.0


def _launch(first: torch.Tensor, kernel: Sequence[str], *given: Any) -> Any:
    """Call a launcher (file of kernels/, name; one word where they are the same) on the card of `first`.

    Triton launches on torch's current card.
    """
    where, launcher = first.device, _kernel(*kernel)
    if where.type != "cuda" or where.index == torch.cuda.current_device():
        return launcher(*given)
    with torch.cuda.device(where):
        return launcher(*given)


@functools.cache
def _kernel(module: str, name: str | None = None) -> Any:
    """Of a file of kernels/, its launcher or another name."""
    require()
    return getattr(importlib.import_module(f"fp8engine.kernels.{module}"), name or module)


def _along_k(codes: torch.Tensor) -> torch.Tensor:
    """The codes contiguous along K, copied where they are not."""
    if codes.shape[1] > 1 and codes.stride(1) != 1:
        codes = codes.view(torch.uint8).contiguous().view(codes.dtype)
    return _addressable(codes)


def _addressable(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy where its strides are too large for a kernel's 32-bit offsets inside a tile."""
    addressable = _kernel("launch", "addressable")
    if not addressable(x) and not addressable(x := x.contiguous()):
        most = _kernel("launch", "MOST_STRIDE")
        raise BackendError(f"backend 'triton' takes rows of fewer than {most} elements, got {list(x.shape)}")
    return x


def in_groups(operand: Operand, size: int) -> Operand:
    """The operand with a scale for every `size` of K: one per tensor or per row is repeated, as a view."""
    if operand.scaled_along_k:
        return operand._replace(rows=operand.data.shape[0] if operand.rows == -1 else operand.rows)
    m, k = operand.data.shape
    return operand._replace(scale=operand.scale.expand(m, max(-(-k // size), 1)), rows=1, cols=size)
