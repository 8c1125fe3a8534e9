"""FP8 layers in torchtitan 0.3.0: a converter of its config tree, and scaling state in its checkpoints.

    # my_configs.py                        torchrun ... -m torchtitan.train --module my_configs --config llama3_8b_fp8
    from torchtitan.models.llama3.config_registry import llama3_8b
    from fp8engine.integrations.torchtitan import Float8Converter, with_fp8

    def llama3_8b_fp8():
        return with_fp8(llama3_8b(), Float8Converter.Config(recipe="rowwise"))

torchtitan builds a model from a tree of configs, so FP8 is put into the tree: each Linear.Config becomes a
Float8Linear.Config, and the root's config a subclass of it that, when it has built the model, gives all layers one
scaling state (fp8engine/convert/swap.py).  The layers stay torchtitan's Linear: they initialise, shard and save as
it does.
"""

from __future__ import annotations

import fnmatch
import functools
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from fp8engine.autograd import Numerics
from fp8engine.convert.placement import warn_emulated, why_emulated
from fp8engine.convert.select import HEADS, ROUTER, ROUTERS
from fp8engine.convert.swap import unite
from fp8engine.distributed.amax import states_of
from fp8engine.distributed.checkpoint import packed
from fp8engine.distributed.fsdp import gather_fp8, group_of
from fp8engine.errors import ConversionError, ParallelError, StrictError, UnknownName
from fp8engine.nn.linear import Float8Module, Linear, float8_modules
from fp8engine.numerics.recipe import Auto, Recipe, resolve
from fp8engine.ops import ranks
from fp8engine.report.state import joined_state_dict, load_scaling_state_dict
from fp8engine.scaling.table import ScalingState

STATE = "fp8engine"  # of scaling state, in a checkpoint and in --checkpoint.exclude_from_loading
HEAD = "output head: its error goes straight into the loss (name it in overrides to convert it)"


class Float8Linear(Linear, TitanLinear):
    """torchtitan's Linear with the forward and backward of fe.Linear; parameters and state_dict are Linear's.

    Built by a Float8Linear.Config alone it has a scaling state of its own; in a model that Float8Converter has
    converted, all layers share one.  Raises ParallelError in `parallelize` where its inputs would be DTensors.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """torchtitan's Linear.Config with a recipe.  recipe: its name, as reports show it."""

        recipe: str = "rowwise"
        _recipe: Recipe | None = None  # the recipe itself, where its name does not say everything

    def __init__(self, config: Config):
        TitanLinear.__init__(self, config)
        recipe = config._recipe or resolve(config.recipe)
        state = ScalingState([("", recipe)], self.weight.device)
        self.numerics = Numerics("Linear", recipe, state, standalone=True)

    def parallelize(self, parallel_dims) -> None:
        if parallel_dims.spmd_backend != "spmd_types":
            raise ParallelError(
                f"{self.numerics.name}: FP8 layers read no DTensors, which tensor parallelism under "
                f"--parallelism.spmd_backend {parallel_dims.spmd_backend} gives them; take spmd_types"
            )
        TitanLinear.parallelize(self, parallel_dims)


class Float8Converter(QuantizationConverter):
    """Converter of torchtitan's config tree: every Linear.Config that the options do not leave alone gets a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What to convert.

        recipe: a name ("rowwise", "current", "delayed", "blockwise", "auto", ...) or a Recipe.
        filter_fqns: layers whose name contains one of these are left alone; output heads and routers are anyway.
        overrides: glob over names -> recipe; the last match wins, and it wins over what is left alone.
        strict: raise where FP8 would be emulated, or a layer of torchtitan cannot be converted.
        fp8_gather: FSDP gathers the layers' weights as FP8 codes (fe.distributed.fsdp); `with_fp8` sees to it.
        """

        recipe: str | Recipe = "rowwise"
        filter_fqns: list[str] = field(default_factory=list)
        overrides: dict[str, str | Recipe] = field(default_factory=dict)
        strict: bool = False
        fp8_gather: bool = False

    def __init__(self, config: Config):
        self.config = config

    def convert(self, model_config):
        """The config tree with FP8 layers; its Linear.Configs are replaced in place, the root is a new object.

        Raises UnknownName for a recipe's name and for patterns that match no layer, ConversionError where nothing is
        left to convert, StrictError where strict=True and a layer cannot be.
        """
        found = list(model_config.traverse(TitanLinear.Config))
        names = [name for name, *_ in found]
        self._check_patterns(names)
        left: dict[str, str] = {}
        for name, config, parent, attribute in found:
            recipe, reason = self._decide(name)
            obstacle = None if recipe is None else _obstacle(config)
            if recipe is None or obstacle:
                left[name] = obstacle or reason
            elif isinstance(parent, list):
                parent[attribute] = _layer(config, recipe)
            else:
                setattr(parent, attribute, _layer(config, recipe))
            if obstacle and self.config.strict:
                raise StrictError(f"strict=True: {name} cannot be converted: {obstacle}")
        if len(left) == len(found):
            why = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:8]) or "it has no Linear.Config"
            raise ConversionError(f"nothing to convert in {type(model_config).__qualname__}: {why}")
        logger.info(f"fp8engine: {len(found) - len(left)} of {len(found)} linear layers in FP8; left alone: {left}")
        kind = _united(type(model_config))
        return kind(**_values(model_config), _left=left, _strict=self.config.strict)

    def _check_patterns(self, names: list[str]) -> None:
        for text in self.config.filter_fqns:
            if not any(text in name for name in names):
                raise UnknownName("filter_fqns entry (no linear layer's name contains it)", text, names)
        for pattern in self.config.overrides:
            if not fnmatch.filter(names, pattern):
                raise UnknownName("overrides pattern (no linear layer matches it)", pattern, names)

    def _decide(self, name: str) -> tuple[Recipe | None, str]:
        """(recipe, "") of the layer, or (None, why it is left alone)."""
        options = self.config
        override = next((r for p, r in reversed(options.overrides.items()) if fnmatch.fnmatchcase(name, p)), None)
        if override is not None:
            recipe = resolve(override)
            return (recipe, "") if recipe.is_fp8 else (None, f"overrides: {recipe.name}")
        if text := next((text for text in options.filter_fqns if text in name), None):
            return None, f"filter_fqns: {text}"
        parts = name.split(".")
        if parts[-1] in (*HEADS, "output"):
            return None, HEAD
        if any(part in ROUTERS for part in parts):
            return None, ROUTER
        return resolve(options.recipe), ""


class Float8CheckpointManager(CheckpointManager):
    """torchtitan's CheckpointManager that also saves scaling state, under "fp8engine", where losses depend on it.

    That is so for "delayed" and "auto", whose scales and formats come from earlier steps.  Under other recipes a
    checkpoint holds what torchtitan's own holds.  Model-only loads, and HF's format, are torchtitan's.  A checkpoint
    without that entry is loaded with --checkpoint.exclude_from_loading fp8engine.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, no more."""

    def __init__(self, config: Config, *, states: dict[str, Any], model_parts: list[nn.Module], **components):
        kept = ScalingStates(model_parts)
        states = {**states, STATE: kept} if kept.needed else states
        super().__init__(config, states=states, model_parts=model_parts, **components)


class ScalingStates(Stateful):
    """Scaling state of a pipeline rank's parts of the model, for torch.distributed.checkpoint.

    One object a part, named by its first FP8 layer, so that the parts of other pipeline ranks have other names.  Every
    rank that holds the part saves the same amaxes and scales: this step's are joined first.  Counters are one rank's.
    """

    def __init__(self, model_parts: Iterable[nn.Module]):
        self.parts = {layers[0].numerics.name: part for part in model_parts if (layers := float8_modules(part))}

    @property
    def needed(self) -> bool:
        """Whether the next step depends on more than the weights."""
        return any(state.delayed or state.controller is not None for state in self._states())

    def state_dict(self) -> dict[str, bytes]:
        """Collective over the ranks that share a scaling state."""
        for state in self._states():
            if state.ranks and state.delayed:
                ranks.join(state.live_2S[0], state.ranks, state.saved_1)
        return {name: packed(joined_state_dict(part)) for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Raises StateError for the state of another model, or of other recipes."""
        for name, part in self.parts.items():
            load_scaling_state_dict(part, torch.load(io.BytesIO(state_dict[name]), weights_only=True))

    def _states(self) -> Iterator[ScalingState]:
        yield from {id(state): state for part in self.parts.values() for state in states_of(part)}.values()


def with_fp8(config: Trainer.Config, converter: Float8Converter.Config) -> Trainer.Config:
    """A trainer's config with its model converted, and checkpoints that keep the scaling state.

    config: what a function of a config registry of torchtitan returns; it is not used afterwards.
    Raises as Float8Converter.convert does, and ConversionError for a config without a model or with another checkpoint
    manager: give that one `states={"fp8engine": ScalingStates(model_parts)}`.
    """
    if config.model_spec is None:
        raise ConversionError("with_fp8: config.model_spec is None; take a config of torchtitan's config registries")
    manager = config.checkpoint
    if type(manager) is not CheckpointManager.Config:
        raise ConversionError(
            f"with_fp8: {type(manager).__qualname__} is not torchtitan's CheckpointManager.Config; convert with "
            "model_registry(converters=[...]) and let your manager save ScalingStates"
        )
    spec = replace(config.model_spec, model=converter.build().convert(config.model_spec.model))
    if converter.fp8_gather:
        spec.parallelize_fn = GatherInFP8(spec.parallelize_fn, converter.strict)
    return replace(
        config,
        model_spec=spec,
        checkpoint=Float8CheckpointManager.Config(**_values(manager)),
    )


@dataclass(frozen=True)
class GatherInFP8:
    """torchtitan's way to parallelise a model, after which FSDP gathers FP8 codes of the weights that allow it.

    parallelize: the parallelize_fn of a ModelSpec, which calls fully_shard.  strict: as of `gather_fp8`.
    """

    parallelize: Callable[..., nn.Module]
    strict: bool = False

    def __call__(self, model: nn.Module, **options) -> nn.Module:
        return gather_fp8(self.parallelize(model, **options), strict=self.strict)


class FirstForward:
    """Pre-hook of a model's first forward, when its weights are where they stay: ranks are known, and the device.

    Layers under "delayed" join their amaxes over the mesh that holds the weights, so that all ranks predict the same
    scales.  Warns once of emulated FP8 (EmulationWarning), or raises StrictError.
    """

    def __init__(self, model: nn.Module, strict: bool):
        self.strict = strict
        self.hook = model.register_forward_pre_hook(self, prepend=True)

    def __call__(self, model: nn.Module, _) -> None:
        layers = float8_modules(model)
        if any(isinstance(layer.numerics.recipe, Auto) for layer in layers) and _capturing(layers[0]):
            raise ParallelError(
                "auto decides in Python between steps, which a CUDA graph does not run: --training.disable_cuda_graphs"
            )
        self.hook.remove()
        group = next((name for layer in layers if (name := _group_of(layer))), "")
        for state in states_of(model):
            state.ranks = group
        whys = [why for layer in layers if (why := why_emulated(layer.weight.device, layer.numerics.recipe))]
        if whys and self.strict:
            raise StrictError(f"strict=True: {whys[0]}: {len(whys)} layers would be emulated")
        warn_emulated(whys, stacklevel=2)


def _layer(config: TitanLinear.Config, recipe: Recipe) -> Float8Linear.Config:
    return Float8Linear.Config(**_values(config), recipe=recipe.name, _recipe=recipe)


def _values(config) -> dict[str, Any]:
    """The fields of a config, shared and not copied."""
    return {each.name: getattr(config, each.name) for each in fields(config)}


def _obstacle(config: TitanLinear.Config) -> str | None:
    """Why this config cannot be replaced without changing what its layer does, or None."""
    if isinstance(config, Float8Linear.Config):
        return "converted already"
    if type(config) is not TitanLinear.Config:
        return f"{type(config).__qualname__} is a subclass of torchtitan's Linear.Config with code of its own"
    return None


@functools.cache
def _united(kind: type) -> type:
    """The subclass of a model's config whose models have one scaling state."""

    @dataclass(kw_only=True, slots=True)
    class Config(kind):
        _left: dict[str, str] = field(default_factory=dict)  # layer -> why it is not converted
        _strict: bool = False

        def build(self, **components):
            model = kind.build(self, **components)
            unite(model, self._left, self._strict)
            FirstForward(model, self._strict)
            return model

    Config.__qualname__, Config.__module__ = kind.__qualname__, kind.__module__
    return Config


def _group_of(layer: Float8Module) -> str:
    """The name of the group of all ranks that hold a shard or a copy of the layer's weight; "" for one rank."""
    weight = layer.weight
    if not isinstance(weight, DTensor) or weight.device_mesh.size() == 1:
        return ""
    return group_of(weight.device_mesh).group_name


def _capturing(layer: Float8Module) -> bool:
    return layer.weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
