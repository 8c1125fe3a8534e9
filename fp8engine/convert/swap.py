"""fe.convert, which puts every linear layer of any model under a recipe, in place.

select   the layers and their recipes (select.py), less those that example_inputs do not call
check    strict=True's refusals, and `auto`'s flow
swap     each module's class is changed, so parents, hooks, ties, optimizers and state_dict keys see the same module
attach   controllers of `auto`, producers of codes (fuse.py), hooks of the root, the record that reports read

An error in any of it leaves the model as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8engine._torch import Model, divided_parameter, wrapper_of
from fp8engine.auto import attach
from fp8engine.auto.calibration import calibrate
from fp8engine.auto.untouched import arguments, untouched
from fp8engine.autograd import Numerics
from fp8engine.autograd.features import STORED
from fp8engine.convert import attention as attending
from fp8engine.convert import freeze
from fp8engine.convert import fuse as fusing
from fp8engine.convert.bypassed import call_layers
from fp8engine.convert.kinds import classes_for
from fp8engine.convert.outliers import propose
from fp8engine.convert.placement import device_of, warn_emulated, why_emulated
from fp8engine.convert.record import RECORD, Record, compiled_in_place, undone_by_errors
from fp8engine.convert.select import Decision, Skip, decide
from fp8engine.convert.undo import revert
from fp8engine.errors import ConversionError, FusionWarning, StrictError
from fp8engine.nn import experts
from fp8engine.nn.class_swap import change_class
from fp8engine.nn.linear import Linear
from fp8engine.nn.serving import Served
from fp8engine.nn.together import numerics_together
from fp8engine.numerics.names import RecipeName
from fp8engine.numerics.recipe import Auto, Recipe
from fp8engine.report import flow
from fp8engine.scaling.table import ScalingState


def convert(
    model: Model,
    recipe: RecipeName | Recipe = "auto",
    *,
    skip: Skip | None = None,
    overrides: Mapping[str, RecipeName | Recipe] | None = None,
    example_inputs: object = None,
    strict: bool = False,
    fuse: bool | None = None,
    attention: str | None = None,
    frozen: str | None = None,
) -> Model:
    """Put every linear layer of `model` under `recipe`, experts included, in place; returns the model.

    A model that is converted already is reverted first (undo.py), so another call changes its recipe; its scaling
    states and what `auto` has decided are dropped.  An error leaves the model as it was.

    recipe: a name or a Recipe.  overrides: {"*.lm_head": "bf16", "blocks.0.*": fe.current()}, glob -> recipe.
    skip(name, module) -> bool: True leaves a layer alone; the default leaves output heads and adapters.
    example_inputs: arguments of one forward (a tuple, or a dict of keywords), run without gradients beforehand:
    layers whose own forward it does not call are left alone, and an error in it leaves the model as it was.  `auto`
    learns from it the consumers of each layer's result: what only FP8 matmuls read is stored in FP8; and it decides on
    what the inputs show (auto/calibration.py), gradients included where the model returns a loss.
    strict: raise instead of emulating FP8, leaving alone a layer that cannot be converted, or fusing nothing.
    fuse: norms, activations and gated MLPs write the FP8 codes that layers read beside their result, and save less for
    backward (fuse.py).  None does so where they are recognised by what they compute; True too, and gives a
    FusionWarning (with strict, an error) where none is; False: they run by their own forwards, and every layer casts.
    attention: "fp8", "fp8 unrotated" or "auto": how modules that call torch's scaled_dot_product_attention compute it
    (nn/fp8_attention.py); None leaves it in 16 bits.  What FP8 does not take runs in 16 bits, with an AttentionWarning.
    frozen: "fp8": weights that take no gradient (a base under adapters) become FP8 codes, a byte each, and their 16-bit
    copies are given up; fe.revert gives back what the codes stand for.  What cannot be is named by a FrozenWarning.

    Raises UnknownName (recipe, or a pattern that matches nothing), ConversionError (nothing to convert, layers that are
    FP8 codes already, already under DDP, FSDP or torch.compile), StateError (frozen weights with NaN), StrictError.

    >>> model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     _ = convert(model, "rowwise", overrides={"2": "fp32"})
    >>> model[0]
    Linear(in_features=32, out_features=64, bias=True, recipe=rowwise (E4M3xE4M3, grad E4M3))
    """
    _check_unwrapped(model)
    ConversionError.unless(fuse, bool | None, "convert: fuse takes True, False or None")
    with undone_by_errors(model):
        if any(RECORD in vars(module) for module in model.modules()):
            revert(model)
        decisions, attentions = decide(model, recipe, skip, overrides), attending.attentions(model, attention)
        if example_inputs is not None:
            decisions = _leave_uncalled(model, decisions, example_inputs)
        chosen = [(decision, decision.recipe) for decision in decisions if decision.recipe is not None]
        if not chosen:
            why = "; ".join(f"{d.name}: {d.reason}" for d in decisions[:8]) or "it has no linear layers"
            raise ConversionError(f"nothing to convert in {type(model).__name__}: {why}")
        whys = {d.name: why_emulated(device_of(d.module, d.parameter), used) for d, used in chosen}
        emulated = {name: why for name, why in whys.items() if why}
        if strict:
            _refuse(decisions, emulated)
        stored, trained = freeze.divide(model, chosen, frozen, strict)
        consumers = None
        if example_inputs is not None and any(isinstance(used, Auto) for _, used in trained):
            consumers = flow.record(model, example_inputs)
        classes = {d.name or "Linear": type(d.module) for d, _ in chosen if d.parameter == "weight"}
        made, states = _swap(trained)
        record = Record({d.name: d.reason for d in decisions if d.recipe is None}, states, classes)
        controllers = attach(made, [d.shape for d, _ in trained], part=False)
        for controller in controllers:
            controller.failures.strict = strict
            if consumers is not None:
                controller.follow(consumers)
        chosen_names = {d.name for d, _ in stored}
        record.states += freeze.put(model, stored, [d.name for d in decisions if d.name not in chosen_names])
        propose(model)
        fused = 0 if fuse is False else fusing.fuse(model)
        if strict and fuse and not fused:
            raise StrictError(f"strict=True: fuse=True: {fusing.NOTHING}: convert without fuse=True")
        attending.put(attentions, attention or "", strict)
        call_layers(model)
        record.attach(model, strict)
        if example_inputs is not None:
            calibrate(model, controllers, example_inputs)
        warn_emulated([*emulated.values()], stacklevel=2)
        if fuse and not fused:
            warnings.warn(f"fuse=True: {fusing.NOTHING}: every layer casts its own input", FusionWarning, stacklevel=2)
    return model


def plan(model: nn.Module, recipe: RecipeName | Recipe = "auto", *, skip=None, overrides=None) -> list[Decision]:
    """The Decisions that `convert` would carry out; the model is left as it is.

    Raises as `convert` does, and ConversionError for a model that is converted already.
    """
    _check_unwrapped(model)
    for name, module in model.named_modules():
        if RECORD in vars(module):
            raise ConversionError(f"plan: {name or 'the model'} is converted already: fe.revert(model) first")
    return decide(model, recipe, skip, overrides)


def _check_unwrapped(model: nn.Module) -> None:
    ConversionError.unless(model, nn.Module, "convert takes an nn.Module")
    for name, module in model.named_modules():
        where = f"its part {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(f"{where} is TorchScript already, which holds no nn.Linear: convert the plain module")
        if found := wrapper_of(module):
            raise ConversionError(f"{where} is under {found} already: convert first, then wrap")
        if found := compiled_in_place(module):
            raise ConversionError(f"{where} is under {found} already: convert first, then compile")
        if divided := divided_parameter(module):
            raise ConversionError(
                f"{where} has a {divided} that is divided over ranks already (parallelize_module, distribute_tensor): "
                "convert first, then divide"
            )
        if isinstance(module, Served):
            raise ConversionError(
                f"{where} stores FP8 codes instead of a weight: fe.revert(model) first, which gives 16-bit weights back"
            )


def _leave_uncalled(model: nn.Module, decisions: list[Decision], example_inputs: object) -> list[Decision]:
    """The decisions, with layers left alone whose forward one run on example_inputs does not call."""
    called: set[int] = set()
    hooks = [d.module.register_forward_pre_hook(lambda module, _: called.add(id(module))) for d in decisions]
    args, kwargs = arguments(example_inputs)
    try:
        with untouched(model):
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    never = "its forward was not called on example_inputs"
    return [
        d if d.recipe is None or id(d.module) in called else replace(d, recipe=None, reason=never) for d in decisions
    ]


def _refuse(decisions: list[Decision], emulated: dict[str, str]) -> None:
    """strict=True: raise StrictError for layers that would not run as asked.  emulated: layer -> why."""
    blocked = [f"{d.name} ({d.reason})" for d in decisions if d.blocked]
    if blocked:
        raise StrictError(f"strict=True: {len(blocked)} layers cannot be converted: {'; '.join(blocked[:8])}")
    if emulated:
        name, why = next(iter(emulated.items()))
        raise StrictError(
            f"strict=True: {why} (CUDA sm_89 or later has FP8 Tensor Cores); "
            f"{len(emulated)} layers would be emulated, {name!r} the first"
        )


def _swap(chosen: list[tuple[Decision, Recipe]]) -> tuple[list[Numerics], list[ScalingState]]:
    """Change the classes of the modules; returns the numerics of each, and the scaling states, one per device."""
    made, states = numerics_together([(d.name, recipe, device_of(d.module, d.parameter)) for d, recipe in chosen])
    for (decision, recipe), numerics in zip(chosen, made, strict=True):
        module: Any = decision.module
        if decision.parameter != "weight":
            experts.put(module, decision.parameter, numerics)
        else:
            change_class(module, classes_for(module)[0])
            object.__setattr__(module, "numerics", numerics)
        numerics.kinds = module.kinds
        if recipe.stored is not None and (why := numerics.why_not(STORED)):
            raise ConversionError(why)
    return made, states


def unite(model: nn.Module, reasons: Mapping[str, str], strict: bool = False) -> None:
    """Make the fe.Linear layers of `model`, each made by itself, what fe.convert would have made of them.

    They share one scaling state on each device, have their names in `model`, keep their recipes, and follow the
    forwards of `model`.  What their own states held is dropped.
    reasons: layer -> why it was left alone, for the report.  strict: a layer that is bypassed raises StrictError.
    Raises ConversionError for a model without such layers, or in which layers share a state already.

    >>> model = nn.Sequential(Linear(32, 64, recipe="current"), nn.ReLU(), Linear(64, 32, recipe="current"))
    >>> unite(model, {})
    >>> state = model[2].numerics.state
    >>> [name for name, _ in state.layers], model[0].numerics.state is state
    (['0', '2'], True)
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    if not layers:
        raise ConversionError(f"unite: {type(model).__name__} has no fe.Linear")
    if taken := [name for name, layer in layers.items() if not layer.numerics.standalone]:
        raise ConversionError(f"unite: {taken[0]!r} shares a scaling state already: fe.convert or unite a model once")
    made, states = numerics_together(
        [(name, layer.numerics.recipe, device_of(layer)) for name, layer in layers.items()]
    )
    for layer, numerics in zip(layers.values(), made, strict=True):
        layer.numerics = numerics
    attach(made, [tuple(layer.weight.shape) for layer in layers.values()])
    propose(model)
    Record(dict(reasons), states).attach(model, strict)
