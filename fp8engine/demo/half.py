"""FP16 matmuls on a CPU without FP16 instructions: FP16 operands, products and sums in FP32, one rounding to FP16.

That is what a V100's Tensor Cores compute.  torch's own FP16 matmul rounds alike but takes 6 to 28 times an FP32
matmul's time there (measured: 2048x128x512 on one AVX512 core), and its attention likewise.
"""

from __future__ import annotations

import contextlib
import platform

import torch

from fp8engine._torch import TorchDispatchMode, tree_map

aten = torch.ops.aten
# The matmuls of a transformer, and which of each one's results are FP16 (None: all; attention's second is a sum).
PRODUCTS = {
    aten.mm.default: None,
    aten.addmm.default: None,
    aten.bmm.default: None,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0,),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: None,
}


class SumsInFP32(TorchDispatchMode):
    """Within it, matmuls of FP16 tensors multiply and add in FP32 and round their result once.

    >>> a = torch.full((1, 2), 200.0, dtype=torch.float16)
    >>> with SumsInFP32():
    ...     a @ a.t()                                      # 80000 is beyond FP16, and is not hidden
    tensor([[inf]], dtype=torch.float16)
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or not any(_is_half(arg) for arg in args):
            return func(*args, **kwargs)
        result = func(*tree_map(_widen, args), **kwargs)
        if isinstance(result, torch.Tensor):
            return result.half()
        halves = PRODUCTS[func]
        return tuple(part.half() if halves is None or index in halves else part for index, part in enumerate(result))


def _is_half(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float16


def _widen(x):
    return x.float() if _is_half(x) else x


def cpu_is_slow() -> bool:
    """Whether this CPU has no FP16 instructions, as far as torch tells (all x86 before Sapphire Rapids)."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and not (known.get("avx512_fp16") or known.get("amx_fp16"))


def matmuls(device: torch.device) -> contextlib.AbstractContextManager:
    """The context in which FP16 is trained on this device: SumsInFP32 on a CPU that is slow at it, else nothing."""
    return SumsInFP32() if device.type == "cpu" and cpu_is_slow() else contextlib.nullcontext()
