"""fe.smooth, a remedy for outliers in the product of a gated MLP, act(gate) * up.

It acts on the input of the down-projection, and is a setting of that layer: autograd/smooth.py has the formulas.
Gated MLPs are found by what they compute (probe.py), and of our own modules, which call no child, by their names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fp8engine._torch import Model
from fp8engine.autograd.features import SMOOTH
from fp8engine.autograd.smooth import Smooth
from fp8engine.convert.probe import gated_products
from fp8engine.errors import ConversionError, UnknownName
from fp8engine.nn.attention import Attention
from fp8engine.nn.experts import Float8Experts
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.nn.layernorm_linear import LayerNormLinear
from fp8engine.nn.layernorm_mlp import LayerNormMLP
from fp8engine.nn.linear import Float8Module, float8_modules
from fp8engine.nn.transformer import MLP

OURS = (LayerNormLinear, LayerNormMLP, MLP, Attention)  # of their layers, only the down-projection of a gated MLP


def smooth(model: Model, names: str | Iterable[str] | None = None, *, on: bool = True) -> Model:
    """Smooth-SwiGLU: share the outliers of gated MLPs' products with the down-projections' weights; returns the model.

    Every call divides channel k of the product by s_k = 2^floor(log2(amax_k) / 2) before its cast, and multiplies
    column k of the weight by it before its cast: in real arithmetic the layer and its gradients are what they were
    (arXiv 2409.12517; how the amax is shared: arXiv 2211.10438).  A remedy where `auto` warns of the input of a
    down-projection: one large channel no longer takes the range of the others.  It costs a pass over the product and
    one over the weight, in forward and again in backward.

    model: one that fe.convert has converted, or that holds modules of ours.
    names: globs over names of gated MLPs, of their down-projections, or of any other fe.Linear; None: all gated MLPs.
    on: False takes it away again, as fe.revert does.  A setting, in no state_dict; copies and pickles of the model have
    it.  fe.convert takes no converted model: after fe.revert and fe.convert, call it again.
    Without effect while a layer is in 16 bits.  No codes are written beside the product of a smoothed layer.

    Raises ConversionError where there is nothing to smooth, for a layer that is no down-projection, and for what
    excludes it (autograd/features.py); UnknownName for a glob that matches nothing.  Nothing is changed then.
    A forward under torch.func's transforms raises GradientError.

    >>> mlp = LayerNormMLP(32, 64, "swiglu", recipe="current")
    >>> _ = smooth(mlp)
    >>> mlp.down.numerics.smooth
    True
    """
    for layer in _chosen(model, names).values():
        layer.numerics.switch(Smooth() if on else None)
    propose(model)
    return model


def gated(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of the down-projection of every gated MLP in `model` whose down-projection has a recipe.

    >>> [name for name, _ in gated(nn.Sequential(LayerNormMLP(32, 64, "swiglu", recipe="current")))]
    ['0.down']
    """
    products = gated_products(model)
    for above, module in model.named_modules():
        last = products[above].down if above in products else ""
        if isinstance(module, LayerNormMLP | MLP) and ("gate_up" in module._modules or "gate_proj" in module._modules):
            last = "down" if isinstance(module, LayerNormMLP) else "down_proj"
        if not last:
            continue
        layer: Any = module.get_submodule(last)
        if "base_layer" in layer._modules:  # under an adapter
            last, layer = f"{last}.base_layer", layer.base_layer
        if _takes(layer):
            yield f"{above}.{last}" if above else last, layer


def propose(model: nn.Module) -> None:
    """Tell `auto`, whose alarms name slots, the remedy for the input of each gated MLP's down-projection."""
    if all(module.numerics.state.controller is None for module in float8_modules(model)):
        return  # no alarm is given, so nothing has to be recognised
    for name, layer in gated(model):
        numerics = layer.numerics
        if (controller := numerics.state.controller) is None:
            continue
        remedies, slot = controller.history.remedies, f"{numerics.name}.input"
        remedies.pop(slot, None)
        if not numerics.smooth:
            remedies[slot] = f"fe.smooth(model, {name!r})"


def _takes(layer: Any) -> bool:
    """Whether this is a Float8Module of one weight matrix."""
    return isinstance(layer, Float8Module) and hasattr(layer, "as_layer")


def _chosen(model: nn.Module, names: str | Iterable[str] | None) -> dict[str, Any]:
    """The layers to change, by name.  Raises as `smooth` says."""
    ConversionError.unless(model, nn.Module, "smooth takes an nn.Module")
    if not any(isinstance(module, Float8Module) for module in model.modules()):
        raise ConversionError(f"smooth: {type(model).__name__} has no converted layers; call fe.convert first")
    downs = dict(gated(model))
    if names is None:
        for module in model.modules():
            if isinstance(module, Float8Experts | GroupedLinear):
                _refuse(module)
        chosen = downs
        if not chosen:
            raise ConversionError(f"smooth: no gated MLP is found in {type(model).__name__}; name its down-projections")
    else:
        ConversionError.unless(names, Iterable, "smooth: names are one glob or several")
        patterns = [names] if isinstance(names, str) else list(names)
        chosen = {name: layer for pattern in patterns for name, layer in _matching(model, downs, pattern)}
    for layer in chosen.values():
        _refuse(layer)
    return chosen


def _refuse(layer: Any) -> None:
    """Raise ConversionError for a layer that is or has what excludes fe.smooth."""
    if why := layer.numerics.why_not(SMOOTH):
        raise ConversionError(why)


def _matching(model: nn.Module, downs: dict[str, Any], pattern: str) -> list[tuple[str, Any]]:
    """(name, layer) of what a glob names."""
    matches = lambda name: fnmatch.fnmatchcase(name, pattern)  # noqa: E731 - two uses
    parent = lambda name: name.removesuffix(".base_layer").rpartition(".")[0]  # noqa: E731
    if found := [(name, layer) for name, layer in downs.items() if matches(name) or matches(parent(name))]:
        return found
    owned = {id(child) for module in model.modules() if isinstance(module, OURS) for child in module.children()}
    for name, module in model.named_modules():
        if not isinstance(module, Float8Module | GroupedLinear) or not matches(name):
            continue
        _refuse(module)
        if not _takes(module) or id(module) in owned:
            known = ", ".join(downs) or "none"
            raise ConversionError(
                f"{name}: smooth takes the down-projections of gated MLPs, and it is a {type(module).__name__} that is "
                f"none; those of {type(model).__name__}: {known}"
            )
        found.append((name, module))
    if not found:
        raise UnknownName("layer for smooth (no converted layer matches it)", pattern, downs)
    return found
