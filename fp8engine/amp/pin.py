"""Pin of a module to FP32 while the rest of the model runs in FP16, for a layer that leaves FP16's range.

    forward(x) = back(f(fp32(x); fp32(w)))      autocast off inside

x and w are cast up, which is exact; f is the module's own forward.  `back` cannot always give the dtype that the
module returned before: an output above 65504, which is why it was pinned, would become Inf there, silently, and to
check first would make the host wait for the device.  So under autocast the output stays FP32, as it does after torch's
own FP32 ops (softmax, norms), and later ops cast as they need; without autocast nothing would cast, so the output goes
back to the dtype of the inputs.  The class of the module itself is changed, so hooks, names, parameters, state_dict and
optimizers keep the same object; gradients reach FP16 weights through the cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fp8engine.amp.mixed import fp32, mixed, reduced
from fp8engine.amp.tensors import SIXTEEN_BIT, Lent, cast_all, device_type, tensors
from fp8engine.errors import ConversionError, UnknownName

OUTPUTS = ("auto", "fp32", "input")
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called, so nothing to pin


class Fp32Pinned:
    """Mixed into the class of a pinned module; the class it had is the next in the MRO."""

    _fp32_output: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, in FP32 while it is pinned."""
        if not is_pinned(self):
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        where = device_type(self, (args, kwargs))
        low = next((x.dtype for x in tensors((args, kwargs)) if x.dtype in SIXTEEN_BIT), None)
        casts = torch.is_autocast_enabled(where) or hasattr(self, "_fp8engine_amp")  # a decorated model returns FP32
        keep = self._fp32_output == "fp32" or (self._fp32_output == "auto" and casts)
        lent: list[Lent] = []
        with fp32(where):
            args, kwargs = cast_all((args, kwargs), SIXTEEN_BIT, torch.float32, lent)
            output = self._run(args, kwargs)
        for one in lent:
            one.write_back()
        return output if keep or low is None else cast_all(output, (torch.float32,), low)

    def _run(self, args: tuple, kwargs: dict) -> Any:
        module: Any = self
        own = [(name, x) for name, x in vars(module).items() if isinstance(x, torch.Tensor)]  # as a hook's weight_norm
        written = [*module.named_buffers(), *own]
        in_fp32 = {name: x.float() for name, x in (*module.named_parameters(), *written) if x.dtype in SIXTEEN_BIT}
        if not in_fp32:
            return super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        swapped = {f"module.{name}": tensor for name, tensor in in_fp32.items()}
        output = functional_call(_Own(module), swapped, args, kwargs)
        for name, x in written:
            if name not in in_fp32:
                continue
            new = swapped[f"module.{name}"]  # functional_call puts there what stands in the module afterwards
            if new is not in_fp32[name]:
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, new.to(x.dtype))
            else:  # running statistics: the FP32 copy was written; what was not may be saved for backward
                x.data.copy_(new.detach())
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(Fp32Pinned, self, protocol)


class _Own(nn.Module):
    """Calls a module's own forward, not its hooks, which ran already, while functional_call swaps its weights."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        return super(Fp32Pinned, module).forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


class Pin:
    """What `pin_fp32` returns: `remove()`, or the end of a `with`, gives the module its own precision back."""

    def __init__(self, module: nn.Module):
        self.module = module

    def remove(self) -> None:
        """Unpin; a second call, or one after another pin of the module was removed, changes nothing."""
        kind = type(self.module)
        if is_pinned(self.module):
            del self.module._fp32_output
            if kind.__bases__[0] is Fp32Pinned:  # else another class was put around it since, and stays
                self.module.__class__ = kind.__bases__[1]

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def is_pinned(module: Any) -> bool:
    """Whether a module is pinned to FP32."""
    return hasattr(module, "_fp32_output")


def pin_fp32(module: nn.Module, *, output: str = "auto") -> Pin:
    """Run `module`, and all inside it, in FP32 with autocast off; returns a handle whose `remove()` unpins it.

    output: "fp32" leaves what it returns in FP32; "input" casts it back to the FP16 or BF16 of its inputs (a value
    beyond that range becomes Inf: `find_overflow` names it); "auto" is "fp32" under autocast and "input" without.
    Inputs and weights in FP16 or BF16 are cast up, others are left.  Pinning a pinned module only sets `output`.
    A layer of fe.convert goes on multiplying in the formats of its recipe: fe.revert it, or convert it as "fp32".

    Raises UnknownName (output), ConversionError (not a module with a forward of its own that can be pinned).

    >>> layer = nn.Linear(4, 4)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(200.0)
    >>> x = torch.full((1, 4), 100.0)
    >>> with torch.autocast("cpu", torch.float16):
    ...     before = layer(x).isinf().all().item()
    ...     pin = pin_fp32(layer)
    ...     after = layer(x).isfinite().all().item()
    >>> before, after, layer(x).dtype
    (True, True, torch.float32)
    >>> pin.remove()
    >>> type(layer) is nn.Linear
    True
    """
    if output not in OUTPUTS:
        raise UnknownName("output of pin_fp32", output, OUTPUTS)
    module = _target(module)
    if not isinstance(module, Fp32Pinned):
        module.__class__ = mixed(Fp32Pinned, type(module))
    object.__setattr__(module, "_fp32_output", output)
    return Pin(module)


def _target(module: Any) -> Any:
    module = getattr(module, "_orig_mod", module)  # under torch.compile: the module it compiles
    if not isinstance(module, nn.Module) or isinstance(module, (*CONTAINERS, torch.jit.ScriptModule)):
        raise ConversionError(
            f"pin_fp32 takes a module that has a forward, not {type(module).__name__}: pin the modules in it instead"
        )
    check_own_forward(module, "pin_fp32")
    return module


def check_own_forward(module: nn.Module, call: str) -> None:
    """Raise ConversionError where a module's forward is the instance's: one that its class is given is not called."""
    if "forward" in module.__dict__:
        raise ConversionError(
            f"the forward of this {type(module).__name__} was replaced on the instance (by offloading hooks?), so what"
            f" {call} changes would not be seen: call {call} first, then wrap it"
        )
