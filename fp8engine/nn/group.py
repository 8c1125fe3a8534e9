"""Groups of modules that run as one fused call, and when they do.

Modules of a group run by their own forwards where one of them, or a module around them within the block, has a hook, a
forward on its instance, or an adapter in its place; and where the forward of a norm, of an activation or of a module
around them is not transformers' own: it may compute something else, and a custom autograd.Function would take a
placeholder (lazy.py) for no tensor, and lose its gradient.  Outside of their block's forward they run by themselves
too: what is called alone returns a tensor.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.autograd.parts import NormOf
from fp8engine.nn.class_swap import Mixin, bound_forwards, mix
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops.reference import Norm

NOT_RUN = "it has not run yet"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OWN_CODE = ("transformers.", "fp8engine.", "torch.")  # modules whose forwards may be given placeholders
CAPTURING = "transformers.utils.output_capturing"  # its hooks keep what a module returns, and read nothing else


class FusedBlock(Mixin):
    """A block whose forward notes that it runs: outside of it no placeholder is made.

    A list and no number: append and pop are atomic, and several threads may run one model.
    """

    forwards: list[None]

    @staticmethod
    def put(block: Any) -> None:
        """Make the module one."""
        if not isinstance(block, FusedBlock):
            mix(block, FusedBlock)
            object.__setattr__(block, "forwards", [])

    def forward(self, *args, **kwargs):
        self.forwards.append(None)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.forwards.pop()


@dataclass(eq=False)
class Group:
    """Modules that run as one.  layers: the consumers of the norm's result, or of x where norm is None.

    act, kind, second: of an MLP, the activation, its formula's name, and the layer after it; `layers` is then (up,),
    (gate_up,) or (gate, up).
    places: (parent, key, module) of each of them, and of the modules around them in the block, the first parent.
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
    note: str = NOT_RUN

    def runs_fused(self, x: torch.Tensor) -> bool:
        """Whether the modules run as one on this x; notes why not."""
        self.note = self._why_apart(x)
        return not self.note

    def _why_apart(self, x: torch.Tensor) -> str:
        if not self.places or not self.places[0][0].forwards:  # torch.export gives a module's lists back as new ones
            return "it was called outside of its block's own forward"
        if _torch.has_any_global_hook():
            return "a hook on all modules looks on"
        if why := foreign_code(type(self.places[0][0])):
            return why
        for parent, key, module in self.places:
            if parent._modules.get(key) is not module:
                return f"another module stands in {key}'s place (an adapter?)"
            if any(getattr(module, name) for name in HOOKS) and not _only_captured(module):
                return f"a hook on {key} looks on"
            if "forward" in vars(module) and "forward" not in bound_forwards(module):
                return f"{key} has a forward of its own"
            if module is not self.second and module not in self.layers and (why := foreign_code(type(module))):
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
        norm: Any = self.norm
        which = self.which._replace(eps=epsilon(norm))  # it may have been set since fe.convert
        return NormOf(which, norm.weight, getattr(norm, "bias", None))

    def __deepcopy__(self, memo: dict) -> Group:
        """Of a copied block, the group of its copies; of a part that is copied alone, one that never runs fused."""
        with_block = self.places and id(self.places[0][0]) in memo
        alone: dict = {"norm": None, "layers": (), "act": None, "second": None, "places": ()}
        twin = memo[id(self)] = object.__new__(Group)
        vars(twin).update(copy.deepcopy(vars(self) if with_block else vars(self) | alone, memo))
        return twin

    def __str__(self) -> str:
        return f"fused: {self.label}" if not self.note else f"fused as {self.label}, but run apart: {self.note}"


def epsilon(norm: nn.Module) -> Any:
    """What a norm adds under the root, by either of the names that transformers has for it."""
    return vars(norm).get("variance_epsilon", vars(norm).get("eps"))


def foreign_code(kind: type[nn.Module]) -> str:
    """Whose code the forward of a class is, or a wrapper of it, where that is not transformers'; "" where it is.

    functools.wraps gives a wrapper the name and the `__module__` of what it wraps; its globals stay its author's.
    """
    kind = getattr(kind, "plain", kind)
    forward: Any = kind.forward
    while forward is not None:
        where = str(getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__))
        if not where.startswith(OWN_CODE):
            return f"the forward of {kind.__name__} is of {where}"
        forward = getattr(forward, "__wrapped__", None)
    return ""


_torch.constant_in_graphs(foreign_code)


def _only_captured(module: nn.Module) -> bool:
    """Whether every hook on a module that holds others is transformers' own, for output_hidden_states and the like.

    transformers leaves these hooks in place after the first call that asked for such an output.
    """
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return bool(module._modules) and all(getattr(hook, "__module__", "") == CAPTURING for hook in hooks)
