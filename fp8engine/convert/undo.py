"""fe.revert, which gives the modules of a converted model their plain classes back, in place.

Parameters, buffers, ties and hooks stay the objects that they are.  What fe.convert attached goes: scaling states,
controllers of `auto`, producers, its hooks.  FP8 modules that fe.convert did not make stay as they are.
Weights that are stored as FP8 codes (a loaded checkpoint, fe.convert(frozen="fp8")) become new parameters, one layer
after another: the values that the codes stand for, in 16 or 32 bits.
"""

from __future__ import annotations

from torch import nn

from fp8engine._torch import Model, divided_parameter, wrapper_of
from fp8engine.convert.bypassed import READ, FirstForward, Watched
from fp8engine.convert.record import RECORD, Record, compiled_in_place
from fp8engine.convert.resumed import Resumed
from fp8engine.errors import ConversionError
from fp8engine.nn.attention import Attention
from fp8engine.nn.class_swap import Mixin, change_class
from fp8engine.nn.experts import Float8Experts
from fp8engine.nn.fp8_attention import Softmax
from fp8engine.nn.linear import Float8Module
from fp8engine.nn.produce import Producing
from fp8engine.nn.serving import Served, restore
from fp8engine.scaling.table import ScalingState

# Attributes that a conversion has set on modules of these classes; others are the user's.
ATTACHED = {
    "recognised": (Producing,),
    "parts": (Float8Experts,),
    "numerics": (Float8Module,),
}


def revert(model: Model) -> Model:
    """Undo fe.convert in place: plain modules again, with the weights that they have now; returns the model.

    A layer gets the class that it had, a subclass of nn.Linear too.  Scaling states are lost: fe.scaling_state_dict
    saves them.  Weights that were FP8 codes come back as those stand for, in the dtype that the plain layer had and
    frozen; merging adapters (peft's merge_and_unload) and fe.hf.export take them.
    Raises ConversionError where nothing in `model` was converted, or only a larger model was, and under DDP, FSDP or
    torch.compile.

    >>> from fp8engine.convert.swap import convert
    >>> model = convert(nn.Sequential(nn.Linear(32, 16)), "bf16")
    >>> model[0]
    Linear(in_features=32, out_features=16, bias=True, recipe=bf16 (BF16xBF16, grad BF16))
    >>> revert(model)[0]
    Linear(in_features=32, out_features=16, bias=True)
    """
    roots = _roots(model)
    for root, record in roots:
        served = any(isinstance(module, Served) for module in root.modules())
        for module in list(root.modules()):
            kind, swapped, known = type(module), True, nn.Module
            if isinstance(module, Float8Module):
                # Else made by hand: its class stays.  A copied part has a state of its own, which no record knows.
                swapped = isinstance(module, Served) or module.numerics.state.watched
                known = record.classes.get(module.numerics.name, known)  # that name may be an adapter's now
                module.forget_copies()
                vars(module).pop(READ, None)
            plain = _plain_class(kind, swapped, known)
            if isinstance(module, Served):
                restore(module, plain)
            elif plain is not kind:
                change_class(module, plain)
            for attribute, kinds in ATTACHED.items():
                if swapped and issubclass(kind, kinds):
                    vars(module).pop(attribute, None)
            if isinstance(module, Attention):
                module.softmax = Softmax(module.heads.softmax, "Attention")
            vars(module).pop("fp8_softmax", None)
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_post_hooks):
                for key, hook in list(hooks.items()):
                    if isinstance(getattr(hook, "__self__", None), FirstForward | ScalingState | Resumed):
                        del hooks[key]
                        module._forward_hooks_always_called.pop(key, None)
        delattr(root, RECORD)
        if served and (quantizer := getattr(root, "hf_quantizer", None)) is not None:
            quantizer.remove_quantization_config(root)
        elif served:
            vars(getattr(root, "config", root)).pop("quantization_config", None)
    return model


def _roots(model: nn.Module) -> list[tuple[nn.Module, Record]]:
    """The converted models in `model`, each with its record.  Raises ConversionError for what cannot be reverted."""
    ConversionError.unless(model, nn.Module, "revert takes an nn.Module")
    for name, module in model.named_modules():
        where = f"its part {name!r}" if name else "the model"
        if found := wrapper_of(module) or compiled_in_place(module):
            raise ConversionError(f"revert: {where} is under {found}: revert what it wraps, and wrap that again")
        if isinstance(module, Float8Module) and (divided := divided_parameter(module)):
            raise ConversionError(
                f"revert: {where} has a {divided} that is divided over ranks: revert before dividing it"
            )
    roots = [(module, vars(module)[RECORD]) for module in model.modules() if RECORD in vars(module)]
    if not roots:
        raise ConversionError(
            f"revert: {type(model).__name__} is not converted: give the model that fe.convert was given"
        )
    return roots


def _plain_class(kind: type[nn.Module], swapped: bool, known: type[nn.Module]) -> type[nn.Module]:
    """The class under those of ours, or its subclass `known`; of a layer made by hand (not swapped), its own.

    A module that was parametrized since has torch's class above ours, with its properties: the same above the plain.
    """
    if kind.__module__ == nn.utils.parametrize.__name__:
        plain = _plain_class(kind.__bases__[0], swapped, known)
        return kind if plain is kind.__bases__[0] else type(kind.__name__, (plain,), dict(vars(kind)))
    if issubclass(kind, Watched) or (swapped and issubclass(kind, Mixin | Float8Module)):
        # Of fe.Linear, nn.Linear.
        return _plain_class(kind.plain if issubclass(kind, Mixin) else kind.__bases__[-1], swapped, known)
    return known if issubclass(known, kind) else kind
