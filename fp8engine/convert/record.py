"""Record of a conversion, an attribute of the model that fe.convert was given, and what an error puts back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp8engine.convert.bypassed import FirstForward
from fp8engine.convert.resumed import Resumed
from fp8engine.scaling.table import ScalingState

RECORD = "_fp8engine"  # attribute of a converted root
REPLACED = "a new layer stands where fe.convert changed one: replace layers (resize_token_embeddings) before fe.convert"
ADDED = "not converted: added after fe.convert (an adapter?)"


@dataclass
class Record:
    """Record of a conversion: why each layer was left alone, and the scaling states, one per device.

    classes: of the layers, by name, before the conversion.
    """

    reasons: dict[str, str]
    states: list[ScalingState]
    classes: dict[str, type[nn.Module]] = field(default_factory=dict)

    @functools.cached_property
    def known(self) -> dict[str, str]:
        """Why a layer is not converted, by the name that it had when the model was converted."""
        return {layer: REPLACED for state in self.states for layer, _ in state.layers} | self.reasons

    def why_left(self, name: str) -> str:
        """Why a layer is not converted; its name is as from the converted root."""
        known = self.known
        return known.get(name) or known.get(name.removesuffix(".base_layer")) or ADDED  # an adapter took the name

    def attach(self, model: nn.Module, strict: bool) -> None:
        """Follow the forwards, steps and loads of a converted root, which keeps this record."""
        FirstForward(model, strict)
        Resumed(model, self.states)
        for state in self.states:
            state.watch(model)
        setattr(model, RECORD, self)


def compiled_in_place(module: nn.Module) -> str | None:
    """ "torch.compile" for a module on which `compile()` was called; its class is as it was.  None for others."""
    return "torch.compile" if getattr(module, "_compiled_call_impl", None) is not None else None


@contextlib.contextmanager
def undone_by_errors(model: nn.Module) -> Iterator[None]:
    """A block whose error gives every module of the model the class and the attributes that it had before."""
    kept = [(module, type(module), _attributes(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, kind, attributes in kept:
            module.__class__ = kind
            vars(module).clear()
            for key, held, content in attributes:
                if content is not None:  # the same dict again: handles of hooks refer to it
                    held.clear()
                    held.update(content)
                vars(module)[key] = held
        raise


def _attributes(module: nn.Module) -> list[tuple[str, Any, dict | None]]:
    """(name, value, a copy of the value where it is a dict: parameters, hooks) of a module's attributes, in order."""
    return [(key, held, dict(held) if isinstance(held, dict) else None) for key, held in vars(module).items()]
