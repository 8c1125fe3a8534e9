"""Modules that Accelerate has dispatched: a wrapper stands in the instance's forward, the weight may be elsewhere.

module.forward        Accelerate's, which moves weights and inputs and then calls
module._old_forward   the class's, bound: what a new class must replace
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn


def device_of(module: nn.Module, parameter: str = "weight") -> torch.device:
    """Where the module multiplies: where its weight is, or where Accelerate's hook moves an offloaded weight to."""
    weight: Any = getattr(module, parameter)
    if weight.device.type == "meta":
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if (where := getattr(each, "execution_device", None)) is not None:
                return torch.device(where)
    return weight.device


def held_forwards(module: nn.Module) -> list[str]:
    """Attributes of the instance that hold its class's own forward."""
    return [key for key, value in vars(module).items() if getattr(value, "__func__", None) is type(module).forward]


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module another class in place; where the instance holds its class's forward, the new one's."""
    held = held_forwards(module)
    module.__class__ = kind
    for key in held:
        object.__setattr__(module, key, MethodType(kind.forward, module))
