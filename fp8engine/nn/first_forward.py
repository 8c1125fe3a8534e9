"""The first forward of a converted model: scaling states follow weights that moved, and bypassed layers are found.

A layer is bypassed where other code reads its weight and never calls it: the report would say FP8 of what ran in the
weight's own precision.  That nobody called a layer proves nothing (a branch, an unused expert), and that somebody read
its weight does not either (its own forward does); both together do.  A read is an attribute of a module, so for one
forward the layers have a class that notes it.  Layers within torch.compile keep theirs: its graphs depend on the class.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from fp8engine.errors import BypassWarning, ParallelError, StrictError
from fp8engine.nn.dispatched import device_of
from fp8engine.nn.linear import Float8Module
from fp8engine.nn.mixed import Mixin, mixed
from fp8engine.scaling.table import ScalingState

READ = "_read"  # attribute of a watched layer: names of its parameters that were read


class Watched(Mixin):
    """A converted layer during the first forward."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in self._parameters:
            self.__dict__.setdefault(READ, set()).add(name)
        return found


class FirstForward:
    """Two hooks of a converted root, gone after the first forward that returns something.

    strict: a bypassed layer raises StrictError instead of the BypassWarning.
    """

    def __init__(self, model: nn.Module, strict: bool):
        self.strict = strict
        self.before = model.register_forward_pre_hook(self.begin)
        self.after = model.register_forward_hook(self.end, always_call=True)  # an error must not leave layers watched

    def begin(self, model: nn.Module, _) -> None:
        """Put states where their layers are, and watch every layer."""
        if torch.compiler.is_compiling():
            return
        _place([layer for layer in model.modules() if isinstance(layer, Float8Module)])
        for layer in list(_eager(model)):
            kind = type(layer)  # asked once: another thread's first forward may end now
            if issubclass(kind, Float8Module) and not issubclass(kind, Watched):
                layer.__class__ = mixed(Watched, kind)

    def end(self, model: nn.Module, _, output: object) -> None:
        """Say what was bypassed.  output: None after an error, and the next forward is the first then."""
        if torch.compiler.is_compiling():
            return
        if output is not None:
            self.before.remove()  # before the classes are put back: no other thread begins after that
        bypassed = []
        for layer in model.modules():
            kind = type(layer)
            if not issubclass(kind, Watched):
                continue
            layer.__class__ = kind.plain
            for name in vars(layer).pop(READ, ()):
                numerics = cast(Float8Module, layer).numerics_of(name)
                if numerics is not None and numerics.recipe.is_fp8 and numerics.ran is None:
                    bypassed.append(numerics)
        if output is None:
            return
        self.after.remove()
        for numerics in bypassed:
            numerics.bypassed = True
        if bypassed:
            self._say([numerics.name for numerics in bypassed])

    def _say(self, names: list[str]) -> None:
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        text = (
            f"{len(names)} converted layer(s) did not run in FP8: {shown}. The model reads their weight and does not "
            "call them, so they compute as before fe.convert. Call them, or leave them alone with overrides or skip"
        )
        if self.strict:
            raise StrictError(f"strict=True: {text}")
        warnings.warn(text, BypassWarning, stacklevel=2)


def _place(layers: list[Float8Module]) -> None:
    """Move the tables of layers converted on the meta device to where their weights have been loaded since."""
    found: dict[int, tuple[ScalingState, dict[torch.device, str]]] = {}
    for layer in layers:
        for name in layer._parameters:
            numerics = layer.numerics_of(name)
            if numerics is None or numerics.state.device.type != "meta":
                continue
            if (where := device_of(layer, name)).type != "meta":
                found.setdefault(id(numerics.state), (numerics.state, {}))[1][where] = numerics.name
    for state, places in found.values():
        if len(places) > 1:
            now = " and ".join(f"{where} ({name})" for where, name in places.items())
            raise ParallelError(
                f"layers converted on the meta device are now on {now}, and one scaling state has one device: "
                "load and dispatch the model first, then fe.convert"
            )
        (where,) = places
        state.apply(lambda table, where=where: torch.empty_like(table, device=where))


def _eager(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its parts, without those that torch.compile has taken."""
    if module._compiled_call_impl is None and "_orig_mod" not in module._modules:
        yield module
        for child in module.children():
            yield from _eager(child)
