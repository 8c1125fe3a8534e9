"""Dry runs of modules' twins on the meta device, which show how a module's code uses the weights of its own layers.

    multiplies by a weight and never calls the layer    torch's nn.MultiheadAttention, Mamba's mixer
    casts to the dtype of a weight                      T5's MLP: with FP8 codes there, its cast would be to FP8
    has it as its own, and is saved with it             PatchTSMixer, whose first parameter is a linear layer's

A dry run has shapes and no numbers, so it costs a millisecond however large the layers are.  Code that takes more than
one tensor, or looks at its data, tells nothing: the first forward will (bypassed.py).  For a weight's dtype no forward
does, before codes stand there: of such code the names are read (`_asked_in_code`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from fp8engine.convert.twin import (
    Mode,
    StandIn,
    adapted,
    codes_of,
    dtypes_asked,
    is_linear,
    parts_of,
    plain_class,
    quiet,
    run,
    twin_of,
    weights_written,
)

CODES = torch.float8_e4m3fn
MOST_PARTS = 64  # of a module that is run: no whole models
READ = "its weight was read"
Notes = dict[str, set]  # of each layer in a run: READ, and the dtypes that it was called with


def uncalled(model: nn.Module) -> dict[int, str]:
    """ids of linear layers whose weight their parent's code reads and never calls -> why they are left alone."""
    why = "reads its weight and never calls it"
    return {id(layer): f"{kind} {why}" for kind, layer, called, _ in _uses(model) if not called}


def asked_for_dtype(model: nn.Module) -> dict[int, str]:
    """ids of layers whose weight other code writes to, or asks for its dtype -> why it cannot become FP8 codes."""
    why = "casts to the dtype of its weight, which codes would make FP8"  # or multiplies by it, in another mode
    uses = list(_uses(model))
    ran = {id(layer) for _, layer, _, _ in uses}
    found = {id(layer): f"{kind} {why}" for kind, layer, called, asks in uses if called and asks}
    found |= {id(layer): f"{kind} {why}" for kind, layer in _asked_in_code(model) if id(layer) not in ran}
    found |= {id(layer): f"{kind} writes to its weight" for kind, layer in _written(model)}
    why = "has the dtype of its weight, and save_pretrained writes that into config.json"
    firsts = ((part, _first(part)) for part in _saved(model))
    return {id(adapted(first)): f"{type(part).__name__} {why}" for part, first in firsts if is_linear(first)} | found


def _first(module: nn.Module) -> nn.Module:
    """The part that owns the first floating-point parameter, whose dtype is that of one of transformers' models."""
    owners = (each for each in module.modules() if any(p.is_floating_point() for p in each.parameters(False)))
    return next(owners, module)


def _saved(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that have a `dtype` and are saved with it, and none inside another one."""
    inside = set()
    for module in model.modules():
        if id(module) not in inside and hasattr(type(module), "save_pretrained") and hasattr(type(module), "dtype"):
            inside |= {id(part) for part in module.modules()}
            yield module


def _asked_in_code(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(class of the module, layer) of linear layers for whose weight's dtype the module's code asks by their path.

    SigLIP 2's embeddings write `self.patch_embedding.weight.dtype`, and take two tensors.  The `dtype` of one of
    transformers' models is that of its first parameter: Granite Speech casts to `self.dtype`.
    """
    for module, paths in _told_by_code(model, dtypes_asked):
        for path in paths:
            with contextlib.suppress(AttributeError):  # an attribute of something else
                part = module.get_submodule(path.removesuffix(".weight"))
                layer = _first(part)
                if (path.endswith(".weight") or hasattr(type(part), "dtype")) and is_linear(layer):
                    yield plain_class(module).__name__, adapted(layer)


def _written(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(class of the module, layer) of linear layers in a module whose code writes to their weights.

    RWKV divides two of a block in evaluation: `block.attention.output.weight.div_(...)`.
    """
    for module, paths in _told_by_code(model, weights_written):
        ends = tuple(f".{path}" for path in paths)
        for name, part in module.named_modules():
            if f".{name}.weight".endswith(ends) and is_linear(part):
                yield plain_class(module).__name__, adapted(part)


def _told_by_code(model: nn.Module, told: Callable[[CodeType], set[str]]) -> Iterator[tuple[nn.Module, set[str]]]:
    """(module, paths that the code of its class tells) of each module of whose code any are told."""
    by_class: dict[type, set[str]] = {}
    for module in model.modules():
        if (kind := plain_class(module)) not in by_class:
            by_class[kind] = {path for code in codes_of(module) for path in told(code)}
        if by_class[kind]:
            yield module, by_class[kind]


def _uses(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool, bool]]:
    """(class of the module that holds it, layer, called, asks) of layers whose weight that module's code reads.

    asks: it computes something else if the weight is FP8 codes.  One module of each class is run.
    """
    found: dict[tuple, dict[str, tuple[bool, bool]]] = {}
    for module in model.modules():
        try:
            own = {name: part for name, part in module._modules.items() if part is not None and is_linear(part)}
            kind = plain_class(module)
            key = (kind, kind.forward, *own)
            if own and key not in found:
                found[key] = {}
                found[key] = _look(module, list(own))
        except Exception:  # the module's own code may raise anything
            continue
        for name, (called, asks) in found.get(key, {}).items():
            yield kind.__name__, adapted(own[name]), called, asks


def _look(module: nn.Module, own: list[str]) -> dict[str, tuple[bool, bool]]:
    """(called, asks) of each layer whose weight is read."""
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return {"out_proj": (False, False)}  # it takes three tensors; torch's operator takes all weights
    plain = _runs(module)
    found = {}
    for name in own:
        notes = [run[name] for run in plain]
        if any(READ in each for each in notes):
            multiplied = any(each == {READ} for each in notes)
            found[name] = any(each - {READ} for each in notes), multiplied or _runs(module, name) != plain
    return found


class _Noted(StandIn):
    """A linear layer of a dry run, which notes what is done with it."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype):
        super().__init__(layer, dtype)
        self.notes = set()

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.notes.add(READ)
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.add(x.dtype)
        return x.new_empty((*x.shape[:-1], self.out_features), dtype=torch.float32)


def _runs(module: nn.Module, codes: str = "") -> list[Notes]:
    """The notes of each run that came to its end, in training and in evaluation.  codes: the layer whose weight is FP8.

    Its input is as wide as the first of the module's layers with which the run ends.
    """
    parts = dict(parts_of(module))
    linear = {name: part for name, part in parts.items() if name and is_linear(part)}
    ended = []
    for training in (True, False) if len(parts) <= MOST_PARTS else ():
        layers = {name: _Noted(part, CODES if name == codes else torch.float32) for name, part in linear.items()}
        twin = twin_of(module, layers, fill=_shape_of)
        for width in dict.fromkeys(layer.in_features for layer in layers.values()):
            for layer in layers.values():
                layer.notes.clear()
            try:
                with quiet():
                    run(twin, Mode(training), torch.empty(1, 4, width, device="meta"))
            except Exception:  # another layer's width, or the module's own code
                continue
            ended.append({name: layer.notes for name, layer in layers.items()})
            break
    return ended


def _shape_of(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.float32 if like.is_floating_point() else like.dtype, device="meta")
