"""Devices on which converted layers multiply, and scaling states that follow weights loaded later."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fp8engine.errors import EmulationWarning, ParallelError
from fp8engine.nn.linear import float8_modules
from fp8engine.numerics.recipe import Recipe
from fp8engine.ops import matmul, ranks
from fp8engine.scaling.table import ScalingState


def device_of(module: nn.Module, parameter: str = "weight") -> torch.device:
    """Where the module multiplies: where its weight is, or where Accelerate's hook moves an offloaded weight to."""
    weight: Any = getattr(module, parameter)
    if weight.device.type == "meta":
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if (where := getattr(each, "execution_device", None)) is not None:
                return torch.device(where)
    return weight.device


def why_emulated(where: torch.device, recipe: Recipe) -> str | None:
    """Why a layer's matmuls would run without FP8 Tensor Cores there; None where they have them, or run in 16 bits."""
    return matmul.why_emulated(where, matmul.choose(where, recipe.by_block)) if recipe.is_fp8 else None


def warn_emulated(whys: Sequence[str], stacklevel: int) -> None:
    """Warn of emulated layers, where there are any; of several ranks the first does.  whys: of each layer."""
    if whys and ranks.first():
        text = f"{whys[0]}: {len(whys)} layers compute with FP8 values, emulated"
        warnings.warn(text, EmulationWarning, stacklevel=stacklevel + 1)


def place_states(model: nn.Module) -> None:
    """Move the tables of layers converted on the meta device to where their weights have been loaded since.

    Raises ParallelError where layers of one scaling state are now on several devices.
    """
    found: dict[int, tuple[ScalingState, dict[torch.device, str]]] = {}
    for layer in float8_modules(model):
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
