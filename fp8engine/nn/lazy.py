"""Norms, linear layers and activations of other people's modules, run together: nothing is computed before its reader.

    norm(x)                    is Normed: x, and which norm               no number yet
    gate(Normed), up(Normed)   are Projected                              none
    act(Projected)             is Activated; times a Projected, Gated     none
    down(Gated)                z, by norm_mlp(x, norm, (gate, up), down)
    q(Normed)                  q, and k and v with it, by norm_linear(x, norm, (q, k, v))

So what stands between the modules, which is transformers' own forward, is not rewritten: it passes on what it is given,
asks for shapes, cuts [gate | up] in two, multiplies, drops nothing out.  Any other question makes the numbers: the
value, computed by the modules as if nothing were fused; right, and slower.

Modules run apart, by their own forwards, where somebody looks on or has changed something: a hook on one of them or on
a module around them within the block, a forward of an instance, an adapter in a layer's place.  What is lazy is no
tensor subclass, so that torch.compile traces through it: a compiled graph holds the fused operators and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy
from torch.nn.modules import module as torch_module

from fp8engine.autograd.linear import linear
from fp8engine.autograd.mlp import norm_mlp
from fp8engine.autograd.norm_linear import norm_linear
from fp8engine.autograd.parts import NormOf
from fp8engine.errors import ScriptError, StateError
from fp8engine.nn.mixed import Mixin
from fp8engine.numerics.formats import FLOATS
from fp8engine.ops.reference import Norm

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(eq=False)
class Group:
    """Modules that run as one.  layers read the norm's result, or x where norm is None.

    act, kind, second: of an MLP, the activation, which one, and the layer after it; `layers` is then (up,), (gate_up,)
    or (gate, up).
    places: (parent, key, module) of each of them, and of the modules around them in the block.
    said: "" where the latest forward was fused, else why it was not.
    """

    label: str
    norm: nn.Module | None
    which: Norm | None
    layers: tuple[Any, ...]
    act: nn.Module | None = None
    kind: str = ""
    second: Any = None
    places: tuple[tuple[nn.Module, str, nn.Module], ...] = ()
    said: str = field(default="it has not run yet")

    def together(self, x: torch.Tensor) -> bool:
        """Whether the modules run as one on this x; notes why not."""
        why = self.said = self._why_apart(x)
        return not why

    def _why_apart(self, x: torch.Tensor) -> str:
        if torch_module._has_any_global_hook():
            return "a hook on all modules looks on"
        for parent, key, module in self.places:
            if parent._modules.get(key) is not module:
                return f"another module stands in {key}'s place (an adapter?)"
            if any(getattr(module, name) for name in HOOKS):
                return f"a hook on {key} looks on"
            if "forward" in vars(module):
                return f"{key} has a forward of its own"
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

    def __str__(self) -> str:
        return f"fused: {self.label}" if not self.said else f"fused as {self.label}, but run apart: {self.said}"


class Lazy(ABC):
    """A tensor that is not there: shape, dtype, device, and `value()` for everything else that is asked of it."""

    def __init__(self, group: Group, shape: torch.Size, like: Any):
        self.group, self.shape, self.dtype, self.device = group, shape, like.dtype, like.device
        self._made: torch.Tensor | None = None

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def value(self) -> torch.Tensor:
        """The numbers, by the modules' own forwards."""
        if self._made is None:
            self.group.said = "its result was read by other code too"
            self._made = self._make()
        return self._made

    @abstractmethod
    def _make(self) -> torch.Tensor: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __mul__(self, other: Any) -> Any:
        found = gated(self, other)
        return value_of(self) * value_of(other) if found is None else found

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout:
            first, p, training = (*args, *(kwargs[key] for key in ("p", "training") if key in kwargs))[:3]
            if not (training and p):
                return first
        return func(*_values(args), **_values(kwargs))


def _of_value(name: str):
    return lambda self, *others: getattr(self.value(), name)(*map(value_of, others))


_ARITHMETIC = "add radd rmul sub rsub truediv rtruediv pow neg matmul rmatmul iadd isub imul itruediv"
for _name in f"{_ARITHMETIC} getitem len iter bool float eq ne lt le gt ge".split():
    setattr(Lazy, f"__{_name}__", _of_value(f"__{_name}__"))
Lazy.__hash__ = object.__hash__


class Normed(Lazy):
    """norm(x)."""

    def __init__(self, group: Group, x: torch.Tensor):
        super().__init__(group, x.shape, x)
        counted = not torch.compiler.is_compiling() and not x.is_inference()
        self.x, self.version = x, x._version if counted else None
        self.read: dict[int, torch.Tensor] = {}

    def source(self) -> torch.Tensor:
        """x, if it is still what the norm was given."""
        if self.version is not None and self.x._version != self.version:
            raise StateError(
                f"{self.group.label}: the norm's input was written in place before the norm's result was read; "
                "convert without fuse=True"
            )
        return self.x

    def _make(self) -> torch.Tensor:
        alone: Any = super(FusedNorm, self.group.norm)  # pyright: ignore[reportArgumentType]
        return alone.forward(self.source())

    def read_by(self, layer: Any) -> torch.Tensor:
        """layer(norm(x)): made for all the group's layers when the first one asks."""
        if id(layer) not in self.read:
            layers = self.group.layers
            norm: Any = self.group.norm_of()
            made = norm_linear(self.source(), norm, [each.as_layer() for each in layers])
            self.read = dict(zip(map(id, layers), made, strict=True))
        return self.read.pop(id(layer))


class Projected(Lazy):
    """layer(source), source a tensor or Normed."""

    def __init__(self, group: Group, layer: Any, source: torch.Tensor | Normed):
        layer_NK = layer.as_layer().weight_NK
        super().__init__(group, torch.Size((*source.shape[:-1], len(layer_NK))), source)
        if torch.is_autocast_enabled(source.device.type):
            self.dtype = torch.get_autocast_dtype(source.device.type)
        self.layer, self.source = layer, source

    def _make(self) -> torch.Tensor:
        return linear(value_of(self.source), *self.layer.as_layer())

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        if chunks == 2 and dim in (-1, len(self.shape) - 1) and self.shape[-1] % 2 == 0:
            return Half(self, 0), Half(self, 1)
        return self.value().chunk(chunks, dim)


class Half(Lazy):
    """One half of [gate | up]."""

    def __init__(self, whole: Projected, index: int):
        super().__init__(whole.group, torch.Size((*whole.shape[:-1], whole.shape[-1] // 2)), whole)
        self.whole, self.index = whole, index

    def _make(self) -> torch.Tensor:
        return self.whole.value().chunk(2, dim=-1)[self.index]


class Activated(Lazy):
    """act(source)."""

    def __init__(self, act: Any, source: Projected | Half):
        super().__init__(source.group, source.shape, source)
        self.act, self.source = act, source

    def _make(self) -> torch.Tensor:
        alone: Any = super(FusedActivation, self.act)
        return alone.forward(self.source.value())


class Gated(Lazy):
    """act(gate) * up.  first: the layers that made them."""

    def __init__(self, gate: Activated, up: Projected | Half, first: tuple[Projected, ...]):
        super().__init__(gate.group, gate.shape, gate)
        self.gate, self.up, self.first = gate, up, first

    def _make(self) -> torch.Tensor:
        return self.gate.value() * self.up.value()


def gated(one: Any, other: Any) -> Gated | None:
    """The product as a gate, if it is one of this group's: act(gate) * up, in either order."""
    gate, up = (one, other) if isinstance(one, Activated) else (other, one)
    if not isinstance(gate, Activated) or gate.group.kind not in GATED:
        return None
    source, layers = gate.source, gate.group.layers
    if isinstance(source, Projected) and isinstance(up, Projected) and source.source is up.source:
        return Gated(gate, up, (source, up)) if (source.layer, up.layer) == layers else None
    if isinstance(source, Half) and isinstance(up, Half) and source.whole is up.whole and up.index == 1:
        return Gated(gate, up, (source.whole,)) if source.index == 0 else None
    return None


UNREAL = (Lazy, Proxy)  # what stands for a tensor


def value_of(x: Any) -> Any:
    """The numbers of what may be lazy."""
    return x.value() if isinstance(x, Lazy) else x


def _values(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _values(x) for key, x in nest.items()}
    return type(nest)(map(_values, nest)) if isinstance(nest, (tuple, list)) else value_of(nest)


def read(layer: Any, x: Any) -> Any:
    """layer(x) of a converted layer that belongs to a group, or that is given something lazy, or fx's Proxy.

    For torch.fx it is a leaf, one node of the graph, as nn.Linear is because its class is torch's own.
    """
    if isinstance(x, Proxy):
        tracer: Any = x.tracer
        place = tracer.path_of_module(layer)
        if not place:
            raise ScriptError(
                f"{layer.numerics.name}: a leaf of torch.fx; symbolic_trace takes the module that holds it"
            )
        return tracer.create_proxy("call_module", place, (x,), {})
    group: Group | None = layer.fused
    if group is not None:
        if isinstance(x, Normed) and x.group is group:
            return x.read_by(layer) if group.second is None else Projected(group, layer, x)
        if group.second is layer:
            if isinstance(x, Lazy) and x.group is group and (z := _whole(x)) is not None:
                return z
        elif group.norm is None and isinstance(x, torch.Tensor) and group.together(x):
            return Projected(group, layer, x)
    return linear(value_of(x), *layer.as_layer())


def _whole(x: Lazy) -> torch.Tensor | None:
    """The whole MLP at its second layer; None if what it reads is not what the group makes."""
    group = x.group
    if isinstance(x, Gated):
        first, kind = x.first, GATED[group.kind]
    elif isinstance(x, Activated) and isinstance(x.source, Projected) and len(group.layers) == 1:
        first, kind = (x.source,), group.kind
    else:
        return None
    made, source = tuple(each.layer.as_layer() for each in first), first[0].source
    tensor = source.source() if isinstance(source, Normed) else source
    norm = group.norm_of() if isinstance(source, Normed) else None
    return norm_mlp(tensor, norm, made if len(made) == 2 else made[0], group.second.as_layer(), kind)


class FusedNorm(Mixin):
    """A norm whose result the layers of its group read: lazy where they run together, else as it ever was."""

    prefix = "Fused"
    group: Group

    def forward(self, hidden_states):
        if isinstance(hidden_states, torch.Tensor) and self.group.together(hidden_states):
            return Normed(self.group, hidden_states)
        return super().forward(hidden_states)


class FusedActivation(Mixin):
    """An activation between the layers of its group."""

    prefix = "Fused"
    group: Group

    def forward(self, input):
        if isinstance(input, (Projected, Half)) and input.group is self.group:
            return Activated(self, input)
        return super().forward(value_of(input))
