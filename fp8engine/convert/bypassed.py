"""Converted layers that are bypassed, because other code reads their weight and never calls them.

    torch's nn.TransformerEncoder   in evaluation hands all weights to one operator: kept from that fast path
    what a dry run tells            Mamba reads `self.dt_proj.weight` and never calls it: convert leaves it (dry_run.py)
    everything else                 found in the first forward, and where that is an evaluation's in the first of
                                    training too (Gemma 3n reads in one and calls in the other): BypassWarning,
                                    or StrictError

The report would otherwise say FP8 of what ran in the weight's own precision.  A layer that was not called proves
nothing (a branch, an unused expert), and a weight that was read does not either (its own forward reads it); both
together do.  A read is an attribute of a module, so during one forward the layers have a class that notes it.  Layers
under torch.compile keep theirs: compiled graphs are guarded by the class.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from fp8engine._torch import is_compiled
from fp8engine.autograd import Numerics
from fp8engine.convert.placement import place_states
from fp8engine.errors import BypassWarning, StrictError
from fp8engine.nn.class_swap import Mixin, change_class, mix, mixed
from fp8engine.nn.linear import Float8Module, float8_modules

# Attribute of a watched layer: names of its parameters that were read, what the matmul of each ran on before.
READ = "_read"


class CallsItsLayers(Mixin):
    """An encoder or an encoder layer of torch whose forward calls each layer, in evaluation as in training.

    Torch sets both attributes on the instance when the module is made, and asks them whether the fast path may be
    taken.  A property of the class answers first, so that the instance and every other encoder stay as they are.
    """

    @property
    def activation_relu_or_gelu(self) -> int:
        """Of an encoder layer: 0, an activation that the fast path does not know."""
        return 0

    @property
    def use_nested_tensor(self) -> bool:
        """Of an encoder: no nested tensors, which only the fast path takes."""
        return False


def call_layers(model: nn.Module) -> None:
    """Keep every encoder and encoder layer with a converted layer in it from the fast path."""
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer) and float8_modules(module):
            mix(module, CallsItsLayers)


class Watched(Mixin):
    """A converted layer during the first forward."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in self._parameters:
            self.__dict__.get(READ, (set(),))[0].add(name)
        return found


class FirstForward:
    """Two hooks of a converted root, gone after the first forward in training that returns something.

    Of evaluations the first alone is watched.  evaluated: whether it was.
    strict: a bypassed layer raises StrictError instead of the BypassWarning.
    """

    def __init__(self, model: nn.Module, strict: bool):
        self.strict = strict
        self.evaluated = False
        self.before = model.register_forward_pre_hook(self.begin)
        self.after = model.register_forward_hook(self.end, always_call=True)  # an error must not leave layers watched

    def begin(self, model: nn.Module, _) -> None:
        """Put scaling states where their layers are, and watch every layer."""
        if torch.compiler.is_compiling() or (self.evaluated and not model.training):
            return
        if not self.evaluated:
            place_states(model)
        for layer in list(_eager(model)):
            kind = type(layer)  # read once: another thread's first forward may end now
            if issubclass(kind, Float8Module) and not issubclass(kind, Watched):
                before: dict[str, str | None] = {}
                vars(layer)[READ] = set(), before
                change_class(layer, mixed(Watched, kind))
                for name in layer._parameters:
                    if (numerics := cast(Float8Module, layer).numerics_of(name)) is not None:
                        before[name], numerics.ran = numerics.ran, None

    def end(self, model: nn.Module, _, output: object) -> None:
        """Warn of what was bypassed.  output: None after an error, and the next forward is the first then."""
        if torch.compiler.is_compiling():
            return
        if output is not None and model.training:
            self.before.remove()  # before the classes are put back: no other thread begins after that
        idle: list[tuple[Numerics, bool]] = []
        for layer in model.modules():
            kind = type(layer)
            if not issubclass(kind, Watched):
                continue
            change_class(layer, kind.plain)
            read, before = vars(layer).pop(READ, ((), {}))
            for name in layer._parameters:
                numerics = cast(Float8Module, layer).numerics_of(name)
                if numerics is not None and numerics.recipe.is_fp8 and numerics.ran is None:
                    idle.append((numerics, name in read))
                    numerics.ran = before.get(name)
        if output is None:
            return
        self.evaluated = True
        if model.training:
            self.after.remove()
        names = [numerics.name for numerics, bypassed in idle if bypassed and not numerics.bypassed]
        for numerics, bypassed in idle:
            numerics.bypassed = numerics.bypassed or bypassed
        if names:
            self._report(names)

    def _report(self, names: list[str]) -> None:
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        text = (
            f"{len(names)} converted layer(s) did not run in FP8: {shown}. The model reads their weight and does not "
            "call them, so they compute as before fe.convert. Call them, or leave them alone with overrides or skip"
        )
        if self.strict:
            raise StrictError(f"strict=True: {text}")
        warnings.warn(text, BypassWarning, stacklevel=2)


def _eager(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its parts, without those that torch.compile has taken."""
    if module._compiled_call_impl is None and "_orig_mod" not in module._modules and not is_compiled(module.forward):
        yield module
        for child in module.children():
            yield from _eager(child)
