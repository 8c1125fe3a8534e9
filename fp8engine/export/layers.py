"""Choice of the layers that an export writes in FP8, and of what one scale of each covers.

    layout="fp8engine"   as the layer's recipe says, or as `auto` decided
    other layouts        the same, within what vLLM and transformers read:
                         scales per block where both sides are whole numbers of blocks, else per row
                         q, k, v (gate, up) alike: per tensor, per row or per block, or all of them in 16 bits

vLLM runs q, k, v as one matmul, and gate and up (its models' packed_modules_mapping; FUSED below).  It takes one scheme
for such a group, refuses one that is partly in 16 bits, and puts scales per tensor on the largest by rounding the other
layers' codes a second time, which costs 3 dB: so they are cast under the scale of the group's amax here, once.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8engine.auto.failures import some
from fp8engine.convert.dry_run import asked_for_dtype
from fp8engine.convert.record import RECORD, Record
from fp8engine.convert.select import Decision, decide, is_conv1d, linear_layers, parameter_of
from fp8engine.errors import ConversionError
from fp8engine.export.layout import COMPRESSED, OURS, usual
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.cast import Cast, PerBlock, PerTensor
from fp8engine.numerics.formats import E4M3
from fp8engine.numerics.recipe import Recipe, blockwise, current, mxfp8, rowwise

BYPASSED = "other code reads its weight and does not call it: written in 16 bits"
MERGED = "transformers saves its weight merged with others, or split or permuted: written in 16 bits"
SHARED = "its weight is shared with another module"
EXPERTS = "experts in one 3-D parameter: written in 16 bits"
DIVIDED = "Llama4TextExperts"  # transformers' MODULES_TO_PATCH_FOR_QUANTIZATION, which it applies to this layout
ONE_EXPERT = re.compile(r"\.\d+\.[^.]+\.weight$")  # of a tensor's name in the files
BEFORE_BLOCK = re.compile(r"^.*?(?=[^.]+\.\d+\.)")
# Recipes whose forwards a checkpoint can hold.
KNOWN = (current(), rowwise(), blockwise(), mxfp8(), rowwise(power_of_2=False), blockwise(power_of_2=False))
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def choose_layers(model: nn.Module, recipe: str | Recipe | None, layout: str) -> tuple[str, list[Decision], list[str]]:
    """(layout, a Decision for every linear layer, notes for the user); recipe None in a Decision: written in 16 bits.

    recipe: of a model that is not converted.  layout: "auto" becomes "fp8" where all scales cover FP32 blocks, else
    "compressed-tensors".  Raises ConversionError where nothing is left to write, or the layout cannot hold it.
    """
    decisions, notes = _asked(model, recipe)
    wanted, needed = {decision.name: decision.recipe for decision in decisions}, needed_in_16_bits(model)
    decisions = [_leave(_decided(decision, layout), needed, layout) for decision in decisions]
    if layout != OURS:
        decisions = _alike(decisions)
    changed = [d for d in decisions if d.recipe and (was := wanted[d.name]) and scheme(d.recipe) != scheme(was)]
    chosen = [decision for decision in decisions if decision.recipe is not None]
    if not chosen:
        raise ConversionError(f"export: nothing to write in FP8 in {type(model).__name__}: {_grouped(decisions)}")
    if layout == "auto":
        layout = usual(d.recipe.weight for d in chosen if d.recipe is not None)
    if changed and layout == "fp8":
        raise ConversionError(
            f"export: layout='fp8' has no scales per row, which these layers need: {_grouped(changed)}; use "
            f"layout={COMPRESSED!r}, or leave them in 16 bits"
        )
    # Its reader needs several tensors for one weight, and has no rule for what is several weights besides: DINOv2's
    # gate and up, which are one of the class's rules even where the model has none.
    if layout == COMPRESSED and any(len(converter.source_patterns) > 1 for converter in _converters_on_saving(model)):
        notes.append(
            "transformers' reader of this layout refuses some models of classes with merged weights; `load` reads them"
        )
    if layout == COMPRESSED and any(type(module).__name__ == DIVIDED for module in model.modules()):
        notes.append(
            "transformers divides Llama 4's experts for this layout, does not find them in files that have them in one "
            "tensor, and fills them with random numbers: use fe.hf.load, vLLM, or layout='fp8'"
        )
    if changed:
        notes.append(f"a scale per row, not as the recipe says: {_grouped(changed)}")
    return layout, decisions, notes + unsmoothed(chosen)


def unsmoothed(decisions: list[Decision]) -> list[str]:
    """A note on layers under fe.smooth, whose scales come anew from every input: no layout has a place for them."""
    names = [d.name for d in decisions if isinstance(d.module, Float8Module) and d.module.numerics.smooth]
    if not names:
        return []
    return [
        f"fe.smooth is left out, which no layout holds: the inputs of {some(names)} have their outliers again; convert "
        "with those layers in 16 bits (overrides) where they harm"
    ]


def together(decisions: list[Decision]) -> list[list[Decision]]:
    """Lists of layers that servers run as one matmul; every other layer is alone in its list."""
    found: dict[tuple, list[Decision]] = {}
    for decision in decisions:
        parent, _, name = decision.name.rpartition(".")
        group = next((names for names in FUSED if name in names), name)
        found.setdefault((parent, group, decision.shape[-1]), []).append(decision)
    return list(found.values())


def scheme(recipe: Recipe) -> tuple:
    """The part of a recipe that a checkpoint stores; recipes with equal schemes are stored alike."""
    return tuple(replace(cast, scaling="current") for cast in recipe.operands("forward"))


def _asked(model: nn.Module, recipe: str | Recipe | None) -> tuple[list[Decision], list[str]]:
    """(a Decision for each linear layer, with the recipe that it has or is to get; notes)."""
    record: Record | None = getattr(model, RECORD, None)
    if record is None:
        if any(isinstance(module, Float8Module) for module in model.modules()):
            raise ConversionError("export: parts of the model were converted by themselves: convert the whole model")
        made = decide(model, recipe or "current")
        return [d if d.parameter == "weight" else replace(d, recipe=None, reason=EXPERTS) for d in made], []
    if recipe is not None:
        raise ConversionError("export: the model is converted, and its layers have recipes: leave out recipe=")
    found = []
    for name, module, shape in linear_layers(model):
        key = parameter_of(name, module)
        if isinstance(module, Float8Module) and key == "weight":
            own, bypassed = module.numerics.recipe, module.numerics.bypassed
            why = BYPASSED if bypassed else f"recipe: {own.name}"
            found.append(Decision(name, module, None if bypassed else own, why, shape))
        else:
            why = EXPERTS if isinstance(module, Float8Module) else record.why_left(name)
            found.append(Decision(name, module, None, why, shape, parameter=key))
    return found, never_ran(record)


def never_ran(record: Record) -> list[str]:
    """A note on layers that `auto` has no statistics of.  Raises ConversionError where it has none at all."""
    names, total = [], 0
    for controller in (state.controller for state in record.states if state.controller is not None):
        repeats = controller.plan is not None and controller.step >= 0
        decided = range(len(controller.layers)) if repeats else controller.choices
        names += [layer.name for i, layer in enumerate(controller.layers) if i not in decided]
        total += len(controller.layers)
    if total and len(names) == total:
        raise ConversionError(
            f"export: recipe 'auto' has decided nothing yet for its {total} layers ({names[0]} the first): run a few "
            "training steps first, or convert with a recipe such as 'rowwise'"
        )
    if not names:
        return []
    return [f"'auto' has never seen {len(names)} of its layers run, {names[0]} the first: written as they began"]


def _decided(decision: Decision, layout: str) -> Decision:
    """A layer under `auto` with a recipe that stores what was decided: the named one where that equals it.

    Else, "fp8engine" holds other casts of the input as they are; nearest to E5M2, which no layout holds of weights and
    other programs do not cast inputs to, is E4M3 with the range of a scale per row.
    """
    recipe = decision.recipe
    if recipe is None or not isinstance(decision.module, Float8Module):
        return decision  # of a plain model: `layout.choose` raises for what cannot be written
    decided = recipe.name == "auto"
    if not (recipe.input.is_fp8 and recipe.weight.is_fp8):
        why = f"auto decided on {recipe.input.format} here" if decided else f"asked for {recipe.name}"
        return replace(decision, recipe=None, reason=why)
    if not decided:
        return decision
    known = next((each for each in KNOWN if scheme(each) == scheme(recipe)), None)
    if known is not None:
        return replace(decision, recipe=known)
    if layout == OURS and recipe.weight.format == E4M3:
        # Of dy, which only adapters on the loaded model ask for: a format that multiplies E5M2 too.
        own = Recipe(name="auto", input=recipe.input, weight=recipe.weight, grad_output=Cast(E4M3))
        return replace(decision, recipe=own)
    why = f"auto decided on {recipe.input} for its input and {recipe.weight} for its weight; the nearest that is held"
    return replace(decision, recipe=rowwise(power_of_2=recipe.weight.power_of_2), reason=why)


def needed_in_16_bits(model: nn.Module) -> dict[int, str]:
    """ids of modules whose weight code beside their forward needs in 16 or 32 bits -> why."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    found = asked_for_dtype(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    high = list(getattr(model, "_keep_in_fp32_modules", None) or [])
    converters = _converters_on_saving(model)
    # Names: before it has read the weights, `from_pretrained` has not tied them.
    tied = set(itertools.chain(*(getattr(model, "all_tied_weights_keys", None) or {}).items()))
    for name, module in model.named_modules():
        if any(converter.rename_source_key(f"{name}.weight")[1] for converter in converters):
            found[id(module)] = MERGED
        elif uses[id(module._parameters.get("weight"))] > 1 or f"{name}.weight" in tied:
            found[id(module)] = SHARED
        elif high and not should_convert_module(name, high):
            found[id(module)] = "transformers keeps it in FP32 (_keep_in_fp32_modules)"
    return found


def _converters_on_saving(model: Any) -> list:
    """What computes published tensors from a model's when transformers saves it: more than a change of name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    loaded = getattr(model, "_weight_conversions", None)  # those that from_pretrained used
    mapping = get_model_conversion_mapping(model, add_legacy=False) if loaded is None else loaded
    return [entry.reverse_transform() for entry in mapping if isinstance(entry, WeightConverter)]


def names_left(model: Any, decisions: list[Decision], layout: str) -> list[str]:
    """Names for config.json of what stays in 16 bits: those of the model, and under others' layouts of the files too.

    vLLM makes modules of the files' names (Mixtral's block_sparse_moe.experts), and asks for experts one by one, as
    compressed-tensors does where it divides Llama 4's: under that layout a regular expression covers them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    modules: dict[str, bool] = {}  # name -> whether it holds experts in one parameter
    parameters: tuple[dict, dict] = ({}, {})  # of the others, and of those: name -> a tensor without data
    for d in decisions:
        if d.recipe is None:
            many = len(d.shape) == 3  # left under its module's name
            name = d.name.removesuffix(f".{d.parameter}") if many else d.name
            modules[name] = many
            weight = d.module._parameters.get(d.parameter)
            if many and weight is not None and weight.dim() == 2:  # DBRX's, which vLLM builds as the module above
                modules[name.rpartition(".")[0]] = many
            if weight is not None and layout != OURS:
                parameters[many][f"{name}.{d.parameter}"] = torch.empty(weight.shape, device="meta")
    for many, held in enumerate(parameters):
        for name, tensor in revert_weight_conversion(model, held).items():
            one_of_many = many and tensor.dim() == 2
            modules.setdefault(ONE_EXPERT.sub("", name) if one_of_many else name.rpartition(".")[0], bool(many))
    # From the block's number on: before it, vLLM has other names for vision-language models.
    tails = [BEFORE_BLOCK.sub("", name) for name, many in modules.items() if many and layout == COMPRESSED]
    return [*filter(None, modules), *(rf"re:(.*\.)?{re.escape(tail)}\..*" for tail in tails)]


def _leave(decision: Decision, needed: dict[int, str], layout: str) -> Decision:
    """Leave a layer in 16 bits that programs reading the layout could not load."""
    if decision.recipe is None:
        return decision
    why = needed.get(id(decision.module))
    if layout != OURS and (is_conv1d(decision.module) or not isinstance(decision.module, nn.Linear)):
        held = COMPRESSED if layout == "auto" else layout
        why = why or f"{held!r} holds nn.Linear only, and this is a Conv1D (layout='fp8engine' holds both)"
    return decision if why is None else replace(decision, recipe=None, reason=why)


def _alike(decisions: list[Decision]) -> list[Decision]:
    """The decisions under which vLLM and transformers read every layer: some with a scale per row, or in 16 bits."""
    settled: dict[str, Decision] = {}
    for group in together(decisions):
        left = [decision for decision in group if decision.recipe is None]
        held = [(decision, decision.recipe) for decision in group if decision.recipe is not None]
        ragged = [decision for decision, recipe in held if not _whole(decision, recipe)]
        by_row = rowwise(power_of_2=any(recipe.weight.power_of_2 for _, recipe in held))
        for decision, recipe in held:
            others = [other for other, its_own in held if scheme(its_own) != scheme(recipe)]
            if left:
                why = f"vLLM runs it as one matmul with {left[0].name}, which stays in 16 bits"
                why += f"; layout={OURS!r} keeps this layer in FP8"
                settled[decision.name] = replace(decision, recipe=None, reason=why)
            elif (ragged or others) and scheme(recipe) != scheme(by_row):
                why = "its sides are no multiples of the block's"
                if decision not in ragged:
                    why = f"vLLM runs it as one matmul with {(ragged or others)[0].name}, whose scales differ"
                settled[decision.name] = replace(decision, recipe=by_row, reason=why)
    return [settled.get(decision.name, decision) for decision in decisions]


def _whole(decision: Decision, recipe: Recipe) -> bool:
    """Whether every scale of a weight covers a whole block: kernels and loaders take no other."""
    group = recipe.weight.granularity
    return not isinstance(group, PerBlock) or not (decision.shape[0] % group.rows or decision.shape[1] % group.cols)


def one_scale(decisions: list[Decision], layout: str) -> list[list[Decision]]:
    """Lists of the layers that are cast under one scale: servers' groups, where scales are per tensor."""
    if layout == OURS:
        return [[decision] for decision in decisions]
    joined = [d for d in decisions if d.recipe is not None and isinstance(d.recipe.weight.granularity, PerTensor)]
    return together(joined) + [[decision] for decision in decisions if decision not in joined]


def _grouped(decisions: list[Decision]) -> str:
    """Each reason once, with the first of its layers and how many more."""
    by_reason: dict[str, list[str]] = {}
    for decision in decisions:
        by_reason.setdefault(decision.reason, []).append(decision.name)
    shown = [
        f"{first} and {len(more)} more: {reason}" if more else f"{first}: {reason}"
        for reason, (first, *more) in by_reason.items()
    ]
    return "; ".join(shown) or "it has no linear layers"
