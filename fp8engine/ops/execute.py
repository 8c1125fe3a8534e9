"""Execution of an operation: the backend is chosen, and the kernel or its plain-torch twin is called.

Chosen at this moment and not when a graph is traced: a compiled graph follows `with backend(...)` as eager code does.
"""

from __future__ import annotations

import torch

from fp8engine import _torch
from fp8engine.errors import BackendError
from fp8engine.ops import ranks, reference, scaled_mm, triton_backend
from fp8engine.ops.dispatch import asked, choose, choose_casts
from fp8engine.ops.reference import Epilogue, How, Operand, Slot
from fp8engine.ops.reference.stats import Statistics


def matmul(a: Operand, b: Operand, bias_N, out: torch.dtype, precision: str) -> torch.Tensor:
    """a @ b.T + bias; see ops.matmul."""
    name = _backend_of(a, b, precision)
    if name == "triton":
        return triton_backend.matmul(a, b, Epilogue(bias_N, out), fast=precision == "fast")
    if name == "cublas":
        return scaled_mm.matmul(a, b, bias_N, out, fast=precision == "fast")
    if _torch.autocast_active():  # it would take codes up to 448 for an FP16 matmul, whose sums overflow
        with torch.autocast(a.data.device.type, enabled=False):
            return _emulate(a, b, bias_N, out, precision)
    return _emulate(a, b, bias_N, out, precision)


def matmul_epilogue(a: Operand, b: Operand, epilogue: Epilogue, precision: str) -> torch.Tensor:
    """a @ b.T, ended by the epilogue; see ops.matmul_epilogue."""
    if _backend_of(a, b, precision) == "triton":
        return triton_backend.matmul(a, b, epilogue, fast=precision == "fast")
    return reference.finish(matmul(a, b, None, torch.float32, precision), epilogue)


def matmul_fp16(a_MK: torch.Tensor, b_NK: torch.Tensor, bias_N, out: torch.dtype) -> torch.Tensor:
    """a @ b.T + bias of FP16 or BF16 tensors on our kernels."""
    return triton_backend.matmul_fp16(a_MK, b_NK, Epilogue(bias_N, out))


def quantize(x_MK: torch.Tensor, how: How, slot: Slot | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scale) of x under a cast; see ops.quantize."""
    if _casts_on_triton(x_MK, how):
        return triton_backend.quantize(x_MK, how, slot)
    return reference.quantize(x_MK, how, slot)


def cast_transpose(
    x_MK: torch.Tensor, how: How, slot: Slot | None = None, sums: bool = False
) -> tuple[torch.Tensor, ...]:
    """(data, scale, data of the transpose, its scale, sums of columns); empty: what one scale or nobody needs."""
    found = triton_backend.cast_transpose if _casts_on_triton(x_MK, how) else reference.cast_transpose
    first, second, *rest = found(x_MK, how, slot, sums)
    nothing = first[1].new_empty(0)
    return *first[:2], second[0], nothing if how.per_tensor else second[1], rest[0] if sums else first[1].new_empty(0)


def quantize_given(x_MK: torch.Tensor, how: How, scale: torch.Tensor) -> torch.Tensor:
    """FP8 codes of x under a scale that the caller chose."""
    if _casts_on_triton(x_MK, how):
        return triton_backend.quantize_given(x_MK, how, scale)
    return reference.quantize_given(x_MK, how, scale)


def scale_update(history_HS, live_2S, rules_3S, name: str = "", saved_1: torch.Tensor | None = None) -> None:
    """Enter a step's amaxes, of all the ranks of a process group, and predict the next scales; see ops.scale_update."""
    if saved_1 is not None:
        ranks.join(live_2S[0], name, saved_1)
    if choose_casts(history_HS.device) == "triton":
        triton_backend.scale_update(history_HS, live_2S, rules_3S)
    else:
        reference.scale_update(history_HS, live_2S, rules_3S)


def stats(x_MK: torch.Tensor, every: int = 1) -> Statistics:
    """amax, sum of squares and exponent histogram; see reference.stats."""
    if choose_casts(x_MK.device) == "triton":
        return Statistics(*triton_backend.stats(x_MK, every))
    return reference.stats(x_MK, every)


def _casts_on_triton(x_MK: torch.Tensor, how: How) -> bool:
    return how.held is None and choose_casts(x_MK.device) == "triton" and triton_backend.castable(x_MK, how)


def _backend_of(a: Operand, b: Operand, precision: str) -> str:
    if a.data.dtype.itemsize == b.data.dtype.itemsize == 1:
        by_block = a.scaled_along_k or b.scaled_along_k
        return choose(a.data.device, by_block, (a.data.shape[0], b.data.shape[0]), precision)
    if asked() not in (None, "reference"):
        raise BackendError(
            f"backend {asked()!r} takes FP8 codes, and these operands are values held for an emulated matmul: "
            "quantise them (run the forward) inside the block as well"
        )
    return "reference"


def _emulate(a: Operand, b: Operand, bias_N, out: torch.dtype, precision: str) -> torch.Tensor:
    if precision == "exact":  # products in FP32 for a 16-bit result too
        return reference.matmul_fp8(a, b, bias_N, torch.float32, exact=True).to(out)
    return reference.matmul_fp8(a, b, bias_N, out, exact=False)
