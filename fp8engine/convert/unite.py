"""One scaling state for the layers of a model that was built with fe.Linear, instead of one for each layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fp8engine.auto import attach
from fp8engine.convert.outliers import propose
from fp8engine.convert.placement import device_of
from fp8engine.convert.record import Record
from fp8engine.errors import ConversionError
from fp8engine.nn.linear import Linear
from fp8engine.nn.together import numerics_together
from fp8engine.numerics.recipe import Auto
from fp8engine.scaling.table import ScalingState


def unite(model: nn.Module, reasons: Mapping[str, str], strict: bool = False) -> list[ScalingState]:
    """Make the fe.Linear layers of `model`, each made by itself, what fe.convert would have made of them.

    They share one scaling state on each device, have their names in `model`, keep their recipes, and follow the
    forwards of `model`.  What their own states held is dropped.  Returns the states.
    reasons: layer -> why it was left alone, for the report.  strict: a layer that is bypassed raises StrictError.
    Raises ConversionError for a model without such layers, or in which layers share a state already.

    >>> model = nn.Sequential(Linear(32, 64, recipe="current"), nn.ReLU(), Linear(64, 32, recipe="current"))
    >>> (state,) = unite(model, {})
    >>> [name for name, _ in state.layers], model[2].numerics.state is state
    (['0', '2'], True)
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    if not layers:
        raise ConversionError(f"unite: {type(model).__name__} has no fe.Linear")
    if taken := [name for name, layer in layers.items() if not layer.numerics.standalone]:
        raise ConversionError(f"unite: {taken[0]!r} shares a scaling state already: fe.convert or unite a model once")
    wheres = [(name, layer.numerics.recipe, device_of(layer)) for name, layer in layers.items()]
    made, states = numerics_together(wheres)
    for layer, numerics in zip(layers.values(), made, strict=True):
        layer.numerics = numerics
    for state in states:
        autos = [
            layer
            for layer in layers.values()
            if layer.numerics.state is state and isinstance(layer.numerics.recipe, Auto)
        ]
        if autos:
            attach([layer.numerics for layer in autos], [tuple(layer.weight.shape) for layer in autos])
    propose(model)
    Record(dict(reasons), states).attach(model, strict)
    return states
