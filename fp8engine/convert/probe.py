"""Recognition of norms, activations and MLPs by what they compute, not by their names.

A twin of the module (twin.py) runs on a small float64 input, in training and in evaluation, and its result is compared
with the formulas of ops/reference.  What differs anywhere is not recognised: dropout with p > 0, a clamp, another
scale or order, an eps that depends on the mode or the dtype; nor is a module that counts its calls or keeps what it
saw.  The model itself never runs, and nothing of it or of torch's global state changes.  Hooks on the module are not
seen: whoever replaces a forward asks for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from fp8engine.convert.probe_mlps import Mlp, activation, mlp, product
from fp8engine.convert.probe_norms import norm
from fp8engine.convert.twin import is_linear, own_attributes, plain_class, quiet
from fp8engine.ops.reference import Norm
from fp8engine.ops.reference.activations import ACTIVATIONS

MODES = (True, False)  # training, evaluation
Found = Norm | Mlp | str  # a str is an activation's kind


def norm_of(module: nn.Module) -> Norm | None:
    """The norm over its input's last dimension that a module computes.  Its `weight` and `bias` are [K], or absent.

    >>> norm_of(nn.LayerNorm(32, eps=1e-6)), norm_of(nn.Linear(32, 32))
    (Norm(kind='layer', eps=1e-06, zero_centered=False), None)
    """
    return _Survey().look(norm, module)


def activation_of(module: nn.Module) -> str | None:
    """The kind, of those in ACTIVATIONS that have no gate, of the function that a module without parameters computes.

    >>> activation_of(nn.GELU(approximate="tanh")), activation_of(nn.Tanh())
    ('gelu_tanh', None)
    """
    return _Survey().look(activation, module)


def mlp_of(module: nn.Module, *, training: bool = True) -> Mlp | None:
    """The MLP that a module is.  training=False: in evaluation alone, where dropout makes no difference.

    A module that holds its layers in one child is none: the child is.

    >>> mlp_of(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)))
    Mlp(kind='silu', down='2', up='0', gate='', gate_up='', up_gate='', activation='1', residual=False)
    """
    return _Survey(MODES if training else (False,)).look(mlp, module)


def survey(model: nn.Module, *, training: bool = True) -> dict[str, Found]:
    """Path -> what it is, of every norm, MLP and activation in `model`, and of none inside an MLP that is in it.

    >>> survey(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.Dropout(), nn.ReLU()))
    {'0': Norm(kind='layer', eps=1e-05, zero_centered=False), '3': 'relu'}
    """
    probe, found = _Survey(MODES if training else (False,)), {}
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        what = probe.look(norm, module) or probe.look(activation, module) or probe.look(mlp, module)
        if what is not None:
            found[path] = what
            inside |= {id(part) for part in module.modules()}
    return found


def gated_products(model: nn.Module) -> dict[str, Mlp]:
    """Path -> the gated product that a module's `down` reads, in evaluation, whatever the module does beside it.

    >>> list(gated_products(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))))
    []
    """
    probe = _Survey((False,))
    found = {path: probe.look(product, module) for path, module in model.named_modules()}
    return {path: what for path, what in found.items() if what is not None and ACTIVATIONS[what.kind].gated}


@dataclass
class _Survey:
    """One call's modes, and what it has found: of modules that are alike, one is run."""

    modes: tuple[bool, ...] = MODES
    found: dict[tuple, Any] = field(default_factory=dict)

    def look(self, at: Callable, module: nn.Module) -> Any:
        """What `at` finds in a module, or has found in one that is alike; None where anything was raised."""
        try:
            if (prepared := at(module)) is None:
                return None
            key = (at, _identity(module))
            if key not in self.found:
                self.found[key] = None
                with quiet():
                    self.found[key] = prepared(self.modes)
            return self.found[key]
        except Exception:  # the module's own code may raise anything
            return None


def _identity(module: nn.Module) -> tuple:
    """What two modules have in common that compute the same, but for the values of their parameters."""
    if is_linear(module):
        layer: Any = getattr(module, "base_layer", module)
        return ("linear", layer.weight.shape, hasattr(layer, "nf"), layer.bias is None)
    kind = plain_class(module)
    own = tuple((key, _value(value, module)) for key, value in own_attributes(module))
    shapes = tuple((key, None if p is None else p.shape) for key, p in module._parameters.items())
    children = tuple((key, child and _identity(child)) for key, child in module._modules.items())
    return kind, kind.forward, "forward" in vars(module), own, shapes, tuple(module._buffers), children


def _value(value: Any, owner: nn.Module) -> Any:
    """Something that is equal for equal plain values, and for others only for the same object."""
    if isinstance(value, MethodType) and value.__self__ is owner:
        return value.__func__
    if isinstance(value, functools.partial):
        return "partial", value.func, _value(value.args, owner), _value((*value.keywords.items(),), owner)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
