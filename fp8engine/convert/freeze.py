"""fe.convert(frozen="fp8"): linear layers whose weight takes no gradient store FP8 codes and give up the weight.

What cannot be stored so keeps its weight and is converted as without `frozen`; a warning says why.  Codes are cast
once, so `auto`, which decides again and again from statistics, stores them under `rowwise`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from fp8engine.autograd.features import FROZEN, STORED, why_excluded
from fp8engine.convert.dry_run import asked_for_dtype
from fp8engine.convert.kinds import classes_for
from fp8engine.convert.select import ADAPTERS, Decision, weight_of
from fp8engine.errors import ConversionError, FrozenWarning, StateError, StrictError, UnknownName
from fp8engine.nn.serving import attach, config_of, make_served, scale_name
from fp8engine.numerics.formats import E4M3
from fp8engine.numerics.recipe import Auto, Recipe, rowwise
from fp8engine.scaling.table import ScalingState

Chosen = list[tuple[Decision, Recipe]]


def divide(model: nn.Module, chosen: Chosen, frozen: str | None, strict: bool) -> tuple[Chosen, Chosen]:
    """(layers to store as codes, the others).  Nothing is changed.

    Raises UnknownName for another word than "fp8", ConversionError where no weight is frozen, StateError for a frozen
    weight that is not finite, StrictError (strict=True) where one cannot be stored.
    """
    if frozen is None:
        return [], chosen
    if frozen != "fp8":
        raise UnknownName("frozen", frozen, ["fp8"])
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    asked = asked_for_dtype(model)
    stored, others, kept = [], [], {}
    for decision, recipe in chosen:
        once = rowwise() if isinstance(recipe, Auto) else recipe
        if weight_of(decision.module, decision.parameter).requires_grad or not recipe.is_fp8:
            others.append((decision, recipe))
        elif why := asked.get(id(decision.module)) or _obstacle(decision, once, uses):
            others.append((decision, recipe))
            kept[decision.name] = why
        else:
            stored.append((decision, once))
    if not stored:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:4]) or (
            "every weight that it converts takes gradients: model.requires_grad_(False) or peft's get_peft_model first"
        )
        raise ConversionError(f"frozen='fp8': {type(model).__name__} has no weight to store as codes: {why}")
    if kept:
        name, why = next(iter(kept.items()))
        text = f"frozen='fp8': {len(kept)} frozen layers keep their 16- or 32-bit weights, {name!r} the first: {why}"
        if strict:
            raise StrictError(f"strict=True: {text}")
        warnings.warn(text, FrozenWarning, stacklevel=3)
    return stored, others


def put(model: nn.Module, stored: Chosen, others: list[str]) -> list[ScalingState]:
    """Store the layers' weights as codes, one after another; their scaling states, one per device.

    others: names of the other linear layers.  The config of a transformers model, under adapters too, says from now on
    what its folder holds, so that fe.hf.load reads what save_pretrained writes once no adapter is there (unload()).
    """
    base: Any = model.get_base_model() if hasattr(type(model), "get_base_model") else model  # pyright: ignore
    saved = stored and hasattr(type(base), "save_pretrained")
    scale = scale_name(stored[0][1].weight) if saved else None  # a checkpoint has one name for all of them
    layers = []
    for decision, recipe in stored:
        weight = weight_of(decision.module).detach()
        served = make_served(decision.module, classes_for(decision.module)[1], recipe, name=scale)
        served.write(weight)
        layers.append((decision.name, served))
    if scale is not None:
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
        names = {name: _without_adapter(name.removeprefix(prefix)) for name in (*dict(layers), *others)}
        recipes = {names[name]: layer.numerics.recipe for name, layer in layers}
        left = [names[name] for name in others if not set(ADAPTERS) & set(name.split("."))]
        [(most, count)] = Counter(recipes.values()).most_common(1)
        base.config.quantization_config = config_of(most, recipes if count < len(recipes) else {}, scale, left)
    return attach(layers)


def _without_adapter(name: str) -> str:
    """A layer's name when peft's adapters are unloaded."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def _obstacle(decision: Decision, recipe: Recipe, uses: Counter) -> str | None:
    """Why this frozen weight cannot be codes, or None.  Raises StateError for NaN and Inf."""
    weight = weight_of(decision.module, decision.parameter)
    if decision.parameter != "weight":
        return "experts in one 3-D parameter"
    if uses[id(weight)] > 1:
        return "its weight is shared with another module"
    if weight.is_meta:
        return "its weight is on the meta device (offloaded by Accelerate, or not loaded yet)"
    if hasattr(decision.module, "_hf_hook"):
        return "Accelerate's hook moves its weight"
    if not recipe.input.is_fp8 or recipe.weight.format != E4M3:
        return f"recipe {recipe.name!r} does not multiply E4M3 weights in its forward"
    if recipe.stored is not None:
        return why_excluded("with codes", (FROZEN,), STORED)
    if not bool(torch.isfinite(weight).all()):
        raise StateError(f"frozen='fp8': {decision.name}.weight holds NaN or Inf; nothing in the model was changed")
    return None
