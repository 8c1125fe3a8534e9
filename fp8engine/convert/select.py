"""Selection of the layers that a conversion touches: the recipe of each, or the reason why it is left alone.

A layer is left alone because the user asked for it (skip, or an override to a 16-bit recipe), because it is an output
head or a router (their errors go straight into the loss, or send tokens elsewhere; an override that names one wins),
or because swapping it would change what it does: a subclass with code of its own, a parametrised or already quantised
weight, experts that are not laid out as transformers' use_experts_implementation asks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fp8engine.convert.dry_run import uncalled
from fp8engine.convert.kinds import is_conv1d, is_plain_linear
from fp8engine.convert.twin import adapted
from fp8engine.errors import ConversionError, UnknownName
from fp8engine.nn import experts
from fp8engine.nn.class_swap import bound_forwards
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.formats import FLOATS
from fp8engine.numerics.recipe import Recipe, resolve

Skip = Callable[[str, nn.Module], bool]
HEADS = ("lm_head", "head", "heads", "classifier", "score", "output_projection", "embed_out", "proj_out", "qa_outputs")
HEADS += ("classification_head", "seq_relationship", "sop_classifier", "visual_projection", "text_projection")
HEADS += ("class_labels_classifier", "class_predictor", "bbox_predictor", "box_head", "dense_prediction", "ctc_head")
HEADS += ("logits_dense", "audio_lm_head", "embedding_proj_layer")
ROUTERS = ("router", "shared_expert_gate")  # and a `gate` beside `experts`; a gated MLP has a `gate` too
ADAPTERS = ("lora_A", "lora_B", "lora_magnitude_vector", "modules_to_save")
SAVED = re.compile(r"\bmodules_to_save\.[^.]+")  # peft's whole copy of a layer, which is trained in its place
EXPERTS = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w1", "w2", "w3")
CHOSEN = ("top_k", "num_experts_per_tok")  # names, in mixtures of experts, for how many a token passes
FLAT = "moe_num_experts"  # of a module whose experts lie one after the other in 2-D parameters: DBRX's
ROUTER = (
    "router: its choice of experts is discrete, an error sends tokens elsewhere (name it in overrides to convert it)"
)
HEAD = "output head: its error goes straight into the loss (name it in overrides to convert it)"
ADAPTER = "adapter: too small to gain from FP8 (name it in overrides to convert it)"
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # of nn.MultiheadAttention


@dataclass(frozen=True)
class Decision:
    """The decision on one linear layer.  recipe None: left alone, for `reason`; shape [N, K], experts [E, N, K].

    blocked: the engine cannot do what was asked (as opposed to the user not asking for it).
    parameter: the module's name for the matrix.
    """

    name: str
    module: nn.Module
    recipe: Recipe | None
    reason: str
    shape: tuple[int, ...]
    blocked: bool = False
    parameter: str = "weight"


def weight_of(module: nn.Module, parameter: str = "weight") -> torch.Tensor:
    """The module's weight, whatever it is stored as.

    A parametrised one is computed as in evaluation: in training spectral_norm's power iteration moves with each read.
    """
    computed = list(cast(nn.Module, module.parametrizations).modules()) if is_parametrized(module, parameter) else []
    modes = [part.training for part in computed]
    for part in computed:
        part.training = False
    try:
        return cast(torch.Tensor, getattr(module, parameter))
    finally:
        for part, mode in zip(computed, modes, strict=True):
            part.training = mode


def told_by_config(module: nn.Module, key: str) -> Any:
    """What a module's config says under a name; None where it says nothing, or has no such attribute in its own way."""
    with contextlib.suppress(Exception):  # a KeyError, of a dict whose keys are attributes
        return getattr(module.config, key)
    return None


def parameter_of(name: str, module: nn.Module) -> str:
    """The module's own name for the matrix that `linear_layers` lists as `name`."""
    key = name.rpartition(".")[2]
    return key if key in _matrices(module) else "weight"


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """(name, module, shape) of everything that multiplies by a weight matrix, each module once."""
    for name, module in model.named_modules():
        for key, shape in _matrices(module).items():
            yield name if key == "weight" else f"{name}.{key}".removeprefix("."), module, shape


def _matrices(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape, [N, K] or of experts [E, N, K], of each matrix that a module multiplies by, by its own name for it."""
    if isinstance(module, nn.Linear):
        return {"weight": (module.out_features, module.in_features)}
    if isinstance(module, GroupedLinear):
        return {"weight": module.shape}
    if is_conv1d(module) or (isinstance(module, Float8Module) and module.transposed):
        return {"weight": (weight_of(module).shape[1], weight_of(module).shape[0])}
    if _has_router_weight(module):
        return {"weight": tuple(weight_of(module).shape)}
    weight = getattr(module, "weight", None) if "Linear" in type(module).__name__ else None
    if isinstance(weight, torch.Tensor) and weight.dim() > 1:  # not KimiLinearRMSNorm's
        inner = (isinstance(child, nn.Linear | Float8Module) or is_conv1d(child) for child in module.children())
        return {} if any(inner) else {"weight": tuple(weight.shape)}  # an adapter's shell is not one
    if isinstance(module, nn.MultiheadAttention):
        return {key: tuple(p.shape) for key in PROJECTIONS if (p := module._parameters.get(key)) is not None}
    shapes = {key: tuple(parameter.shape) for key, parameter in _stacked(module).items()} or flat_experts(module)
    if getattr(module, "is_transposed", False):
        return {key: (experts, n, k) for key, (experts, k, n) in shapes.items()}
    return shapes


def _stacked(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's matrices of experts, each kept in one 3-D parameter, by name."""
    keys = (*EXPERTS, "weight") if "Expert" in type(module).__name__ else EXPERTS  # JetMoeParallelExperts
    own = module._parameters.items()
    return {key: p for key, p in own if key in keys and p is not None and p.dim() == 3}


def flat_experts(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes [E, N, K] of experts that lie one after the other in 2-D parameters [E * N, K], by name."""
    count = getattr(module, FLAT, None)
    if not isinstance(count, int) or count < 1:
        return {}
    own = {key: p for key, p in module._parameters.items() if p is not None and p.dim() == 2 and len(p) % count == 0}
    return {key: (count, len(p) // count, p.shape[1]) for key, p in own.items()}


def experts_run(model: nn.Module) -> dict[int, int]:
    """id of a module with parameters of many experts -> how many of its experts a token passes; all, if not known.

    A layer of groups (ConvBERT's) is there with all its matrices: a token passes all.  Moshi's layers, of whose
    matrices a token passes one, are not there.
    """
    found, above = {}, {id(child): parent for parent in model.modules() for child in parent.children()}
    for parent in model.modules():
        for child in parent.children():
            stacked = [shape[0] for shape in _matrices(child).values() if len(shape) == 3]
            if stacked and (_stacked(child) or flat_experts(child) or hasattr(child, "num_groups")):
                near = (child, parent, *parent.children(), above.get(id(parent)))
                counts = (getattr(m, key, None) for m in near for key in CHOSEN)
                found[id(child)] = next((k for k in counts if isinstance(k, int)), stacked[0])
    return found


def decide(
    model: nn.Module,
    recipe: str | Recipe,
    skip: Skip | None = None,
    overrides: Mapping[str, str | Recipe] | None = None,
) -> list[Decision]:
    """A Decision for every linear layer of the model; nothing is changed.

    overrides: glob over layer names -> recipe, the last match wins.  skip: True leaves a layer alone; without it,
    output heads and adapters (LoRA) are left, unless an override names them.
    Raises UnknownName for a recipe's name, or for a pattern that matches no linear layer, ConversionError for a skip or
    overrides of another type.
    """
    asked = resolve(recipe)
    if skip is not None and not callable(skip):
        raise ConversionError(
            f"skip is a {type(skip).__name__}; it takes a function (name, module) -> bool: to leave layers alone by "
            'name, write overrides={"blocks.0.*": "bf16"}'
        )
    if not isinstance(overrides, Mapping | None):
        raise ConversionError(
            f'overrides is a {type(overrides).__name__}; it takes a dict of globs and recipes: {{"blocks.0.*": "bf16"}}'
        )
    chosen = {pattern: resolve(value) for pattern, value in (overrides or {}).items()}
    layers = list(linear_layers(model))
    for pattern in chosen:
        ConversionError.unless(pattern, str, "overrides: each key is a glob over layers' names")
        if not any(fnmatch.fnmatchcase(name, pattern) for name, *_ in layers):
            raise UnknownName("overrides pattern (no linear layer matches it)", pattern, [name for name, *_ in layers])
    choosy, bypassed = dict.fromkeys(_heads(model), HEAD) | dict.fromkeys(_routers(model), ROUTER), uncalled(model)
    decisions, modules = [], dict(model.named_modules())
    for name, module, shape in layers:
        override = next((chosen[p] for p in reversed(chosen) if fnmatch.fnmatchcase(name, p)), None)
        wanted, reason = override or asked, "overrides" if override else "recipe"
        left = None
        if skip is not None:
            left = "skip() returned True" if skip(name, module) else None
        elif override is None:
            original = SAVED.sub("original_module", name)
            left = choosy.get(id(modules.get(original, module))) or (ADAPTER if _in_adapter(original) else None)
        key = parameter_of(name, module)
        if left is None and not wanted.is_fp8 and _same_dtype(module, key, wanted):
            left = f"{reason}: {wanted.name}, which it computes in already"
        obstacle = None if left else bypassed.get(id(module)) or _obstacle(module)
        reason = left or obstacle or f"{reason}: {wanted.name}"
        used = None if left or obstacle else wanted
        decisions.append(Decision(name, module, used, reason, shape, obstacle is not None, key))
    return decisions


def _heads(model: nn.Module) -> set[int]:
    """ids of modules that are a model's output head.

    get_output_embeddings returns it, its weight is tied to an embedding, it is the last layer of a module with a head's
    name, or it is as wide as a config's vocabulary or classes and no layer's input is.  In a block that repeats (Flux's
    `proj_out`) only a layer with the name and the width is one.
    """
    found, repeated = set(), _repeated(model)
    widths = {told_by_config(module, key) for module in model.modules() for key in ("vocab_size", "num_labels")}
    unread = widths - {m.in_features for m in model.modules() if isinstance(m, nn.Linear)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.out_features in unread and not _in_adapter(name):
            found |= {id(module)} - repeated
        if name.rpartition(".")[2] in HEADS and not isinstance(module, nn.ModuleList):
            inner = [m for part, m in module.named_modules() if isinstance(m, nn.Linear) and not _in_adapter(part)]
            found |= {id(m) for m in inner[-1:] if id(module) not in repeated or m.out_features in widths}
        if (get := getattr(module, "get_output_embeddings", None)) is not None:
            try:
                found.add(id(adapted(get())))
            except (AttributeError, NotImplementedError):  # transformers raises these for models without a head
                continue
    # Not `.weight`: a parametrization computes it at every read, which moves the vectors of spectral_norm.
    weights = [(module, module._parameters.get("weight")) for module in model.modules()]
    tied = {id(weight) for module, weight in weights if isinstance(module, nn.Embedding) and weight is not None}
    return found | {id(module) for module, weight in weights if isinstance(module, nn.Linear) and id(weight) in tied}


def _repeated(model: nn.Module) -> set[int]:
    """ids of what is within blocks that repeat: children of one class in an nn.ModuleList or nn.Sequential.

    The only child of an nn.ModuleList is such a block too: a model of one layer is treated as one of many.
    """
    found = set()
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList | nn.Sequential):
            children = [child for child in stack if child is not None]  # Informer's last block has no convolution
            count = Counter(map(type, children))
            only_child = isinstance(stack, nn.ModuleList) and len(children) == 1
            blocks = (child for child in children if only_child or count[type(child)] > 1)
            found |= {id(module) for block in blocks for module in block.modules() if module is not block}
    return found


def _routers(model: nn.Module) -> set[int]:
    """ids of modules that choose experts, or weigh a shared one, with all that is in them (Switch's `classifier`)."""
    found = set()
    for parent in model.modules():
        for key, child in parent.named_children():
            if key in ROUTERS or (key == "gate" and hasattr(parent, "experts")) or _has_router_weight(child):
                found |= {id(module) for module in child.modules()}
    return found


def _in_adapter(name: str) -> bool:
    return any(part in ADAPTERS for part in name.split("."))


def _has_router_weight(module: nn.Module) -> bool:
    """Whether this is one of transformers' routers, which multiply by a weight of their own."""
    weight = module._parameters.get("weight")
    return "Router" in type(module).__name__ and weight is not None and weight.dim() == 2


def _same_dtype(module: nn.Module, key: str, recipe: Recipe) -> bool:
    if is_parametrized(module, key):  # as above: its weight is not to be computed
        weight = next(cast(nn.ModuleDict, module.parametrizations)[key].parameters())
    else:
        weight = getattr(module, key, None)
    return getattr(weight, "dtype", None) == recipe.input.format.dtype


def _obstacle(module: nn.Module) -> str | None:
    """Why this module cannot be swapped without changing what it does, or None."""
    kind = type(module)
    if isinstance(module, Float8Module):
        return "converted already"
    if "forward" in vars(module) and not bound_forwards(module):
        return "its forward is replaced on the instance, and does not say what it replaces"
    if is_conv1d(module):
        return None
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by this weight itself: it is no layer of its own"
    if not isinstance(module, nn.Linear):
        if _stacked(module):
            return experts.obstacle(module)
        if flat_experts(module):
            return f"{kind.__name__} keeps its experts one after the other in a 2-D parameter"
        return f"{kind.__module__}.{kind.__name__} is not an nn.Linear (quantised by another library?)"
    if isinstance(module, nn.LazyLinear):
        return "its weight is made by its first forward: run the model once before fe.convert"
    if not is_plain_linear(kind) and not is_parametrized(module, "weight"):
        return f"{kind.__name__} is a subclass of nn.Linear with code of its own"
    if module._parameters.get("weight") is None:
        return "its weight is computed (weight_norm, pruning or a parametrization)"
    weight = module.weight
    if type(weight.data) is not torch.Tensor:
        return f"its weight is a {type(weight.data).__name__}, quantised or sharded already"
    if weight.dtype not in FLOATS or weight.layout is not torch.strided:
        return f"its weight is {weight.dtype}, {weight.layout}; FP8 casts take dense float32, bfloat16 or float16"
    return None
