"""Groups of modules that run as one fused call, and when they do.

Modules of a group run by their own forwards where one of them, or a module around them within the block, has a hook, a
forward on its instance, or an adapter in its place; and where the code around them is not transformers' own: a custom
autograd.Function of another library would take a placeholder (lazy.py) for no tensor, and lose its gradient.  Outside
of their block's forward they run by themselves too: what is called alone returns a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.autograd.parts import NormOf
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops.reference import Norm

NOT_RUN = "it has not run yet"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OWN_CODE = ("transformers.", "fp8engine.", "torch.")  # modules whose forwards may be given placeholders
CAPTURING = "transformers.utils.output_capturing"  # its hooks keep what a module returns, and read nothing else


class Running:
    """Whether a block's forward runs, told by two hooks on the block: outside of it no placeholder is made.

    A list and no number: append and pop are atomic, and several threads may run one model.
    """

    def __init__(self):
        self.forwards: list[None] = []

    def now(self) -> bool:
        """Whether it runs.  transformers' checkpoints call `forward` without hooks again, in a backward pass."""
        return bool(self.forwards) or _torch.graph_task() != -1

    def begin(self, block: nn.Module, args: tuple) -> None:
        """A forward pre-hook."""
        self.forwards.append(None)

    def end(self, block: nn.Module, args: tuple, output: Any) -> None:
        """A forward hook.  A forward that raised leaves its mark: placeholders are then made outside too."""
        if self.forwards:
            self.forwards.pop()


@dataclass(eq=False)
class Group:
    """Modules that run as one.  layers: the consumers of the norm's result, or of x where norm is None.

    act, kind, second: of an MLP, the activation, its formula's name, and the layer after it; `layers` is then (up,),
    (gate_up,) or (gate, up).
    places: (parent, key, module) of each of them, and of the modules around them in the block.
    running: of the block.
    note: "" where the latest forward was fused, else why it was not.
    """

    label: str
    norm: nn.Module | None
    which: Norm | None
    layers: tuple[Any, ...]
    act: nn.Module | None = None
    kind: str = ""
    second: Any = None
    places: tuple[tuple[nn.Module, str, nn.Module], ...] = ()
    running: Running = field(default_factory=Running)
    note: str = NOT_RUN

    def runs_fused(self, x: torch.Tensor) -> bool:
        """Whether the modules run as one on this x; notes why not."""
        self.note = self._why_apart(x)
        return not self.note

    def _why_apart(self, x: torch.Tensor) -> str:
        if not self.running.now():
            return "it was called outside of its block"
        if _torch.has_any_global_hook():
            return "a hook on all modules looks on"
        for parent, key, module in self.places:
            if parent._modules.get(key) is not module:
                return f"another module stands in {key}'s place (an adapter?)"
            if any(getattr(module, name) for name in HOOKS) and not _only_captured(module):
                return f"a hook on {key} looks on"
            if "forward" in vars(module):
                return f"{key} has a forward of its own"
            if why := foreign_code(parent):
                return why
        if x.dtype not in FLOATS or (self.norm is not None and self._weight_dtype() not in (x.dtype, None)):
            return f"the norm's input is {x.dtype} and its weight {self._weight_dtype()}"
        return ""

    def _weight_dtype(self) -> torch.dtype | None:
        weight: Any = None if self.norm is None else self.norm.weight
        return None if weight is None else weight.dtype

    def norm_of(self) -> NormOf | None:
        """The norm and its parameters as they are now."""
        if self.norm is None or self.which is None:
            return None
        return NormOf(self.which, self.norm.weight, getattr(self.norm, "bias", None))  # pyright: ignore

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if "running" not in state:  # a pickle of 0.1, whose blocks have no hooks
            self.running = Running()
            self.running.forwards.append(None)

    def __str__(self) -> str:
        return f"fused: {self.label}" if not self.note else f"fused as {self.label}, but run apart: {self.note}"


def foreign_code(around: nn.Module) -> str:
    """Whose code the forward of a module that holds others is, where it is not transformers'; "" where it is."""
    where = type(around).forward.__module__
    return "" if where.startswith(OWN_CODE) else f"the forward of {type(around).__name__} is of {where}"


def _only_captured(module: nn.Module) -> bool:
    """Whether every hook on a module that holds others is transformers' own, for output_hidden_states and the like.

    transformers leaves these hooks in place after the first call that asked for such an output.
    """
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return bool(module._modules) and all(getattr(hook, "__module__", "") == CAPTURING for hook in hooks)
