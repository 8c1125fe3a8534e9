"""Precision of a training step: from a recipe's name to how a model is prepared and a step is computed.

| recipe | model | forward | loss scale |
| --- | --- | --- | --- |
| fp32 | plain | plain | none |
| bf16 | plain | torch.autocast(bfloat16) | none |
| fp16 | plain | torch.autocast(float16) | torch.amp.GradScaler |
| any other | fe.convert | CUDA: torch.autocast(bfloat16); CPU: plain | none |

Parameters are FP32 everywhere.  On a card the rest of the model (attention, norms, the head) runs in 16 bits, as it is
usually trained; on a CPU autocast makes the emulated step slower, and without it the difference to fp32 is FP8's alone.

FP16 or BF16 on a CPU without instructions that multiply it: 16-bit operands, products and sums in FP32, one rounding of
the result to 16 bits.  That is what Tensor Cores compute.  torch's own matmul rounds alike but takes 6 to 28 times an
FP32 matmul's time in FP16 (measured: 2048x128x512 on one AVX512 core), and the small GPT's step in BF16 takes 12 times
FP32's (measured: two AVX2 cores).
"""

from __future__ import annotations

import contextlib
import platform
import warnings

import torch
from torch import nn

from fp8engine import _torch
from fp8engine._torch import TorchDispatchMode, tree_map
from fp8engine.convert.swap import convert
from fp8engine.errors import EmulationWarning
from fp8engine.numerics.recipe import resolve
from fp8engine.ops.device import cpu_multiplies
from fp8engine.report.collect import inspect

PLAIN = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT = ("fp32", "bf16", "fp16", "current", "delayed", "rowwise", "blockwise", "auto")
aten = torch.ops.aten
# The matmuls of a transformer, and which of each one's results have 16 bits (None: all; attention's second is a sum).
PRODUCTS = {
    aten.mm.default: None,
    aten.addmm.default: None,
    aten.bmm.default: None,
    _torch.cpu_attention: (0,),
    _torch.cpu_attention_backward: None,
}


class SumsInFP32(TorchDispatchMode):
    """Within it, matmuls of tensors of dtype (FP16 or BF16) multiply and add in FP32 and round their result once.

    >>> a = torch.full((1, 2), 200.0, dtype=torch.float16)
    >>> with SumsInFP32(torch.float16):
    ...     a @ a.t()                                      # 80000 is beyond FP16, and is not hidden
    tensor([[inf]], dtype=torch.float16)
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or not any(self._is_narrow(arg) for arg in args):
            return func(*args, **kwargs)
        result = func(*tree_map(lambda x: x.float() if self._is_narrow(x) else x, args), **kwargs)
        if isinstance(result, torch.Tensor):
            return result.to(self.dtype)
        narrow = PRODUCTS[func]
        return tuple(part.to(self.dtype) if narrow is None or at in narrow else part for at, part in enumerate(result))

    def _is_narrow(self, x: object) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == self.dtype


def cpu_is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU has no instructions that multiply FP16 or BF16, as far as torch tells.

    FP16: no x86 before Sapphire Rapids has them.  BF16: those with AVX512-BF16, AMX, or Arm's bf16 do.
    """
    if dtype == torch.bfloat16:
        return not cpu_multiplies("bf16")
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and not (known.get("avx512_fp16") or known.get("amx_fp16"))


class Precision:
    """A recipe on a device: prepares a model, wraps each forward and backward, names the backends that ran.

    Raises UnknownName for a name that is no recipe.

    >>> Precision("fp16", torch.device("cpu")).scaler.is_enabled()
    True
    """

    def __init__(self, recipe: str, device: torch.device):
        resolve(recipe)
        self.recipe, self.device = recipe, device
        beside_fp8 = torch.bfloat16 if device.type == "cuda" else None
        self.autocast = PLAIN.get(recipe, beside_fp8)
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe == "fp16")
        dtype = PLAIN.get(recipe)
        self.matmuls = contextlib.nullcontext()
        if dtype is not None and device.type == "cpu" and cpu_is_slow(dtype):
            self.matmuls = SumsInFP32(dtype)

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model as this recipe trains it.  That FP8 is emulated, the table says: no warning beside it."""
        if self.recipe in PLAIN:
            return model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)
            return convert(model, self.recipe)

    def step(self) -> contextlib.AbstractContextManager:
        """Around a forward and its backward."""
        return self.matmuls

    def forward(self) -> contextlib.AbstractContextManager:
        """Around a forward, inside `step`."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def usual(self) -> contextlib.AbstractContextManager:
        """`forward`, with the rest of an FP8 model in BF16 on a CPU as well: for what is counted and not trained."""
        return torch.autocast(
            self.device.type, dtype=PLAIN.get(self.recipe, torch.bfloat16), enabled=self.recipe != "fp32"
        )

    def ran(self, model: nn.Module) -> str:
        """Where the matmuls ran: "torch", or the FP8 backends; "(emulated)" where no hardware has that format."""
        if self.recipe in PLAIN:
            return "torch (emulated)" if isinstance(self.matmuls, SumsInFP32) else "torch"
        layers = [layer for layer in inspect(model).layers if layer["recipe"] != "none"]
        names = "+".join(sorted({layer["backend"] for layer in layers}))
        return f"{names} (emulated)" if any(layer["emulated"] for layer in layers) else names
