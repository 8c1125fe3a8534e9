"""Lazy placeholders that let norm + linear and MLP groups of a third-party model run as one fused call.

    norm(x)                    Normed(x): nothing is computed yet
    gate(Normed), up(Normed)   Projected
    act(Projected)             Activated; its product with a Projected is Gated
    down(Gated)                a tensor, by norm_mlp(x, norm, (gate, up), down)
    q(Normed)                  a tensor; those of k and v are made with it, by norm_linear(x, norm, (q, k, v))

The code between the modules, transformers' own forward, is not rewritten: it passes the placeholder on, asks for its
shape, splits [gate | up] in two, multiplies, or applies a dropout that drops nothing.  Any other operation computes the
value by the modules' own forwards, as if nothing were fused: the same result, and slower.

A placeholder is no tensor subclass, so that torch.compile traces through it: a compiled graph holds the fused
operators and nothing else.  Where none is made, and modules run by their own forwards: group.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.fx import Proxy

from fp8engine.autograd.linear import linear
from fp8engine.autograd.mlp import norm_mlp
from fp8engine.autograd.norm_linear import norm_linear
from fp8engine.autograd.parts import KEEP, Memory
from fp8engine.errors import ScriptError, StateError
from fp8engine.nn.class_swap import Mixin
from fp8engine.nn.group import NOT_RUN, Group
from fp8engine.ops.reference.activations import GATED

SMALL = Memory(recompute_activation=True)  # of a ReLU torch keeps one tensor; y and FP8(act(y)) would be more


class Lazy(ABC):
    """Placeholder of a tensor: its shape, dtype and device; anything else asked of it computes `value()`."""

    def __init__(self, group: Group, shape: torch.Size, like: Any):
        self.group, self.shape, self.dtype, self.device = group, shape, like.dtype, like.device
        self.records = torch.is_grad_enabled()
        self._value: torch.Tensor | None = None

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def value(self) -> torch.Tensor:
        """The tensor, computed by the modules' own forwards."""
        if self._value is None:
            self.group.note = "its result was read by other code too"
            with torch.set_grad_enabled(self.records):  # its first consumer may be under no_grad, and another not
                self._value = self._compute()
        return self._value

    @abstractmethod
    def _compute(self) -> torch.Tensor: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __mul__(self, other: Any) -> Any:
        product = gated(self, other)
        return value_of(self) * value_of(other) if product is None else product

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


_ARITHMETIC = (
    "add radd rmul sub rsub truediv rtruediv floordiv mod pow rpow neg abs matmul rmatmul iadd isub imul itruediv"
)
for _name in f"{_ARITHMETIC} getitem setitem len iter bool float array eq ne lt le gt ge".split():
    setattr(Lazy, f"__{_name}__", _of_value(f"__{_name}__"))
Lazy.__hash__ = object.__hash__


class Normed(Lazy):
    """norm(x).  ready: results of the group's layers that were made with another's and not asked for yet."""

    def __init__(self, group: Group, x: torch.Tensor):
        super().__init__(group, x.shape, x)
        counted = not torch.compiler.is_compiling() and not x.is_inference()
        self.x, self.version = x, x._version if counted else None
        self.ready: dict[int, torch.Tensor] = {}

    def source(self) -> torch.Tensor:
        """x, which must still be what the norm was given."""
        if self.version is not None and self.x._version != self.version:
            raise StateError(
                f"{self.group.label}: the norm's input was written in place before the norm's result was read; "
                "convert with fuse=False"
            )
        return self.x

    def _compute(self) -> torch.Tensor:
        plain: Any = super(FusedNorm, self.group.norm)  # pyright: ignore[reportArgumentType]
        return plain.forward(self.source())

    def through(self, layer: Any) -> torch.Tensor:
        """layer(norm(x)): made for all the group's layers when the first one asks."""
        layers = self.group.layers
        place = next(i for i, each in enumerate(layers) if each is layer)  # an id would make every block a graph
        if place not in self.ready:
            norm: Any = self.group.norm_of()
            made = norm_linear(self.source(), norm, [each.as_layer() for each in layers])
            self.ready = dict(enumerate(made))
        return self.ready.pop(place)


class Projected(Lazy):
    """layer(source), source a tensor or Normed."""

    def __init__(self, group: Group, layer: Any, source: torch.Tensor | Normed):
        layer_NK = layer.as_layer().weight_NK
        super().__init__(group, torch.Size((*source.shape[:-1], len(layer_NK))), source)
        if torch.is_autocast_enabled(source.device.type):
            self.dtype = torch.get_autocast_dtype(source.device.type)
        self.layer, self.source = layer, source

    def _compute(self) -> torch.Tensor:
        return linear(value_of(self.source), *self.layer.as_layer())

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        if self._value is None and chunks == 2 and dim in (-1, len(self.shape) - 1) and self.shape[-1] % 2 == 0:
            return Half(self, 0), Half(self, 1)
        return self.value().chunk(chunks, dim)


class Half(Lazy):
    """One half of [gate | up]."""

    def __init__(self, whole: Projected, index: int):
        super().__init__(whole.group, torch.Size((*whole.shape[:-1], whole.shape[-1] // 2)), whole)
        self.whole, self.index = whole, index

    def _compute(self) -> torch.Tensor:
        return self.whole.value().chunk(2, dim=-1)[self.index]


class Activated(Lazy):
    """act(source)."""

    def __init__(self, act: Any, source: Projected | Half):
        super().__init__(source.group, source.shape, source)
        self.act, self.source = act, source

    def _compute(self) -> torch.Tensor:
        plain: Any = super(FusedActivation, self.act)
        return plain.forward(self.source.value())


class Gated(Lazy):
    """act(gate) * up.  first: what the layers before them made, one or two."""

    def __init__(self, gate: Activated, up: Projected | Half, first: tuple[Projected, ...]):
        super().__init__(gate.group, gate.shape, gate)
        self.gate, self.up, self.first = gate, up, first

    def _compute(self) -> torch.Tensor:
        return self.gate.value() * self.up.value()


def gated(one: Any, other: Any) -> Gated | None:
    """The product one * other as a placeholder, if it is a group's act(gate) * up in either order."""
    one, other = known(one), known(other)
    gate, up = (one, other) if isinstance(one, Activated) else (other, one)
    if not isinstance(gate, Activated) or gate.group.kind not in GATED:
        return None
    source, layers = gate.source, gate.group.layers
    if isinstance(source, Projected) and isinstance(up, Projected) and source.source is up.source:
        return Gated(gate, up, (source, up)) if (source.layer, up.layer) == layers else None
    if isinstance(source, Half) and isinstance(up, Half) and source.whole is up.whole and up.index == 1:
        return Gated(gate, up, (source.whole,)) if source.index == 0 else None
    return None


PLACEHOLDERS = (Lazy, Proxy)


def value_of(x: Any) -> Any:
    """x, computed now if it is lazy."""
    return x.value() if isinstance(x, Lazy) else x


def known(x: Any) -> Any:
    """x, or its value where other code has had it: that code may have written it, or wait for its gradient."""
    return x if not isinstance(x, Lazy) or x._value is None else x._value


def _values(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _values(x) for key, x in nest.items()}
    return type(nest)(map(_values, nest)) if isinstance(nest, (tuple, list)) else value_of(nest)


def apply(layer: Any, x: Any) -> Any:
    """layer(x) of a converted layer that belongs to a group, or whose x is a placeholder, Lazy or torch.fx's Proxy.

    For torch.fx the layer is a leaf, one node of the graph, as an nn.Linear is.
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
    x = known(x)
    if group is not None:
        if isinstance(x, Normed) and x.group is group:
            return x.through(layer) if group.second is None else Projected(group, layer, x)
        if group.second is layer:
            if isinstance(x, Lazy) and x.group is group and (z := _whole_mlp(x)) is not None:
                return z
        elif group.norm is None:
            if isinstance(x, torch.Tensor) and group.runs_fused(x):
                return Projected(group, layer, x)
        elif group.note in ("", NOT_RUN):
            group.note = "its norm did not run before it"
    return linear(value_of(x), *layer.as_layer())


def _whole_mlp(x: Lazy) -> torch.Tensor | None:
    """The result of an MLP whose second layer is given x; None where x is not what its activation makes."""
    group = x.group
    if isinstance(x, Gated):
        first, kind = x.first, GATED[group.kind]
    elif isinstance(x, Activated) and isinstance(x.source, Projected) and len(group.layers) == 1:
        first, kind = (x.source,), group.kind
    else:
        return None
    firsts, source = tuple(each.layer.as_layer() for each in first), first[0].source
    tensor = source.source() if isinstance(source, Normed) else source
    norm = group.norm_of() if isinstance(source, Normed) else None
    memory = SMALL if kind == "relu" else KEEP
    return norm_mlp(tensor, norm, firsts if len(firsts) == 2 else firsts[0], group.second.as_layer(), kind, memory)


class FusedNorm(Mixin):
    """A norm whose result is lazy where its group runs fused, else its own forward's."""

    prefix = "Fused"
    group: Group

    def forward(self, *args, **kwargs):
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and self.group.runs_fused(args[0]):
            return Normed(self.group, args[0])
        return super().forward(*args, **kwargs)


class FusedActivation(Mixin):
    """An activation of a fused MLP: lazy where its input is."""

    prefix = "Fused"
    group: Group

    def forward(self, input):
        input = known(input)
        if isinstance(input, (Projected, Half)) and input.group is self.group:
            return Activated(self, input)
        return super().forward(value_of(input))
