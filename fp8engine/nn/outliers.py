"""fe.smooth and fe.clamp, remedies for outliers in the product of a gated MLP, act(gate) * up.

They act on the input of the down-projection, and are settings of that layer: autograd/smooth.py has the formulas.
Gated MLPs are found by the names of their layers: those of the table of families, of our own modules, and of Llama's
first code (w1, w3, w2).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fp8engine.errors import ConversionError, ParallelError, UnknownName
from fp8engine.nn.attention import Attention
from fp8engine.nn.experts import Float8Experts
from fp8engine.nn.families import FAMILIES, Experts
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.nn.layernorm_linear import LayerNormLinear
from fp8engine.nn.layernorm_mlp import LayerNormMLP
from fp8engine.nn.linear import Float8Module
from fp8engine.nn.transformer import MLP

OURS = (LayerNormLinear, LayerNormMLP, MLP, Attention)  # they call no child of theirs
MORE = {(("gate_up",), "down"), (("gate", "up"), "down"), (("w1", "w3"), "w2")}


def smooth(model: nn.Module, names: str | Iterable[str] | None = None, *, on: bool = True) -> nn.Module:
    """Smooth-SwiGLU: share the outliers of gated MLPs' products with the down-projections' weights; returns the model.

    Every call divides channel k of the product by s_k = 2^floor(log2(amax_k) / 2) before its cast, and multiplies
    column k of the weight by it before its cast: in real arithmetic the layer and its gradients are what they were
    (arXiv 2409.12517; how the amax is shared: arXiv 2211.10438).  A remedy where `auto` warns of the input of a
    down-projection: one large channel no longer takes the range of the others.  It costs a pass over the product and
    one over the weight, in forward and again in backward.

    model: one that fe.convert has converted, or that holds modules of ours.
    names: globs over names of gated MLPs, of their down-projections, or of an fe.Linear that nothing fuses; None: all
    gated MLPs.  on: False takes it away again, as fe.revert does.  A setting, in no state_dict; copies and pickles of
    the model have it.  fe.convert takes no converted model: after fe.revert and fe.convert, call it again.
    Without effect while a layer is in 16 bits.  A fused MLP keeps its norm and first layers fused, and multiplies the
    product by itself.

    Raises ConversionError where there is nothing to smooth, for a layer that is no down-projection, for experts, and
    where fe.fuse_wgrad_accumulation is on; ParallelError for a layer that ranks divide; UnknownName for a glob that
    matches nothing.  Nothing is changed then.  A forward under torch.func's transforms raises GradientError.

    >>> mlp = LayerNormMLP(32, 64, "swiglu", recipe="current")
    >>> _ = smooth(mlp)
    >>> mlp.down.numerics.treated
    'smoothed'
    """
    chosen = _chosen(model, names, "smooth")
    for name, layer in chosen.items():
        if on and layer.numerics.fused_wgrad:
            raise ConversionError(
                f"{name}: fe.fuse_wgrad_accumulation adds its weight's gradient to main_grad inside the matmul, before "
                "the scales of fe.smooth: switch it off for this layer, or leave the layer out of fe.smooth"
            )
    return _set(model, chosen, lambda numerics: (on, numerics.limit))


def clamp(model: nn.Module, limit: float | None, names: str | Iterable[str] | None = None) -> nn.Module:
    """Clamp the products of gated MLPs: down(clamp(act(gate) * up, -limit, limit)); returns the model.

    The gradient passes straight within the limit, and is 0 beyond it.  Inf and NaN stay, so that a loss scaler sees
    them.  Another function than the model's: train with it, and keep it when the model is used elsewhere, because
    neither a state_dict nor an export says that it is there.  gpt-oss has it in its SwiGLU (`_apply_gate` of
    transformers' modeling_gpt_oss.py: gate at most 7, up within [-7, 7], before they are multiplied), which bounds the
    product by 7 * 8; that formula is the activation "clamped_swiglu" of fe.LayerNormMLP.  Here the product itself is
    clamped, whatever the activation.

    limit: greater than 0; None takes the clamp away, as fe.revert does.  model, names: as of fe.smooth, whose errors
    this raises too, but for main_grad; it works in 16 bits and under torch.func.  ConversionError for another limit.

    >>> mlp = LayerNormMLP(32, 64, "swiglu", recipe="current")
    >>> clamp(smooth(mlp), 7.0, "down").down.numerics.treated
    'smoothed and clamped to ±7'
    """
    if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
        raise ConversionError(f"clamp: limit is {limit!r}; it takes a finite number greater than 0, or None for none")
    return _set(model, _chosen(model, names, "clamp"), lambda numerics: (numerics.smooth, limit))


def gated(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of the down-projection of every gated MLP in `model` whose down-projection has a recipe.

    >>> [name for name, _ in gated(nn.Sequential(LayerNormMLP(32, 64, "swiglu", recipe="current")))]
    ['0.down']
    """
    known = _names_of_layers()
    for above, module in model.named_modules():
        for first, last in known:
            down = module._modules.get(last)
            if down is not None and all(module._modules.get(name) is not None for name in first):
                path, layer = last, getattr(down, "base_layer", down)
                if layer is not down:  # an adapter around it
                    path = f"{last}.base_layer"
                if _takes(layer):
                    yield f"{above}.{path}" if above else path, layer
                break


def propose(model: nn.Module) -> None:
    """Tell `auto`, whose alarms name slots, the remedy for the input of each gated MLP's down-projection."""
    for name, layer in gated(model):
        numerics = layer.numerics
        if (controller := numerics.state.controller) is None:
            continue
        remedies, slot = controller.history.remedies, f"{numerics.name}.input"
        remedies.pop(slot, None)
        if not numerics.smooth:
            remedies[slot] = f"fe.smooth(model, {name!r})"
        elif numerics.limit is None:
            remedies[slot] = f"fe.clamp(model, limit, {name!r})"


def _names_of_layers() -> set[tuple[tuple[str, ...], str]]:
    """((gate, up) or (gate_up,), down) as children of one module are named."""
    found = set(MORE)
    for structure in (structure for row in FAMILIES.values() for structure in row):
        mlp = structure.mlp
        triples = [(mlp.gate, mlp.up, mlp.down), (mlp.gate_up, "", mlp.down)]
        if isinstance(mlp, Experts):
            triples.append((mlp.shared_gate, mlp.shared_up, mlp.shared_down))
        for gate, up, down in triples:
            if gate and down:
                first = tuple(name.rpartition(".")[2] for name in (gate, up) if name)
                found.add((first, down.rpartition(".")[2]))
    return found


def _takes(layer: Any) -> bool:
    """Whether this is a Float8Module of one weight matrix."""
    return isinstance(layer, Float8Module) and hasattr(layer, "as_layer")


def _chosen(model: nn.Module, names: str | Iterable[str] | None, who: str) -> dict[str, Any]:
    """The layers to change, by name.  Raises as `smooth` says."""
    if not isinstance(model, nn.Module):
        raise ConversionError(f"{who} takes an nn.Module, not {type(model).__name__}")
    if not any(isinstance(module, Float8Module) for module in model.modules()):
        raise ConversionError(f"{who}: {type(model).__name__} has no converted layers; call fe.convert first")
    downs = dict(gated(model))
    if names is None:
        _refuse_experts(model, who)
        chosen = downs
        if not chosen:
            raise ConversionError(f"{who}: no gated MLP is found in {type(model).__name__}; name its down-projections")
    else:
        patterns = [names] if isinstance(names, str) else list(names)
        chosen = {name: layer for pattern in patterns for name, layer in _matching(model, downs, pattern, who)}
    for name, layer in chosen.items():
        if layer.numerics.shard is not None:
            raise ParallelError(
                f"{name}: {who} takes no layer that ranks divide, whose scales each rank would choose by itself: leave "
                "it out of the plan of tensor_parallel, or out of this call"
            )
    return chosen


def _refuse_experts(model: nn.Module, who: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Float8Experts | GroupedLinear):
            raise ConversionError(
                f"{who}: {name or type(module).__name__} holds the weights of several experts, which it does not take; "
                "give the names of the gated MLPs beside them"
            )


def _matching(model: nn.Module, downs: dict[str, Any], pattern: str, who: str) -> list[tuple[str, Any]]:
    """(name, layer) of what a glob names."""
    matches = lambda name: fnmatch.fnmatchcase(name, pattern)  # noqa: E731 - two uses
    parent = lambda name: name.removesuffix(".base_layer").rpartition(".")[0]  # noqa: E731
    if found := [(name, layer) for name, layer in downs.items() if matches(name) or matches(parent(name))]:
        return found
    owned = {id(child) for module in model.modules() if isinstance(module, OURS) for child in module.children()}
    for name, module in model.named_modules():
        if not isinstance(module, Float8Module | GroupedLinear) or not matches(name):
            continue
        group = getattr(module, "fused", None)
        if not _takes(module) or id(module) in owned or (group is not None and group.second is not module):
            known = ", ".join(downs) or "none"
            raise ConversionError(
                f"{name}: {who} takes the down-projections of gated MLPs, and it is a {type(module).__name__} that is "
                f"none, or runs fused with others; those of {type(model).__name__}: {known}"
            )
        found.append((name, module))
    if not found:
        raise UnknownName(f"layer for {who} (no converted layer matches it)", pattern, downs)
    return found


def _set(model: nn.Module, chosen: dict[str, Any], of: Any) -> nn.Module:
    """Change the layers.  of: their numerics -> (smooth, limit)."""
    for layer in chosen.values():
        layer.numerics.treat(*of(layer.numerics))
    propose(model)
    return model
