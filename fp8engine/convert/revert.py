"""fe.revert, which gives the modules of a converted model their plain classes back, in place.

Parameters, buffers, ties and hooks stay the objects that they are.  What fe.convert attached goes: scaling states,
controllers of `auto`, fused groups, hooks of the root.  FP8 modules that fe.convert did not make stay as they are.
"""

from __future__ import annotations

from torch import nn

from fp8engine._torch import wrapper_of
from fp8engine.convert.bypassed import FirstForward
from fp8engine.convert.swap import RECORD, Record
from fp8engine.errors import ConversionError
from fp8engine.nn.class_swap import Mixin, change_class
from fp8engine.nn.linear import Float8Module
from fp8engine.nn.serving import Served
from fp8engine.scaling.table import ScalingState

ATTACHED = ("numerics", "parts", "fused", "not_fused_because", "group")  # attributes that a conversion sets


def revert(model: nn.Module) -> nn.Module:
    """Undo fe.convert in place: plain modules again, with the weights that they have now; returns the model.

    A layer that was a subclass of nn.Linear becomes an nn.Linear; it had no code of its own.  Scaling states are lost:
    fe.scaling_state_dict saves them.  Afterwards fe.convert takes the model again, under any recipe.
    Raises ConversionError where nothing in `model` was converted, or only a larger model was; under DDP, FSDP or
    torch.compile; and for layers that were loaded in FP8, which have no 16-bit weights.

    >>> from fp8engine.convert.swap import convert
    >>> model = convert(nn.Sequential(nn.Linear(32, 16)), "bf16")
    >>> model[0]
    Linear(in_features=32, out_features=16, bias=True, recipe=bf16 (BF16xBF16, grad BF16))
    >>> revert(model)[0]
    Linear(in_features=32, out_features=16, bias=True)
    """
    roots = _roots(model)
    for root, record in roots:
        states = {id(state) for state in record.states}
        for module in list(root.modules()):
            kind = _plain_class(module, states)
            if kind is None:
                continue
            if isinstance(module, Float8Module):
                module.forget_copies()
            change_class(module, kind)
            for name in ATTACHED:
                vars(module).pop(name, None)
        for hooks in (root._forward_pre_hooks, root._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), FirstForward | ScalingState):
                    del hooks[key]
                    root._forward_hooks_always_called.pop(key, None)
        delattr(root, RECORD)
    return model


def _roots(model: nn.Module) -> list[tuple[nn.Module, Record]]:
    """The converted models in `model`, each with its record.  Raises ConversionError for what cannot be reverted."""
    if not isinstance(model, nn.Module):
        raise ConversionError(f"revert takes an nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"its part {name!r}" if name else "the model"
        if found := wrapper_of(module):
            raise ConversionError(f"revert: {where} is under {found}: revert what it wraps, and wrap that again")
        if isinstance(module, Served):
            raise ConversionError(f"revert: {where} was loaded in FP8: its 16-bit weights are not there")
    roots = [(module, vars(module)[RECORD]) for module in model.modules() if RECORD in vars(module)]
    if not roots:
        raise ConversionError(
            f"revert: {type(model).__name__} is not converted: give the model that fe.convert was given"
        )
    return roots


def _plain_class(module: nn.Module, states: set[int]) -> type[nn.Module] | None:
    """The class that fe.convert has replaced; None: it has not changed this module.  states: ids of the root's."""
    kind = type(module)
    if isinstance(module, Float8Module) and id(module.numerics.state) not in states:
        return None
    if issubclass(kind, Mixin):
        return kind.plain
    return kind.__bases__[-1] if issubclass(kind, Float8Module) else None  # of fe.Linear, nn.Linear
